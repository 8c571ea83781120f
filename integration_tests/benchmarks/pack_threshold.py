"""From which size on a tensor is better left out of a pack: a sweep over sizes.

Each table adds 64 tensors of one size, alone and as one pack; the ratio crosses
1 where packing stops to pay. That is later where every tower gets a copy.
"""

import argparse
import itertools
from functools import partial

import tensorflow as tf
from harness import Report, Timing, in_own_process, race
from profiles import Profile
from reduce import SessionRace
from reduce_inputs import Arrays

import tw_core
import tw_reduce

v1 = tf.compat.v1
ALONE = "each alone"
TENSORS = 64
SIZES = [1_024, 2_048, 4_096, 8_192, 16_384, 65_536]
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


def main(arguments: list[str]) -> None:
    """Sweeps the size of tensors, packed and alone."""
    parser = argparse.ArgumentParser(prog="pack_threshold", description=main.__doc__)
    parser.add_argument("--rounds", type=int, default=31, help="turns (%(default)s)")
    parser.add_argument("--towers", type=int, nargs="*", default=[2, 4, 8])
    parser.add_argument("--sizes", type=int, nargs="*", default=SIZES)
    options = parser.parse_args(arguments)
    report = Report("pack_threshold")
    for towers in options.towers:
        for size, kind in itertools.product(options.sizes, KINDS):
            cell = in_own_process(run_cell, towers, size, kind, options.rounds)
            report.add(cell, ALONE)
    report.write()
