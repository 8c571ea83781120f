"""Training on a dataset's batches: who cuts them, copies them and waits for them.

A dataset has a map that takes about two milliseconds of a core per batch. In functions
``tw_builders.per_tower`` races MirroredStrategy's distributed dataset, each with its
own training step; in sessions ``StagingInput`` races feeding what the dataset gives.
The bounds take the same steps on parts that are in memory. A run is an epoch, from a
new iterator on. Before anything is timed, an epoch must leave each contender with the
variables that one device reaches.
"""

import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf
from harness import Contender, Report, Timing, in_own_process, race

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


def towers_step(model: str, towers: int) -> tuple[Any, Any, Any]:
    ours = tw_core.towers([f"/cpu:{k}" for k in range(towers)])
    models = tw_core.map_towers(
        lambda _: [tf.Variable(w) for w in weights_of(model)], ours
    )
    make = partial(v1.train.MomentumOptimizer, RATE, MOMENTUM)
    optimizers = tw_builders.make_optimizers(ours, make, models)
    reduce = tw_reduce.mean(tw_reduce.all_reduce([tower.device for tower in ours]))

    def gradients(_: Any, variables: Weights, part: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = loss_of(variables, *part)
        return tape.gradient(loss, variables)

    @tf.function(autograph=False)
    def step(parts: Any) -> None:
        grads = tw_core.map_towers(gradients, ours, models, parts)
        tw_builders.apply_gradients(ours, reduce(grads), models, optimizers)

    return ours, step, lambda: [w.numpy() for w in models[0]]


def per_tower(model: str, turns: int, towers: int, *, kind: str) -> Built:
    ours, step, values = towers_step(model, towers)
    inputs = tw_builders.per_tower(dataset(model, turns), ours)
    if kind == "memory":
        parts = list(inputs)
        return over(lambda: iter(parts), step), values
    if kind == "cut in the step":

        @tf.function(autograph=False)
        def cut(x: Any, y: Any) -> None:
            step(list(zip(tf.split(x, towers), tf.split(y, towers), strict=True)))

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
    towers = strategy.num_replicas_in_sync
    with strategy.scope():
        variables = [tf.Variable(w) for w in weights_of(model)]
        optimizer = tf.keras.optimizers.SGD(RATE, momentum=MOMENTUM)
        optimizer.build(variables)

    def replica_step(x: Any, y: Any) -> None:
        with tf.GradientTape() as tape:
            loss = loss_of(variables, x, y) / towers
        grads = tape.gradient(loss, variables)
        optimizer.apply_gradients(list(zip(grads, variables, strict=True)))

    @tf.function(autograph=False)
    def step(item: Any) -> None:
        strategy.run(replica_step, args=item)

    inputs = strategy.experimental_distribute_dataset(dataset(model, turns))
    items = list(inputs) if in_memory else inputs
    return over(lambda: iter(items), step), lambda: [w.numpy() for w in variables]


def in_session(model: str, turns: int, towers: int, *, kind: str) -> Built:
    devices = [f"/cpu:{k}" for k in range(towers)]
    source = dataset(model, turns).prefetch(2)
    with tf.Graph().as_default() as graph:
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

        grads = builder.call_for_each_tower(tower)
        train_op, sync_op = builder.build(
            grads, partial(v1.train.MomentumOptimizer, RATE, MOMENTUM)
        )
        sess = v1.Session(graph=graph, config=tw_core.session_config())
        sess.run([v1.global_variables_initializer(), v1.local_variables_initializer()])
        sess.run(sync_op or [])
        values = partial(sess.run, [w for _, w in grads[0]])
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


def checked(name: str, built: Built, want: Any, *, is_bound: bool = False) -> Contender:
    epoch, values = built
    epoch()
    for got, value in zip(values(), want, strict=True):
        np.testing.assert_allclose(got, value, atol=TOLERANCE, err_msg=name)
    return Contender(name, epoch, is_bound=is_bound)


def run_cell(model: str, towers: int, rounds: int) -> list[list[Timing]]:
    """Races the epochs of a model on a number of towers, in both modes."""
    tw_core.use_logical_cpus(towers)
    turns = calibrated()
    epoch, values = per_tower(model, turns, 1, kind="per_tower")
    epoch()
    want = values()
    strategy = tf.distribute.MirroredStrategy([f"/cpu:{k}" for k in range(towers)])
    ours = partial(per_tower, model, turns, towers)
    theirs = partial(mirrored, strategy, model, turns)
    session = partial(in_session, model, turns, towers)
    bound = partial(checked, want=want, is_bound=True)
    functions = [
        checked(STRATEGY, theirs(in_memory=False), want),
        checked("per_tower", ours(kind="per_tower"), want),
        checked("per_tower, an epoch in a call", ours(kind="one call"), want),
        checked("batches cut in the step", ours(kind="cut in the step"), want),
        bound("MirroredStrategy, in memory", theirs(in_memory=True)),
        bound("towers, in memory", ours(kind="memory")),
    ]
    sessions = [
        checked(FEEDING, session(kind=FEEDING), want),
        checked("StagingInput", session(kind="StagingInput"), want),
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
