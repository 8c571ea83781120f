"""Eight logical CPUs, and one trainer a mode."""

import sys
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

from tw_core import session_config, towers
from tw_core.testing import CPUS, NUM_CPUS, start_logical_cpus
from tw_rlload import DeviceBatch, EpochFunction, LocalSyncParallelOptimizer

start_logical_cpus()

# For the modules beside this one that several tests import.
sys.path.insert(0, str(Path(__file__).parent))

v1 = tf.compat.v1


@pytest.fixture
def graph():
    with tf.Graph().as_default() as graph:
        yield graph


class GraphLoss:
    """What ``build_graph`` returns, as a policy of RLlib would."""

    def __init__(self, returned):
        self._loss, others = returned if isinstance(returned, tuple) else (returned, {})
        self.others = others

    def gradients(self, optimizer):
        return optimizer.compute_gradients(self._loss)

    def extra_compute_grad_fetches(self):
        return self.others


class GraphTrainer:
    """Trains in a session graph."""

    def __init__(
        self, stack, loss_fn, weights, columns, states, devices, maximum, opt, more
    ):
        stack.enter_context(tf.Graph().as_default())

        def placeholders(specs):
            made = [(np.dtype(d), [None, *s], n) for n, (d, s) in specs.items()]
            return [v1.placeholder(*arguments) for arguments in made]

        def build_graph(inputs, row_weights=None):
            variables = {
                name: v1.get_variable(
                    name, initializer=tf.constant(value), dtype=value.dtype
                )
                for name, value in weights.items()
            }
            named = dict(zip([*columns, *states], inputs, strict=True))
            extra = [] if row_weights is None else [row_weights]
            return GraphLoss(loss_fn(variables, named, *extra))

        self.optimizer = LocalSyncParallelOptimizer(
            opt(),
            list(CPUS[:devices]),
            placeholders(columns),
            placeholders(states),
            maximum,
            build_graph,
            **more,
        )
        self.saved = {v.op.name: v for v in v1.global_variables()}
        self.copies = {v.op.name: v for v in v1.local_variables()}
        self.sess = stack.enter_context(
            v1.Session(config=session_config(num_cpus=NUM_CPUS))
        )
        self.sess.run(v1.global_variables_initializer())
        self.sess.run(v1.local_variables_initializer())
        self.names = list(weights)

    @property
    def report(self):
        return self.optimizer.report

    def load(self, columns, states=()):
        self.optimizer.load_data(self.sess, columns, states)
        return self.report

    def load_next(self, columns, states=()):
        self.optimizer.load_next(self.sess, columns, states)

    def use_next(self, timeout_s=60.0):
        self.optimizer.use_next(timeout_s)
        return self.report

    def optimize(self, batch_index):
        return self.optimizer.optimize(self.sess, batch_index)

    def run_epochs(self, *args, **kwargs):
        return self.optimizer.run_epochs(self.sess, *args, **kwargs)

    def weights(self):
        first = {name: self.sess.run(self.saved[name]) for name in self.names}
        for name, copy in self.copies.items():
            original = name.partition("/")[2]
            np.testing.assert_array_equal(self.sess.run(copy), first[original])
        return first


class Weights(tf.Module):
    """A model that is its variables."""

    def __init__(self, values):
        super().__init__()
        self.by_name = {n: tf.Variable(v, name=n) for n, v in values.items()}


class FunctionTrainer:
    """Trains in a ``tf.function``, with a model and an optimizer a tower."""

    def __init__(
        self, stack, loss_fn, weights, columns, states, devices, maximum, opt, more
    ):
        del stack
        made = towers(list(CPUS[:devices]))

        def specs(given):
            return {n: tf.TensorSpec([None, *s], d) for n, (d, s) in given.items()}

        both = ("reducer", "grad_norm_clipping", "apply_fn", "sparse_gradients")
        training = {name: more.pop(name) for name in both if name in more}
        self.batch = DeviceBatch(
            made,
            specs(columns),
            specs(states),
            max_per_device_batch_size=maximum,
            **more,
        )
        self.models = []
        for tower in made:
            with tf.device(tower.device):
                self.models.append(Weights(weights))
        self.function = EpochFunction(
            self.batch,
            lambda model, *inputs: loss_fn(model.by_name, *inputs),
            self.models,
            [opt() for _ in (made[:1] if "apply_fn" in training else made)],
            **training,
        )

    @property
    def report(self):
        return self.batch.report

    def load(self, columns, states=()):
        return self.batch.load(columns, states)

    def load_next(self, columns, states=()):
        self.batch.load_next(columns, states)

    def use_next(self, timeout_s=60.0):
        return self.batch.use_next(timeout_s)

    def optimize(self, batch_index):
        return self.function.optimize(batch_index)

    def run_epochs(self, *args, **kwargs):
        return self.function.run_epochs(*args, **kwargs)

    def weights(self):
        first, *others = [
            {name: v.numpy() for name, v in model.by_name.items()}
            for model in self.models
        ]
        for other in others:
            for name, value in first.items():
                np.testing.assert_array_equal(value, other[name])
        return first


@pytest.fixture(params=[GraphTrainer, FunctionTrainer], ids=["graph", "function"])
def make_trainer(request):
    """Makes a trainer of one mode.

    ``loss_fn(variables, inputs[, weights])`` takes dictionaries; columns are
    name -> (dtype, inner shape).
    """
    with ExitStack() as stack:

        def make(
            loss_fn,
            weights,
            columns,
            states=None,
            *,
            devices=2,
            maximum=4,
            opt=lambda: v1.train.GradientDescentOptimizer(1.0),
            **more,
        ):
            given = (loss_fn, weights, columns, states or {}, devices, maximum, opt)
            return request.param(stack, *given, more)

        yield make
