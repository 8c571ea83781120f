"""The smallest size for which a tensor is better left unpacked: a sweep over sizes.

Each table adds 64 tensors of one size, alone and as one pack; the ratio crosses 1 where
packing no longer pays; at larger sizes if every tower gets a copy.
"""

import itertools
from functools import partial
from typing import Any

import tensorflow as tf
from profiles import Profile
from racing import Report, Timing, race
from reduce import SessionRace
from reduce_inputs import Arrays

import tw_core
import tw_reduce

OPTIONS = {
    "rounds": 31,
    "towers": [2, 4, 8],
    "sizes": [1_024, 2_048, 4_096, 8_192, 16_384, 65_536],
}

v1 = tf.compat.v1
ALONE = "each alone"
TENSORS = 64
KINDS = ["on one device", "balanced", "on one device, copied to all"]


def run_cell(towers: int, size: int, kind: str, rounds: int) -> list[Timing]:
    """Races a pack with its tensors alone, under one way to add."""
    devices = tw_core.use_logical_cpus(towers)
    profile = Profile(f"{TENSORS} tensors of {size:,}", ((size,),) * TENSORS)
    config = v1.ConfigProto(device_count={"CPU": towers})
    session = SessionRace(Arrays(profile, towers), config, "")
    on_device = partial(tw_reduce.sum_on_device, device=devices[0])
    reducer = {
        "on one device": on_device,
        "balanced": partial(tw_reduce.sum_balanced, devices=devices),
        "on one device, copied to all": tw_reduce.broadcast(on_device),
    }[kind]
    contenders = session.contenders(
        {
            ALONE: reducer,
            "packed": tw_reduce.packed(reducer, below_bytes=4 * (size + 1)),
        }
    )
    title = f"{profile.name} {kind}, K = {towers}"
    return race(title, contenders, peer=ALONE, rounds=rounds)


def main(options: Any, report: Report) -> None:
    """Sweeps the size of tensors, packed and alone."""
    for towers in options.towers:
        for size, kind in itertools.product(options.sizes, KINDS):
            report.race(ALONE, run_cell, towers, size, kind, options.rounds)
