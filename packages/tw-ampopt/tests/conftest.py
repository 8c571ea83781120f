"""Logical CPUs before TensorFlow starts, and one trainer for each mode.

A trainer has K towers of N variables, whose gradients are what it is fed: the loss is
the sum of each variable times its feed.
"""

import numpy as np
import pytest
import tensorflow as tf

import tw_ampopt
from tw_core import session_config, towers
from tw_core.testing import SparseRows, start_logical_cpus

start_logical_cpus()


def loss_of(variables, feeds):
    """Gives each variable its feed as gradient; a feed of None leaves it out."""
    terms = []
    for variable, feed in zip(variables, feeds, strict=True):
        if isinstance(feed, SparseRows):
            rows = tf.gather(variable, feed.indices)
            terms.append(tf.reduce_sum(rows * tf.cast(feed.values, variable.dtype)))
        elif feed is not None:
            product = variable * tf.cast(feed, variable.dtype)
            terms.append(tf.reduce_sum(product))
    return tf.add_n([tf.cast(term, tf.float32) for term in terms])


class GraphTrainer:
    """``Optimizer`` in a session; closed by the fixture that made it."""

    mode = "graph"

    def __init__(
        self,
        initial,
        num_towers=1,
        *,
        feeds_like=None,
        accumulation_steps=None,
        weighs=False,
        **arguments,
    ):
        self.weights = [] if weighs else None
        self.graph = tf.Graph()
        like = initial if feeds_like is None else feeds_like
        with self.graph.as_default():
            self.build(initial, like, num_towers, accumulation_steps, arguments)
            config = session_config(num_cpus=8)
            self.session = tf.compat.v1.Session(graph=self.graph, config=config)
            self.session.run(tf.compat.v1.global_variables_initializer())

    def build(self, initial, like, num_towers, steps, arguments):
        self.optimizer = tw_ampopt.Optimizer(
            minibatch_multiplier=steps() if callable(steps) else steps, **arguments
        )
        self.towers, self.placeholders = [], []
        for k in range(num_towers):
            with tf.device(f"/cpu:{k}"):
                variables = [
                    tf.Variable(v, name=f"v{n}") for n, v in enumerate(initial)
                ]
                feeds = tf.nest.map_structure(_placeholder, list(like))
                weight = {}
                if self.weights is not None:
                    weight["weight"] = tf.compat.v1.placeholder(tf.int32, [])
                    self.weights.append(weight["weight"])
                loss = loss_of(variables, feeds)
                self.optimizer.register_gradients(loss, variables, **weight)
            self.towers.append(variables)
            self.placeholders.append(feeds)
        self.train = self.optimizer.apply_updates()
        self.read = self.optimizer.statistics()

    def step(self, *feeds, weights=None):
        flat = dict(zip(self.weights or [], weights or [], strict=True))
        places, values = map(tf.nest.flatten, (self.placeholders, feeds))
        flat |= {p: v for p, v in zip(places, values, strict=True) if p is not None}
        self.session.run(self.train, flat)

    def values(self):
        return self.session.run(self.towers)

    def state(self):
        variables = self.optimizer.variables()
        return self.session.run(variables)

    def statistics(self):
        return self.session.run(self.read)

    def reset(self):
        with self.session.as_default():
            self.optimizer.reset_optimizer_state()

    def slot(self, k, n, name):
        return self.session.run(self.optimizer.get_slot(self.towers[k][n], name))

    def save(self, folder):
        with self.graph.as_default():
            return tf.compat.v1.train.Saver().save(self.session, f"{folder}/at")

    def restore(self, path):
        with self.graph.as_default():
            tf.compat.v1.train.Saver().restore(self.session, path)

    def close(self):
        self.session.close()


class FunctionTrainer:
    """``TowerOptimizer`` in a ``tf.function``, with the same methods."""

    mode = "function"

    def __init__(
        self,
        initial,
        num_towers=1,
        *,
        feeds_like=None,
        accumulation_steps=None,
        weighs=False,
        **arguments,
    ):
        self.towers = []
        for k in range(num_towers):
            with tf.device(f"/cpu:{k}"):
                self.towers.append([tf.Variable(v) for v in initial])
        steps = accumulation_steps
        self.optimizer = tw_ampopt.TowerOptimizer(
            self.towers,
            towers=towers([f"/cpu:{k}" for k in range(num_towers)]),
            accumulation_steps=steps() if callable(steps) else steps,
            **arguments,
        )
        self.traces = 0
        self.train = tf.function(self._train, autograph=False)

    def _train(self, feeds, weights):
        self.traces += 1
        grads = []
        for k, (variables, tower) in enumerate(zip(self.towers, feeds, strict=True)):
            with tf.device(f"/cpu:{k}"), tf.GradientTape() as tape:
                loss = loss_of(variables, tower)
                loss = self.optimizer.apply_loss_scaling(loss)
            grads.append(tape.gradient(loss, variables))
        return self.optimizer.apply(grads, weights=weights)

    def step(self, *feeds, weights=None):
        own = None if weights is None else [tf.constant(weight) for weight in weights]
        fed = tf.nest.map_structure(
            lambda feed: None if feed is None else tf.constant(feed), list(feeds)
        )
        self.train(fed, own)

    def values(self):
        return [[v.numpy() for v in tower] for tower in self.towers]

    def state(self):
        return [v.numpy() for v in self.optimizer.variables()]

    def statistics(self):
        return {key: v.numpy() for key, v in self.optimizer.statistics().items()}

    def reset(self):
        self.optimizer.reset_optimizer_state()

    def slot(self, k, n, name):
        return self.optimizer.get_slot(self.towers[k][n], name).numpy()

    def save(self, folder):
        return self._checkpoint().save(f"{folder}/at")

    def restore(self, path):
        self._checkpoint().read(path).assert_existing_objects_matched()
        self.optimizer.copy_to_replicas()

    def _checkpoint(self):
        return tf.train.Checkpoint(model=self.towers[0], optimizer=self.optimizer)

    def close(self):
        pass


@pytest.fixture(params=[GraphTrainer, FunctionTrainer], ids=["graph", "function"])
def make_trainer(request):
    """Makes trainers of one mode, and closes them."""
    made = []

    def make(*args, **kwargs):
        made.append(request.param(*args, **kwargs))
        return made[-1]

    make.mode = request.param.mode
    yield make
    for trainer in made:
        trainer.close()


def _placeholder(feed):
    if feed is None:
        return None
    return tf.compat.v1.placeholder(np.asarray(feed).dtype, np.shape(feed))
