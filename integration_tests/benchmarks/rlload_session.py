"""The contenders of the benchmark rlload that run in a session."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import tensorflow as tf
from racing import Contender, checked
from rlload_works import MINIBATCHES, RATE, Work

import tw_core
import tw_rlload

v1 = tf.compat.v1
EPOCH = "an epoch in one call"
STEPS = "a step per call"
FEEDING = "feeding each minibatch"
BY_HAND = "a loop written by hand"


@dataclass(frozen=True)
class Policy:
    """What ``build_graph`` returns."""

    loss: Any
    weights: list[Any]

    def gradients(self, optimizer: Any, losses: Any = None) -> Any:
        del losses  # RLlib's class passes ``_losses`` and a list of optimizers.
        if isinstance(optimizer, list):
            (optimizer,) = optimizer
        return optimizer.compute_gradients(self.loss, self.weights)

    @property
    def _losses(self) -> list[Any]:
        return [self.loss]

    def extra_compute_grad_feed_dict(self) -> dict[Any, Any]:
        return {}

    def _get_grad_and_stats_fetches(self) -> dict[str, Any]:
        return {}


class Policies:
    """Builds the loss, on weights that are made once; suits RLlib's class too."""

    def __init__(self, work: Work) -> None:
        self.work = work

    def __call__(self, inputs: list[tf.Tensor]) -> Policy:
        with v1.variable_scope("model", reuse=v1.AUTO_REUSE):
            weights = [
                v1.get_variable(f"w{i}", initializer=w)
                for i, w in enumerate(self.work.weights())
            ]
        return Policy(self.work.loss(weights, *inputs), weights)


class Session:
    """All contenders of a session, in one graph: towers, feeding, the original."""

    def __init__(self, work: Work) -> None:
        self.work, (self.x, self.y) = work, work.columns()
        self.build = Policies(work)
        with tf.Graph().as_default():
            self.placeholders = [
                v1.placeholder(work.dtype, [None, *work.shape]),
                v1.placeholder(tf.float32, [None]),
            ]
            self.optimizer = tw_rlload.LocalSyncParallelOptimizer(
                v1.train.GradientDescentOptimizer(RATE),
                ["/cpu:0"],
                self.placeholders,
                [],
                work.step,
                self.build,
            )
            self.fed = self.train(self.build(self.placeholders))
            self.build_original()
            self.build_by_hand()
            self.variables = v1.global_variables()
            self.reset = tf.group(*(v.initializer for v in self.variables))
            self.sess = v1.Session(config=tw_core.session_config())
        self.sess.run(self.reset)

    def train(self, policy: Any) -> Any:
        optimizer = v1.train.GradientDescentOptimizer(RATE)
        return optimizer.apply_gradients(policy.gradients(optimizer))

    def build_original(self) -> None:
        """Slices a variable that was filled by feeding, as RLlib's class did."""
        self.cut = [v1.placeholder(tf.int32, []) for _ in range(3)]
        index, size, length = self.cut
        slices, loads, self.held = [], [], []
        for placeholder in self.placeholders:
            held = v1.Variable(
                placeholder, trainable=False, validate_shape=False, collections=[]
            )
            others = placeholder.shape.rank - 1
            cut = tf.slice(
                held,
                [index // length * length, *[0] * others],
                [size // length * length, *[-1] * others],
            )
            cut.set_shape(placeholder.shape)
            slices.append(cut)
            self.held.append(held)
            loads.append(held.initializer)
        self.original = self.train(self.build(slices))
        self.original_load = tf.group(*loads)

    def build_by_hand(self) -> None:
        """Loops over slices of these variables; brings no losses out."""

        def turn(i: tf.Tensor) -> tf.Tensor:
            start, step = i * self.work.step, self.work.step
            rows = [held[start : start + step] for held in self.held]
            for tensor, placeholder in zip(rows, self.placeholders, strict=True):
                tensor.set_shape([step, *placeholder.shape[1:]])
            with tf.control_dependencies([self.train(self.build(rows))]):
                return i + 1

        self.by_hand = tf.while_loop(
            lambda i: i < MINIBATCHES, turn, [tf.constant(0)], parallel_iterations=1
        )

    def load(self) -> None:
        self.optimizer.load_data(self.sess, [self.x, self.y], [])

    def load_original(self) -> None:
        """Feeds an initialiser, as RLlib's class did."""
        rows = dict(zip(self.placeholders, (self.x, self.y), strict=True))
        self.sess.run(self.original_load, rows)

    def epoch(self) -> None:
        self.optimizer.run_epochs(self.sess, 1)

    def epoch_by_hand(self) -> None:
        self.sess.run(self.by_hand)

    def steps(self) -> None:
        for offset in self.optimizer.report.batch_offsets:
            self.optimizer.optimize(self.sess, offset)

    def original_steps(self) -> None:
        index, size, length = self.cut
        step = self.work.step
        for start in range(0, self.work.rows, step):
            feeds = {index: start, size: step, length: 1}
            self.sess.run({"train": self.original}, feeds)

    def feed(self) -> None:
        step = self.work.step
        for start in range(0, self.work.rows, step):
            rows = (self.x[start : start + step], self.y[start : start + step])
            feeds = dict(zip(self.placeholders, rows, strict=True))
            self.sess.run(self.fed, feeds)

    def built(self, want: list[Any]) -> list[Contender]:
        self.load()
        self.load_original()
        runs = {
            EPOCH: self.epoch,
            STEPS: self.steps,
            "the original's step per call": self.original_steps,
            FEEDING: self.feed,
            BY_HAND: self.epoch_by_hand,
        }
        found = []
        read = partial(self.sess.run, self.variables)
        for name, run in runs.items():
            self.sess.run(self.reset)
            found.append(checked(name, run, read, want, config="session"))
        return found
