"""Optimizer state in shards over two processes, compared with replicated state.

Each process has one tower and trains with Keras's ``fit`` and Adam, over TensorFlow's
ring and over MPI. Epochs are timed; then peak memory is measured in processes that do
nothing else.
"""

import multiprocessing
import time
from functools import partial
from typing import Any

import numpy as np
from harness.ranks import Ranks
from racing import Report, memory_now, race_by

OPTIONS = {"works": "sharded_ranks.WORKS", "rounds": 15}

WORKS = {
    "narrow": "6 x 512, 1.3 million weights",
    "wide": "4 x 1,536, 7.2 million weights",
    "memory": "7 x 4,096, 400 MB of weights",
}
WIDTHS = {"narrow": (6, 512), "wide": (4, 1536), "memory": (7, 4096)}
ENGINES = {"ring": "tensorflow", "MPI": "mpi"}
REPLICATED, SHARDED = "replicated", "sharded"
OF_REPLICATED = 1.1
PATIENCE_S = 900.0
STEPS, ROWS = 32, 16  # of an epoch; of a rank's batch
_models: dict[str, Any] = {}


def main(options: Any, report: Report) -> None:
    """Races epochs over both engines, or reads what processes need at most."""
    for work in options.works:
        if work == "memory":
            _measure_memory(report)
            continue
        for engine in ENGINES:
            _race(report, work, engine, options.rounds)


def _started(engine: str) -> Ranks:
    context = multiprocessing.get_context("spawn")
    return Ranks(context, 2, engine=ENGINES[engine])


def _race(report: Report, work: str, engine: str, rounds: int) -> None:
    with _started(engine) as ranks:
        ranks.joined()
        losses = [  # of epochs that trace
            [loss for _, loss in ranks.call("sharded_ranks:epoch", work, kind)]
            for kind in (REPLICATED, SHARDED)
        ]
        np.testing.assert_allclose(*losses, rtol=1e-5)

        def seconds(kind: str) -> float:
            timed = ranks.call("sharded_ranks:epoch", work, kind)
            return max(own for own, _ in timed)

        timers = {kind: partial(seconds, kind) for kind in (REPLICATED, SHARDED)}
        title = f"{WORKS[work]}, {engine}"
        options = {"rounds": rounds, "config": engine}
        timings = race_by(title, timers, peer=REPLICATED, **options)
    report.add(timings, REPLICATED)
    report.compare(timings, SHARDED, REPLICATED, OF_REPLICATED)


def _measure_memory(report: Report) -> None:
    for engine in ENGINES:
        for kind in (REPLICATED, SHARDED):
            with _started(engine) as ranks:
                ranks.joined()
                before, peak = map(max, zip(*_peaks(ranks, kind), strict=True))
            print(f"  {engine}, {kind}: {peak} MB, {before} MB before the model")
            report.notes[f"peak in MB, {engine}, {kind}"] = peak, before


def _peaks(ranks: Ranks, kind: str) -> list[tuple[int, int]]:
    for rank in ranks.all:
        rank.say("sharded_ranks:peaks", kind)
    return [rank.hear(PATIENCE_S) for rank in ranks.all]


def epoch(group: Any, work: str, kind: str, steps: int = STEPS) -> tuple[float, float]:
    """Trains an epoch; returns its seconds, and the loss."""
    if kind not in _models:
        _models[kind] = _made(group, work, kind)
    return timed_fit(group, _models[kind], steps * ROWS)


def timed_fit(group: Any, model: Any, rows: int) -> tuple[float, float]:
    """Trains an epoch of a rank's rows; returns its seconds, and the loss."""
    random = np.random.default_rng(group.rank)
    x = random.normal(size=(rows, 64)).astype("float32")
    y = random.integers(0, 10, rows)
    _meet(group)
    start = time.monotonic()
    told = model.fit(x, y, ROWS, shuffle=False, verbose=0)
    _meet(group)
    return time.monotonic() - start, told.history["loss"][0]


def peaks(group: Any, kind: str) -> tuple[int, int]:
    """Returns the most memory in MB that this process has had, before and after steps.

    Without a model it has imported TensorFlow and Keras.
    """
    import keras

    del keras
    before = _peak()
    epoch(group, "memory", kind, steps=2)
    return before, _peak()


def _peak() -> int:
    return memory_now("VmHWM") // 10**6


def network(depth: int, width: int) -> Any:
    """Makes a network of dense layers, of equal weights on all ranks."""
    import networks

    return networks.seeded(partial(networks.dense, depth, width, 64, 10))


def _made(group: Any, work: str, kind: str) -> Any:
    import keras

    from tw_keras import TowerModel

    make = partial(network, *WIDTHS[work])
    model = TowerModel(make, ["/cpu:0"], group=group, variables=kind)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(1e-4), loss, jit_compile=False)
    return model


def _meet(group: Any) -> None:
    import tensorflow as tf

    group.sum([tf.zeros([])])
