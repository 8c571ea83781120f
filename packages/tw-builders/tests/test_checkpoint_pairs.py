"""A checkpoint of any way to train is resumed by any other, bit for bit.

Gradients are means of small whole numbers over a power of two of rows: exact, however
many towers share them, so that all runs must agree in every bit.
"""

from functools import cache, partial
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory

import keras
import numpy as np
import pytest
import tensorflow as tf

from tw_builders import (
    SyncMultiGPUParameterServerBuilder,
    SyncMultiGPUReplicatedBuilder,
    SyncMultiGPUShardedBuilder,
    apply_gradients,
    apply_sharded_gradients,
    apply_shared_gradients,
    make_optimizers,
    make_sharded_optimizer,
)
from tw_core import (
    copy_to_replicas,
    get_current_tower_context,
    map_towers,
    replicate,
    towers,
)
from tw_core.testing import CPUS
from tw_reduce import mean, sum_balanced

v1 = tf.compat.v1
CONFIG = v1.ConfigProto(device_count={"CPU": len(CPUS)})
ROWS, STEPS, STOP_AFTER = 8, 6, 3
SHAPES = {"layer/w": (6, 5), "layer/b": (5,), "out/w": (5, 4), "scale": ()}
# A way to train, and its number of towers.
PLAIN = [("replicated", 2), ("parameter server", 4), ("sharded", 2), ("sharded", 4)]
FLAT = [("flat", 2), ("flat server", 2), ("flat sharded", 4)]
WAYS = [*PLAIN, *FLAT]
BELOW_BYTES = 100  # the largest variable stays alone


def each_pair(ways, optimizers, of_flat=None):
    """Every target and source; those with flat variables with one optimizer only."""
    return pytest.mark.parametrize(
        ("source", "target", "optimizer"),
        [
            (source, target, optimizer)
            for target, optimizer, source in product(ways, optimizers, ways)
            if optimizer == of_flat or not {source, target} & set(FLAT)
        ],
        ids=str,
    )


def assert_same(got, want, ways, name=""):
    if set(ways) & set(FLAT):
        # The last elements of a vector go through other instructions than the rest.
        np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-9, err_msg=name)
    else:
        np.testing.assert_array_equal(got, want, err_msg=name)


@cache
def whole_numbers():
    """[steps][N][rows, ...] float32: the gradient of each row."""
    random = np.random.default_rng(5)
    return [
        [
            random.integers(-4, 5, (ROWS, *shape)).astype(np.float32)
            for shape in SHAPES.values()
        ]
        for _ in range(STEPS)
    ]


# In a session graph, by names.

GRAPH_OPTIMIZERS = {
    "momentum": partial(v1.train.MomentumOptimizer, 0.05, 0.9),
    "Adam": partial(v1.train.AdamOptimizer, 0.02),
    "Adagrad": partial(v1.train.AdagradOptimizer, 0.1),
}
BUILDERS = {
    "replicated": partial(SyncMultiGPUReplicatedBuilder, average=True, mode="cpu"),
    "parameter server": partial(SyncMultiGPUParameterServerBuilder, ps_device="gpu"),
    "sharded": partial(SyncMultiGPUShardedBuilder, average=True),
}
BUILDERS |= {
    flat: partial(BUILDERS[plain], flat_below_bytes=BELOW_BYTES)
    for flat, plain in {
        "flat": "replicated",
        "flat server": "parameter server",
        "flat sharded": "sharded",
    }.items()
}


class GraphRun:
    """A training graph with its session's own values."""

    def __init__(self, way, optimizer):
        kind, num_towers = way
        self.graph = tf.Graph()
        with self.graph.as_default():
            self.fed = [v1.placeholder(tf.float32, (ROWS, *s)) for s in SHAPES.values()]
            shards = [tf.split(rows, num_towers) for rows in self.fed]

            def tower():
                k = get_current_tower_context().index
                return [
                    (
                        tf.reduce_mean(rows[k], 0),
                        v1.get_variable(name, initializer=_start(shape)),
                    )
                    for (name, shape), rows in zip(SHAPES.items(), shards, strict=True)
                ]

            builder = BUILDERS[kind](list(CPUS[:num_towers]))
            grads = builder.call_for_each_tower(tower)
            ops = builder.build(grads, GRAPH_OPTIMIZERS[optimizer])
            self.train_op, self.sync = ops if isinstance(ops, tuple) else (ops, None)
            self.saver = v1.train.Saver()
            self.copies = [[v for _, v in own] for own in grads]
            self.init = [
                v1.global_variables_initializer(),
                v1.local_variables_initializer(),
            ]
        self.session = v1.Session(graph=self.graph, config=CONFIG)
        self.begin()

    def begin(self):
        self.session.run(self.init)
        self.run_sync()

    def run_sync(self):
        if self.sync is not None:
            self.session.run(self.sync)

    def save(self, prefix):
        with self.graph.as_default():
            return self.saver.save(self.session, prefix)

    def restore(self, path):
        with self.graph.as_default():
            self.saver.restore(self.session, path)
        self.run_sync()

    def train(self, steps):
        for numbers in steps:
            self.session.run(self.train_op, dict(zip(self.fed, numbers, strict=True)))

    def values(self):
        """Saves, and reads each array that was saved, by its name."""
        with TemporaryDirectory() as folder:
            reader = tf.train.load_checkpoint(self.save(str(Path(folder, "model"))))
            return {n: reader.get_tensor(n) for n in reader.get_variable_to_shape_map()}


def _start(shape):
    size = int(np.prod(shape))
    return np.linspace(-1, 1, size, dtype=np.float32).reshape(shape)


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """Source and optimizer -> path of a checkpoint, and the values at the end."""

    @cache
    def run(way, optimizer):
        source = GraphRun(way, optimizer)
        source.train(whole_numbers()[:STOP_AFTER])
        folder = tmp_path_factory.mktemp("stopped")
        path = source.save(str(folder / "model"))
        source.train(whole_numbers()[STOP_AFTER:])
        return path, source.values()

    return run


@pytest.fixture(scope="module")
def resuming():
    """Target and optimizer -> the run that resumes one checkpoint after the other."""
    return cache(GraphRun)


@each_pair(WAYS, GRAPH_OPTIMIZERS, of_flat="Adam")
def test_a_session_resumes_any_others_checkpoint(
    stopped, resuming, source, target, optimizer
):
    path, want = stopped(source, optimizer)
    resumed = resuming(target, optimizer)
    resumed.begin()
    resumed.restore(path)
    resumed.train(whole_numbers()[STOP_AFTER:])
    got = resumed.values()
    assert set(got) == set(want)
    for name, value in want.items():
        assert_same(got[name], value, [source, target], name)
    for copy in resumed.copies:
        for variable, name in zip(copy, SHAPES, strict=True):
            np.testing.assert_array_equal(resumed.session.run(variable), got[name])


@pytest.mark.parametrize("optimizer", GRAPH_OPTIMIZERS)
def test_all_ways_save_the_same_names_and_shapes(stopped, optimizer):
    listed = [tf.train.list_variables(stopped(way, optimizer)[0]) for way in WAYS]
    assert all(names == listed[0] for names in listed[1:])
    assert set(SHAPES) < {name for name, _ in listed[0]}


def test_all_ways_end_alike(stopped):
    first = stopped(WAYS[0], "Adam")[1]
    for way in WAYS[1:]:
        other = stopped(way, "Adam")[1]
        for name, value in first.items():
            assert_same(other[name], value, [way], name)


# In a tf.function, by objects.

FUNCTION_OPTIMIZERS = {
    "v1 momentum": partial(v1.train.MomentumOptimizer, 0.05, 0.9),
    "v1 Adam": partial(v1.train.AdamOptimizer, 0.02),
    "Keras momentum": partial(keras.optimizers.SGD, 0.05, momentum=0.9),
    "Keras Adam": partial(keras.optimizers.Adam, 0.02),
}


class Module(tf.Module):
    def __init__(self):
        super().__init__()
        self.parts = [
            tf.Variable(tf.ones(shape), name=name.replace("/", "_"))
            for name, shape in SHAPES.items()
        ]


class FunctionRun:
    """A training function with what ``tf.train.Checkpoint`` saves of it."""

    def __init__(self, way, optimizer):
        kind, num_towers = way
        ours = towers(list(CPUS[:num_towers]))
        shared, make = "server" in kind, FUNCTION_OPTIMIZERS[optimizer]
        is_sharded = "sharded" in kind
        self.models = replicate(ours[:1] if shared else ours, lambda tower: Module())
        parts = [model.parts for model in self.models]
        if is_sharded:
            applied, saved = make_sharded_optimizer(ours, make, parts)
            self.optimizers = [saved]
        else:
            used = make_optimizers(ours[: len(parts)], make, parts)
            self.optimizers = used
        reducer = mean(partial(sum_balanced, devices=CPUS[:num_towers]))

        @tf.function(autograph=False)
        def step(rows):
            shards = [tf.split(own, num_towers) for own in rows]

            def gradients(tower):
                return [tf.reduce_mean(rows[tower.index], 0) for rows in shards]

            grads = map_towers(gradients, ours)
            if is_sharded:
                apply_sharded_gradients(ours, grads, parts, applied)
            elif shared:
                pairs = [list(zip(own, parts[0], strict=True)) for own in grads]
                apply_shared_gradients(pairs, used[0])
            else:
                apply_gradients(ours, reducer(grads), parts, used)

        self._step = step
        # A checkpoint of each replica that has an optimizer; the first one is saved.
        self.checkpoints = [
            tf.train.Checkpoint(model=model, optimizer=own)
            for model, own in zip(self.models, self.optimizers, strict=False)
        ]

    def restore(self, path):
        for checkpoint in self.checkpoints:
            checkpoint.restore(path).assert_consumed()
        copy_to_replicas([model.parts for model in self.models])

    def train(self, steps):
        for numbers in steps:
            self._step([tf.constant(rows) for rows in numbers])

    def copies(self):
        return [[part.numpy() for part in model.parts] for model in self.models]

    def saved(self, folder):
        """Saves, and reads each array that was saved, by its key."""
        reader = tf.train.load_checkpoint(self.checkpoints[0].save(str(folder / "all")))
        keys = [k for k in reader.get_variable_to_shape_map() if "GRAPH" not in k]
        return {k: reader.get_tensor(k) for k in keys if "save_counter" not in k}


@pytest.fixture(scope="module")
def stopped_function(tmp_path_factory):
    @cache
    def run(way, optimizer):
        source = FunctionRun(way, optimizer)
        source.train(whole_numbers()[:STOP_AFTER])
        folder = tmp_path_factory.mktemp("stopped")
        path = source.checkpoints[0].save(str(folder / "model"))
        source.train(whole_numbers()[STOP_AFTER:])
        return path, source.copies()[0], source.saved(folder)

    return run


@pytest.fixture(scope="module")
def resuming_function():
    """As ``resuming``. What a checkpoint left as it was would have its run's end."""
    return cache(FunctionRun)


@each_pair(PLAIN, FUNCTION_OPTIMIZERS)
def test_a_function_resumes_any_others_checkpoint(
    stopped_function, resuming_function, tmp_path, source, target, optimizer
):
    path, want, want_saved = stopped_function(source, optimizer)
    resumed = resuming_function(target, optimizer)
    resumed.restore(path)
    resumed.train(whole_numbers()[STOP_AFTER:])
    for parts in resumed.copies():
        for got, wanted in zip(parts, want, strict=True):
            assert_same(got, wanted, [source, target])
    saved = resumed.saved(tmp_path)
    assert saved.keys() == want_saved.keys()
    for key, value in want_saved.items():
        assert_same(saved[key], value, [source, target], key)


@pytest.mark.parametrize("optimizer", FUNCTION_OPTIMIZERS)
def test_all_ways_save_the_same_structure(stopped_function, optimizer):
    listed = [
        tf.train.list_variables(stopped_function(way, optimizer)[0]) for way in PLAIN
    ]
    assert all(names == listed[0] for names in listed[1:])


# Keras's own files.


def keras_model():
    model = keras.Sequential([keras.Input([3]), keras.layers.Dense(2, name="dense")])
    model.set_weights([np.ones([3, 2]), np.zeros([2])])
    return model


def test_keras_files_of_a_sharded_run_are_those_of_a_plain_one(tmp_path):
    ours = towers(list(CPUS[:2]))
    models = replicate(ours, lambda tower: keras_model())
    make = partial(keras.optimizers.Adam, 0.1)
    optimizer, saved = make_sharded_optimizer(ours, make, models)
    plain, alone = keras_model(), make()
    grads = [tf.fill([3, 2], 0.5), tf.fill([2], -1.0)]
    for _ in range(2):
        tf.function(apply_sharded_gradients, autograph=False)(
            ours, [grads, grads], models, optimizer
        )
        alone.apply(grads, plain.trainable_variables)
    models[0].save_weights(tmp_path / "of.weights.h5")
    loaded = keras_model()
    loaded.load_weights(tmp_path / "of.weights.h5")
    for got, want in zip(loaded.get_weights(), plain.get_weights(), strict=True):
        np.testing.assert_array_equal(got, want)
    ours_of, want_of = {}, {}
    saved.save_own_variables(ours_of)
    alone.save_own_variables(want_of)
    assert ours_of.keys() == want_of.keys()
    for key, want in want_of.items():
        np.testing.assert_array_equal(ours_of[key], want)
