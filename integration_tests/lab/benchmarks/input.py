"""Training on a dataset's batches, which are cut, copied and prefetched.

A dataset has a map that takes about two milliseconds of a core per batch. In functions
``tw_builders.per_tower`` races MirroredStrategy's distributed dataset, each with its
own training step; in sessions ``StagingInput`` races feeding of the dataset's batches.
The bounds run the same steps on parts in memory. A run is an epoch, with a new
iterator. Before anything is timed, an epoch must leave each contender with the
variables that one device reaches.
"""

import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf
import training
from racing import Contender, Report, Timing, checked, in_own_process, race

import tw_builders
import tw_core
import tw_reduce
from tw_builders.tensorpack import StagingInput

OPTIONS = {"rounds": 21, "towers": [2, 4], "models": "input.SHAPES"}

v1 = tf.compat.v1
STRATEGY = "MirroredStrategy, distributed dataset"
FEEDING = "feeding"
BATCH, BATCHES = 64, 96
MAP_S = 2e-3
RATE, MOMENTUM = 0.01, 0.9
TOLERANCE = 1e-4  # of variables of order one, in float32 after an epoch
SHAPES = {
    "MLP": [(64, 256), (256,), (256, 256), (256,), (256, 10), (10,)],
    "convolutions": [(3, 3, 1, 16), (16,), (3, 3, 16, 32), (32,), (512, 10), (10,)],
}
Weights = list[Any]


def weights_of(model: str) -> list[np.ndarray]:
    random = np.random.default_rng(0)
    return [
        random.normal(0, np.prod(shape[:-1]) ** -0.5, shape).astype(np.float32)
        if len(shape) > 1
        else np.zeros(shape, np.float32)
        for shape in SHAPES[model]
    ]


def loss_of(w: Weights, images: Any, labels: Any) -> Any:
    """Dense layers, or two convolutions of stride 1 and 2 and a dense layer."""
    x = images
    for n, (kernel, bias) in enumerate(zip(w[::2], w[1::2], strict=True)):
        if kernel.shape.rank == 4:
            x = tf.nn.relu(tf.nn.conv2d(x, kernel, n + 1, "SAME") + bias)
            continue
        x = tf.reshape(x, [-1, kernel.shape[0]]) @ kernel + bias
        x = tf.nn.relu(x) if n < len(w) // 2 - 1 else x
    return tf.reduce_mean(
        tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=x)
    )


def worked(x: Any, turns: Any) -> Any:
    """Multiplies small matrices, and returns zero."""
    start = tf.fill([128, 128], tf.reduce_sum(x) * 1e-30)
    _, last = tf.while_loop(
        lambda n, _: n < turns, lambda n, m: (n + 1, m @ m), (0, start)
    )
    return last[0, 0] * 0


def calibrated() -> int:
    """Returns how many turns of ``worked`` take ``MAP_S``."""
    call = tf.function(worked)
    x, turns = tf.ones([8]), 100
    call(x, tf.constant(turns))
    times = []
    for _ in range(5):
        start = time.perf_counter()
        call(x, tf.constant(turns))
        times.append(time.perf_counter() - start)
    return max(1, round(turns * MAP_S / min(times)))


def dataset(model: str, turns: int) -> tf.data.Dataset:
    random = np.random.default_rng(1)
    rows = BATCH * BATCHES
    shape = (rows, 8, 8, 1) if model == "convolutions" else (rows, 64)
    images = random.standard_normal(shape).astype(np.float32)
    labels = random.integers(0, 10, rows)
    batches = tf.data.Dataset.from_tensor_slices((images, labels))
    batches = batches.batch(BATCH, drop_remainder=True)
    return batches.map(lambda x, y: (x + worked(x, turns), y))


Epoch = Callable[[], None]
Built = tuple[Epoch, Callable[[], list[np.ndarray]]]


def over(items: Callable[[], Iterator[Any]], step: Callable[[Any], Any]) -> Epoch:
    def epoch() -> None:
        for item in items():
            step(item)

    return epoch


def weights_loss(model: training.Weights, x: Any, y: Any) -> Any:
    return loss_of(model.all, x, y)


def momentum() -> Any:
    return v1.train.MomentumOptimizer(RATE, MOMENTUM)


def per_tower(model: str, turns: int, towers: int, *, kind: str) -> Built:
    ours = tw_core.towers(training.cpus(towers))
    devices = [tower.device for tower in ours]
    take, trained = training.function_step(
        devices,
        lambda: training.Weights(weights_of(model)),
        weights_loss,
        momentum,
        reduce=tw_reduce.all_reduce(devices),
    )
    inputs = tw_builders.per_tower(dataset(model, turns), ours)
    values = partial(training.values_of, trained)

    def step(parts: Any) -> None:
        take(*map(list, zip(*parts, strict=True)))

    if kind == "memory":
        parts = list(inputs)
        return over(lambda: iter(parts), step), values
    if kind == "cut in the step":

        @tf.function(autograph=False)
        def cut(x: Any, y: Any) -> None:
            take(tf.split(x, towers), tf.split(y, towers))

        source = dataset(model, turns).prefetch(2)
        return over(lambda: iter(source), lambda batch: cut(*batch)), values
    if kind == "one call":
        whole = tf.function(
            lambda: inputs.reduce((), lambda state, parts: (step(parts), state)[1]),
            autograph=False,
        )
        return whole, values
    return over(lambda: iter(inputs), step), values


def mirrored(strategy: Any, model: str, turns: int, *, in_memory: bool) -> Built:
    step, trained = training.mirrored_step(
        strategy,
        lambda: training.Weights(weights_of(model)),
        weights_loss,
        partial(tf.keras.optimizers.SGD, RATE, momentum=MOMENTUM),
    )
    inputs = strategy.experimental_distribute_dataset(dataset(model, turns))
    items = list(inputs) if in_memory else inputs
    take = over(lambda: iter(items), lambda item: step(*item))
    return take, partial(training.values_of, trained)


def in_session(model: str, turns: int, towers: int, *, kind: str) -> Built:
    devices = training.cpus(towers)
    source = dataset(model, turns).prefetch(2)
    with tf.Graph().as_default():
        if kind == FEEDING:
            spec = source.element_spec
            whole = [v1.placeholder(one.dtype, one.shape) for one in spec]
            halves = [tf.split(tensor, towers) for tensor in whole]
            parts = list(zip(*halves, strict=True))
        else:
            staging = StagingInput(dataset(model, turns), devices)
            parts = staging.parts
        builder = tw_builders.SyncMultiGPUReplicatedBuilder(devices)

        def tower() -> Any:
            w = [
                v1.get_variable(f"w{n}", initializer=value)
                for n, value in enumerate(weights_of(model))
            ]
            k = tw_core.get_current_tower_context().index
            return list(zip(tf.gradients(loss_of(w, *parts[k]), w), w, strict=True))

        sess, train_op, [first, *_] = training.session_step(builder, tower, momentum)
        values = partial(sess.run, first)
        if kind == FEEDING:
            feed = sess.make_callable(train_op, feed_list=whole)
            items = source.as_numpy_iterator
            return over(items, lambda batch: feed(*batch)), values
        start = sess.make_callable(staging.initializer)
        step = sess.make_callable(tf.group(train_op, staging.stage))

    def epoch() -> None:
        start()
        try:
            while True:
                step()
        except tf.errors.OutOfRangeError:
            return

    return epoch, values


def run_cell(model: str, towers: int, rounds: int) -> list[list[Timing]]:
    """Races the epochs of a model on a number of towers, in both modes."""
    tw_core.use_logical_cpus(towers)
    turns = calibrated()
    epoch, values = per_tower(model, turns, 1, kind="per_tower")
    epoch()
    want = values()
    strategy = tf.distribute.MirroredStrategy(training.cpus(towers))
    ours = partial(per_tower, model, turns, towers)
    theirs = partial(mirrored, strategy, model, turns)
    session = partial(in_session, model, turns, towers)

    def epochs(name: str, built: Built, *, is_bound: bool = False) -> Contender:
        own = {"atol": TOLERANCE, "is_bound": is_bound}
        return checked(name, *built, want, rtol=1e-7, **own)

    functions = [
        epochs(STRATEGY, theirs(in_memory=False)),
        epochs("per_tower", ours(kind="per_tower")),
        epochs("per_tower, an epoch in a call", ours(kind="one call")),
        epochs("batches cut in the step", ours(kind="cut in the step")),
        epochs("MirroredStrategy, in memory", theirs(in_memory=True), is_bound=True),
        epochs("towers, in memory", ours(kind="memory"), is_bound=True),
    ]
    sessions = [
        epochs(FEEDING, session(kind=FEEDING)),
        epochs("StagingInput", session(kind="StagingInput")),
    ]
    title = f"{model}, K = {towers}, {BATCHES} batches of {BATCH}"
    return [
        race(f"{title}, tf.function", functions, peer=STRATEGY, rounds=rounds),
        race(f"{title}, session", sessions, peer=FEEDING, rounds=rounds),
    ]


def main(options: Any, report: Report) -> None:
    """Races epochs over a dataset whose map takes time."""
    for model in options.models:
        for towers in options.towers:
            cell = in_own_process(run_cell, model, towers, options.rounds)
            for timings, peer in zip(cell, (STRATEGY, FEEDING), strict=True):
                report.add(timings, peer)
