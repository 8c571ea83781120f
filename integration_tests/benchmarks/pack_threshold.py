"""From which size on a tensor is better left out of a pack: a sweep over sizes.

Each table adds 64 tensors of one size, alone and as one pack; the ratio crosses
1 where packing stops to pay.
"""

import argparse
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
SIZES = [256, 1_024, 4_096, 8_192, 16_384, 32_768, 65_536, 262_144]


def run_cell(towers: int, size: int, rounds: int) -> list[Timing]:
    """Races a pack with its tensors alone, on one device and spread over all."""
    devices = tw_core.use_logical_cpus(towers)
    profile = Profile(f"{TENSORS} tensors of {size:,}", ((size,),) * TENSORS)
    config = v1.ConfigProto(device_count={"CPU": towers})
    session = SessionRace(Arrays(profile, towers), config, "")
    on_device = partial(tw_reduce.sum_on_device, device=devices[0])
    balanced = partial(tw_reduce.sum_balanced, devices=devices)
    contenders = session.contenders(
        {
            ALONE: on_device,
            "packed": tw_reduce.packed(on_device, below=size + 1),
            "balanced, each alone": balanced,
            "balanced, packed": tw_reduce.packed(balanced, below=size + 1),
        }
    )
    title = f"{profile.name}, K = {towers}"
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
        for size in options.sizes:
            cell = in_own_process(run_cell, towers, size, options.rounds)
            report.add(cell, ALONE)
    report.write()
