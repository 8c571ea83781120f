"""What a rank sends in a step of ``fit``: counted by the kernel, and as described.

For the only user of its network, as ``tw-launch --isolate`` makes it.
"""

import json
import re
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

import tw_ranks
from tw_core import use_logical_cpus
from tw_keras import TowerModel
from tw_reduce import compression

WIDTH, ROWS = 512, 2  # of each rank in a batch
STEPS = (2, 8, 40)  # of three fits
REDUCERS = {
    "none": None,
    "power_sgd": compression.power_sgd(rank=4),
    "int8": compression.error_feedback(compression.int8()),
    "sign": compression.error_feedback(compression.sign()),
    "top_k": compression.error_feedback(compression.top_k(0.01)),
}


def make() -> keras.Model:
    hidden = [keras.layers.Dense(WIDTH, "relu") for _ in range(2)]
    return keras.Sequential([keras.Input([WIDTH]), *hidden, keras.layers.Dense(10)])


def count_sent() -> int:
    """Returns the bytes that all ranks have sent, over the loopback interface."""
    [line] = [
        own for own in Path("/proc/net/dev").read_text().splitlines() if "lo:" in own
    ]
    return int(line.partition(":")[2].split()[8])


def main() -> None:
    group = tw_ranks.join()
    size, random = group.size, np.random.default_rng(0)
    x = random.normal(size=(STEPS[-1] * ROWS * size, WIDTH)).astype("float32")
    for name, reducer in REDUCERS.items():
        model = TowerModel(
            make, use_logical_cpus(1), group=group, data="shared", reducer=reducer
        )
        model.compile(keras.optimizers.SGD(0.01), "mse")
        marks = []
        for steps in STEPS:
            rows = x[: steps * ROWS * size]
            model.fit(rows, rows[:, :10], batch_size=ROWS * size, verbose=0)
            group.sum([tf.zeros([1])], names=["all have finished"])
            marks.append(count_sent())
        _, second, third = STEPS
        # What a fit sends apart from its steps is in both differences.
        of_steps = (marks[2] - marks[1]) - (marks[1] - marks[0])
        counted = of_steps / (third - second) / size
        told = model.reducer_states[0].describe(ranks=size) if reducer else ""
        numbers = [int(own.replace(",", "")) for own in re.findall(r"[\d,]+\d", told)]
        if group.rank == 0:
            print("FOUND", json.dumps([name, counted, numbers]), flush=True)
    group.leave()


if __name__ == "__main__":
    main()
