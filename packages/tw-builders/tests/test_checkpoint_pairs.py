"""A checkpoint of any way to train is resumed by any other, bit for bit.

Gradients are means of small whole numbers over a power of two of rows: exact, however
many towers share them, so that all runs must agree in every bit. Each way is compared
with the next and resumes its checkpoint: those of all are alike, then.
"""

from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory

import keras
import numpy as np
import pytest
import tensorflow as tf
from function_ways import make_apply
from session_builders import SYNCHRONOUS, build, new_session

from tw_builders import apply_sharded_gradients, make_sharded_optimizer
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
ROWS, STEPS, STOP_AFTER = 8, 6, 3
SHAPES = {"layer/w": (6, 5), "layer/b": (5,), "out/w": (5, 4), "scale": ()}
# A way to train, and its number of towers.
PLAIN = [("replicated", 2), ("spread server", 4), ("sharded", 2), ("sharded", 4)]
FLAT = [("flat replicated", 2), ("flat spread server", 2), ("flat sharded", 4)]
BELOW_BYTES = 100  # the largest variable stays alone


def assert_same(got, want, ways):
    assert got.keys() == want.keys()
    for name, value in want.items():
        if set(ways) & set(FLAT):
            # The last elements of a vector go through other instructions.
            close = {"rtol": 1e-6, "atol": 1e-9, "err_msg": name}
            np.testing.assert_allclose(got[name], value, **close)
        else:
            np.testing.assert_array_equal(got[name], value, err_msg=name)


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


def start(shape):
    size = int(np.prod(shape))
    return np.linspace(-1, 1, size, dtype=np.float32).reshape(shape)


GRAPH_OPTIMIZERS = {
    "momentum": partial(v1.train.MomentumOptimizer, 0.05, 0.9),
    "Adam": partial(v1.train.AdamOptimizer, 0.02),
}
FUNCTION_OPTIMIZERS = {
    "v1 momentum": partial(v1.train.MomentumOptimizer, 0.05, 0.9),
    "v1 Adam": partial(v1.train.AdamOptimizer, 0.02),
    "Keras Adam": partial(keras.optimizers.Adam, 0.02),
}


class Run:
    """Training that is saved; ``copies`` are [K] values of the model by name."""

    def saved(self):
        """Saves, and reads each array that was saved, by its name."""
        with TemporaryDirectory() as folder:
            reader = tf.train.load_checkpoint(self.save(str(Path(folder, "model"))))
            names = reader.get_variable_to_shape_map()
            names = {n for n in names if "GRAPH" not in n and "save_counter" not in n}
            return {n: reader.get_tensor(n) for n in names}


class GraphRun(Run):
    """In a session graph, saved by names."""

    def __init__(self, way, optimizer):
        kind, num_towers = way
        make = SYNCHRONOUS[kind.removeprefix("flat ")]
        options = {"flat_below_bytes": BELOW_BYTES} if "flat" in kind else {}
        self.graph = tf.Graph()
        with self.graph.as_default():
            self.fed = [v1.placeholder(tf.float32, (ROWS, *s)) for s in SHAPES.values()]
            shards = [tf.split(rows, num_towers) for rows in self.fed]

            def tower():
                k = get_current_tower_context().index
                return [
                    (
                        tf.reduce_mean(rows[k], 0),
                        v1.get_variable(name, initializer=start(shape)),
                    )
                    for (name, shape), rows in zip(SHAPES.items(), shards, strict=True)
                ]

            self.grads, self.train_op, sync = build(
                make(list(CPUS[:num_towers]), **options),
                *(tower, GRAPH_OPTIMIZERS[optimizer]),
            )
            self.sync = tf.no_op() if sync is None else sync
            self.saver = v1.train.Saver()
            self.session = new_session()
        self.session.run(self.sync)

    def save(self, prefix):
        with self.graph.as_default():
            return self.saver.save(self.session, prefix)

    def restore(self, path):
        with self.graph.as_default():
            self.saver.restore(self.session, path)
        self.session.run(self.sync)

    def train(self, steps):
        for numbers in steps:
            self.session.run(self.train_op, dict(zip(self.fed, numbers, strict=True)))

    def copies(self):
        values = self.session.run([[v for _, v in own] for own in self.grads])
        return [dict(zip(SHAPES, own, strict=True)) for own in values]


class Module(tf.Module):
    def __init__(self):
        super().__init__()
        self.parts = [
            tf.Variable(start(shape), name=name.replace("/", "_"))
            for name, shape in SHAPES.items()
        ]


class FunctionRun(Run):
    """In a ``tf.function``, saved by objects."""

    def __init__(self, way, optimizer):
        kind, num_towers = way
        ours = towers(list(CPUS[:num_towers]))
        kind = "shared" if "server" in kind else kind
        own = ours[:1] if kind == "shared" else ours
        self.models = replicate(own, lambda tower: Module())
        parts = [model.parts for model in self.models]
        reducer = mean(partial(sum_balanced, devices=CPUS[:num_towers]))
        make = FUNCTION_OPTIMIZERS[optimizer]
        apply, used = make_apply(kind, ours, make, parts, reducer)

        @tf.function(autograph=False)
        def step(rows):
            shards = [tf.split(own, num_towers) for own in rows]

            def gradients(tower):
                return [tf.reduce_mean(rows[tower.index], 0) for rows in shards]

            apply(map_towers(gradients, ours))

        self._step = step
        # A checkpoint of each replica that has an optimizer; the first one is saved.
        self.checkpoints = [
            tf.train.Checkpoint(model=model, optimizer=own)
            for model, own in zip(self.models, used, strict=False)
        ]

    def save(self, prefix):
        return self.checkpoints[0].save(prefix)

    def restore(self, path):
        for checkpoint in self.checkpoints:
            checkpoint.restore(path).assert_consumed()
        copy_to_replicas([model.parts for model in self.models])

    def train(self, steps):
        for numbers in steps:
            self._step([tf.constant(rows) for rows in numbers])

    def copies(self):
        values = [[part.numpy() for part in model.parts] for model in self.models]
        return [dict(zip(SHAPES, own, strict=True)) for own in values]


def ring(ways):
    return zip(ways, [*ways[1:], ways[0]], strict=True)


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """Trains; gives the run, a checkpoint, and what is saved then and at the end."""

    @cache
    def train(make, way, optimizer):
        run = make(way, optimizer)
        run.train(whole_numbers()[:STOP_AFTER])
        path = run.save(str(tmp_path_factory.mktemp("stopped") / "model"))
        at_stop = run.saved()
        run.train(whole_numbers()[STOP_AFTER:])
        return run, path, at_stop, run.saved(), run.copies()[0]

    return train


@pytest.mark.parametrize(
    ("make", "optimizer", "source", "target"),
    [
        *((GraphRun, "Adam", *ways) for ways in ring([*PLAIN, *FLAT])),
        *((GraphRun, "momentum", *ways) for ways in ring(PLAIN)),
        *((FunctionRun, "v1 momentum", *ways) for ways in ring(PLAIN[:3])),
        *((FunctionRun, "v1 Adam", *ways) for ways in ring(PLAIN[:3])),
        *((FunctionRun, "Keras Adam", *ways) for ways in ring(PLAIN)),
    ],
)
def test_ways_are_saved_alike_and_resume_each_others_checkpoints(
    stopped, make, optimizer, source, target
):
    ways = source, target
    _, path, at_stop, at_end, model = stopped(make, source, optimizer)
    resumed, _, other_stop, other_end, _ = stopped(make, target, optimizer)
    assert len(at_stop) > len(SHAPES)
    assert_same(other_stop, at_stop, ways)
    assert_same(other_end, at_end, ways)
    resumed.restore(path)  # what it left as it was would have its run's end
    resumed.train(whole_numbers()[STOP_AFTER:])
    assert_same(resumed.saved(), at_end, ways)
    for copy in resumed.copies():
        assert_same(copy, model, ways)


def test_what_keras_saves_of_a_sharded_optimizer_is_that_of_a_plain_one():
    ours = towers(list(CPUS[:2]))
    models = replicate(ours, lambda tower: Module())
    make = FUNCTION_OPTIMIZERS["Keras Adam"]
    optimizer, saved = make_sharded_optimizer(ours, make, models)
    plain, alone = Module(), make()
    grads = [tf.fill(shape, 0.5) for shape in SHAPES.values()]
    for _ in range(2):
        tf.function(apply_sharded_gradients, autograph=False)(
            ours, [grads, grads], models, optimizer
        )
        alone.apply(grads, plain.parts)
    ours_of, want_of = {}, {}
    saved.save_own_variables(ours_of)
    alone.save_own_variables(want_of)
    assert ours_of.keys() == want_of.keys()
    for key, want in want_of.items():
        np.testing.assert_array_equal(ours_of[key], want)
