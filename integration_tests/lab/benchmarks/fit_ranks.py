"""Keras's ``fit`` over two processes: ours, Horovod's names, and TensorFlow's strategy.

Every rank is a process with all contenders; the parent starts an epoch on all ranks at
the same time, measures the slowest rank, and runs the contenders in turn. One more
process trains two towers on all rows. Before anything is timed, all must have the same
losses. Keras's ``fit`` does not run under MultiWorkerMirroredStrategy, which uses its
own loop here.
"""

import contextlib
import statistics
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
from harness.ports import find_free_ports
from racing import Block, Report, answer, blocks_in, make, race_blocks, tasks

OPTIONS = {"works": "fit_ranks.WORKS", "rounds": 21}

RANKS = 2
OF_PEER, OF_TOWERS_AND_SUMS = 0.6, 1.15
PEER = "MultiWorkerMirroredStrategy, own loop"
OURS = "TowerModel(group=...)"
HOROVOD = "horovod.keras.DistributedOptimizer"
ONE_PROCESS = "one process, two towers"
EXCHANGES = "sums of its gradients alone"
NAMES = (PEER, OURS, HOROVOD, EXCHANGES)
WORKS = {"small": "2 x 64", "convolutional": "two convolutions"}
STEPS, BATCH = 100, 32  # of all ranks

Made = tuple[Callable[[], Any], Callable[[], Any]]


def main(options: Any, report: Report) -> None:
    """Races epochs over processes."""
    for work in options.works:
        with started(work) as blocks:
            title = f"epoch over two processes, {work}"
            timings = race_blocks(title, blocks, peer=PEER, rounds=options.rounds)
        report.add(timings, PEER)
        report.compare(timings, OURS, PEER, OF_PEER)
        times = {timing.name: timing.times_s for timing in timings}
        rounds = zip(*(times[n] for n in (OURS, ONE_PROCESS, EXCHANGES)), strict=True)
        measured = statistics.median(own / (one + sums) for own, one, sums in rounds)
        what = f"{title}: {OURS} / ({ONE_PROCESS} + {EXCHANGES})"
        report.target(what, measured, OF_TOWERS_AND_SUMS)


@contextlib.contextmanager
def started(work: str) -> Iterator[dict[str, Block]]:
    """Starts two ranks, and one process with two towers."""
    ports = find_free_ports(RANKS + 1)
    with tasks() as start:
        ranks = [start(serve_rank, ports, rank, work) for rank in range(RANKS)]
        alone = [start(serve_one, work, RANKS)]
        (want,) = make(alone, ONE_PROCESS, 1)
        for name in NAMES:
            read = make(ranks, name, 1)
            if name != EXCHANGES:
                np.testing.assert_allclose(read, want, rtol=1e-4, err_msg=name)
        yield blocks_in(ranks, NAMES) | blocks_in(alone, [ONE_PROCESS])


def serve_rank(pipe: Any, ports: list[int], rank: int, work: str) -> None:
    """Makes contenders, and runs epochs of them, until the pipe closes."""
    from allreduce_rank import join_beside, make_strategy

    *theirs, ours = ports
    strategy = make_strategy(theirs, rank)
    group = join_beside(rank, len(theirs), ours)
    makers = {
        PEER: partial(_strategy, strategy, group, work),
        OURS: partial(_ours, group, work),
        HOROVOD: partial(_horovod, group, work),
        EXCHANGES: partial(_exchanges, group, work),
    }
    answer(pipe, lambda name: makers[name]())


def serve_one(pipe: Any, work: str, towers: int) -> None:
    """Trains towers of one process."""
    import tw_core

    devices = tw_core.use_logical_cpus(towers)
    answer(pipe, lambda _: _towers(devices, work))


def _rows(rank: int, size: int) -> tuple[Any, Any]:
    """Returns a rank's rows of every batch."""
    import fit

    def own(array: Any) -> Any:
        batches = array.reshape(STEPS, size, BATCH // size, *array.shape[1:])
        return batches[:, rank].reshape(-1, *array.shape[1:])

    return tuple(map(own, fit.data()))


def _make(work: str) -> Any:
    import fit
    import keras

    keras.utils.set_random_seed(0)
    return fit.WORKS[work]()


def _fitted(model: Any, rows: Any, batch: int, optimizer: Any = None) -> Made:
    import keras

    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    adam = optimizer or keras.optimizers.Adam(epsilon=1e-3)
    model.compile(adam, loss, jit_compile=False)
    losses: list[float] = []

    def run() -> None:
        options = {"batch_size": batch, "shuffle": False, "verbose": 0}
        losses[:] = model.fit(*rows, **options).history["loss"]

    return run, lambda: losses[0]


def _ours(group: Any, work: str) -> Made:
    from tw_keras import TowerModel

    model = TowerModel(partial(_make, work), ["/cpu:0"], group=group)
    return _fitted(model, _rows(group.rank, group.size), BATCH // group.size)


def _towers(devices: Any, work: str) -> Made:
    from tw_keras import TowerModel

    return _fitted(TowerModel(partial(_make, work), devices), _rows(0, 1), BATCH)


def _horovod(group: Any, work: str) -> Made:
    import keras

    import tw_horovod.keras as hvd
    import tw_ranks
    from tw_horovod._state import group as state

    state._group = group  # hvd.init() would join another one
    adam = hvd.DistributedOptimizer(keras.optimizers.Adam(epsilon=1e-3))
    rows = _rows(group.rank, group.size)
    run, read = _fitted(_make(work), rows, BATCH // group.size, adam)

    def mean() -> float:  # as MetricAverageCallback does
        [[total]] = tw_ranks.sum_across([[_tensor(read())]], group=group)
        return float(total) / group.size

    means: list[float] = []

    def run_and_average() -> None:
        run()
        means[:] = [mean()]

    return run_and_average, lambda: means[0]


def _tensor(value: float) -> Any:
    import tensorflow as tf

    return tf.constant(value)


def _exchanges(group: Any, work: str) -> Made:
    import tensorflow as tf

    shapes = [own.shape for own in _make(work).trainable_variables]
    grads = [tf.Variable(tf.ones(shape)) for shape in shapes]

    @group.bounded
    @tf.function
    def step() -> None:
        sums = group.sum([own.read_value() for own in grads])
        for own, total in zip(grads, sums, strict=True):
            own.assign(total / group.size)

    def run() -> None:
        for _ in range(STEPS):
            step()

    return run, lambda: 0.0


def _strategy(strategy: Any, group: Any, work: str) -> Made:
    import keras
    import tensorflow as tf

    with strategy.scope():
        model = _make(work)
        adam = keras.optimizers.Adam(epsilon=1e-3)
        adam.build(model.trainable_variables)
        mean = keras.metrics.Mean()
    find = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    dataset = tf.data.Dataset.from_tensor_slices(_rows(group.rank, group.size))
    dataset = dataset.batch(BATCH // group.size, drop_remainder=True).prefetch(2)
    batches = strategy.distribute_datasets_from_function(lambda _: dataset)

    def replica(x: Any, y: Any) -> None:
        with tf.GradientTape() as tape:
            # Keras divides it by the replicas, whose gradients are added.
            loss = find(y, model(x, training=True))
        grads = tape.gradient(loss, model.trainable_variables)
        adam.apply_gradients(zip(grads, model.trainable_variables, strict=True))
        mean.update_state(loss * group.size)

    step = tf.function(lambda x, y: strategy.run(replica, args=(x, y)))

    def run() -> None:
        mean.reset_state()
        for x, y in batches:
            step(x, y)

    return run, lambda: float(mean.result())
