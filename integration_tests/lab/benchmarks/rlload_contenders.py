"""The contenders of the benchmark rlload: sessions, TensorFlow 2, and two towers."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import tensorflow as tf
from racing import Contender, checked
from rlload_works import MINIBATCHES, RATE, Work
from training import Weights, values_of

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


class Functions:
    """All contenders of TensorFlow 2."""

    def __init__(self, work: Work, want: list[Any]) -> None:
        self.work, (self.x, self.y), self.want = work, work.columns(), want

    def built(self) -> list[Contender]:
        makers = {
            EPOCH: self.epoch,
            "tf.data range and slice": self.range_and_slice,
            "tf.data range and slice, one call": self.range_and_slice_inside,
            "tf.data from memory, prefetched": self.from_tensors,
        }
        found = []
        for name, make in makers.items():
            model = Weights(self.work.weights())
            read = partial(values_of, model)
            run = make(model)
            found.append(checked(name, run, read, self.want, config="tf.function"))
        return found

    def epoch(self, model: Weights) -> Callable[[], Any]:
        work = self.work
        specs = {"x": tf.TensorSpec([None, *work.shape], work.dtype)}
        specs["y"] = tf.TensorSpec([None])
        batch = tw_rlload.DeviceBatch(
            tw_core.towers(["/cpu:0"]), specs, max_per_device_batch_size=work.step
        )
        function = tw_rlload.EpochFunction(
            batch,
            lambda own, inputs: work.loss(own.all, inputs["x"], inputs["y"]),
            [model],
            [v1.train.GradientDescentOptimizer(RATE)],
        )
        batch.load({"x": self.x, "y": self.y})
        return lambda: function.run_epochs(1)

    def range_and_slice(self, model: Weights) -> Callable[[], Any]:
        """A dataset of numbers, in Python, and a call a step that slices."""
        return self.over_starts(tf.function(self.sliced_step_of(model)))

    def range_and_slice_inside(self, model: Weights) -> Callable[[], Any]:
        """The same with the loop over the dataset inside of one function."""
        return tf.function(self.over_starts(self.sliced_step_of(model)))

    def over_starts(self, step: Callable[[Any], None]) -> Callable[[], None]:
        starts = tf.data.Dataset.range(0, self.work.rows, self.work.step)

        def epoch() -> None:
            for start in starts:
                step(start)

        return epoch

    def from_tensors(self, model: Weights) -> Callable[[], Any]:
        """A dataset of whole minibatches, in Python."""
        step = tf.function(self.step_of(model))
        x = self.x.reshape(-1, self.work.step, *self.work.shape)
        y = self.y.reshape(-1, self.work.step)
        rows = tf.data.Dataset.from_tensor_slices((x, y)).prefetch(tf.data.AUTOTUNE)

        def run() -> None:
            for x, y in rows:
                step(x, y)

        return run

    def sliced_step_of(self, model: Weights) -> Callable[[Any], None]:
        step, size = self.step_of(model), self.work.step
        x, y = tf.constant(self.x), tf.constant(self.y)
        return lambda start: step(x[start : start + size], y[start : start + size])

    def step_of(self, model: Weights) -> Callable[[Any, Any], None]:
        optimizer = v1.train.GradientDescentOptimizer(RATE)

        def step(x: Any, y: Any) -> None:
            with tf.GradientTape() as tape:
                loss = self.work.loss(model.all, x, y)
            grads = tape.gradient(loss, model.all)
            optimizer.apply_gradients(zip(grads, model.all, strict=True))

        return step


class TwoTowers:
    """A step per call on two devices, beside RLlib's present class."""

    def __init__(self, work: Work, want: list[Any]) -> None:
        self.work, (self.x, self.y), self.want = work, work.columns(), want
        self.per_device = work.step // 2

    def built(self) -> list[Contender]:
        found = [self.race_entry("tw-rlload", self.ours)]
        stack = rllib_tower_stack()
        if stack is None:
            print("RLlib's TFMultiGPUTowerStack is skipped: ray[rllib] is missing")
            return found
        return [*found, self.race_entry("RLlib's", lambda *a: self.rllib(stack, *a))]

    def race_entry(self, whose: str, make: Callable[..., Any]) -> Contender:
        with tf.Graph().as_default():
            placeholders = [
                v1.placeholder(self.work.dtype, [None, *self.work.shape], "x"),
                v1.placeholder(tf.float32, [None], "y"),
            ]
            trainer = make(placeholders, Policies(self.work))
            variables = v1.global_variables()
            sess = v1.Session(config=tw_core.session_config(num_cpus=2))
            sess.run(v1.global_variables_initializer())
        per_device = trainer.load_data(sess, [self.x, self.y], [])

        def run() -> None:
            for start in range(0, per_device, self.per_device):
                trainer.optimize(sess, start)

        read = partial(sess.run, variables)
        return checked(f"{whose} step per call", run, read, self.want)

    def ours(self, placeholders: list[tf.Tensor], build: Any) -> Any:
        return tw_rlload.LocalSyncParallelOptimizer(
            v1.train.GradientDescentOptimizer(RATE),
            ["/cpu:0", "/cpu:1"],
            placeholders,
            [],
            self.per_device,
            build,
        )

    def rllib(self, stack: Any, placeholders: list[tf.Tensor], build: Any) -> Any:
        build(placeholders)  # makes the variables, as a policy does
        return stack(policy=RllibPolicy(placeholders, build, self.work.step))


class RllibPolicy:
    """The least that RLlib's class asks of a policy."""

    def __init__(self, placeholders: list[tf.Tensor], build: Any, step: int) -> None:
        self.devices = ["/cpu:0", "/cpu:1"]
        self.config = {
            "minibatch_size": step,
            "grad_clip": None,
            "_tf_policy_handles_more_than_one_loss": False,
        }
        self.copy = build
        self._optimizers = [v1.train.GradientDescentOptimizer(RATE)]
        self._loss_input_dict_no_rnn = dict(zip("xy", placeholders, strict=True))
        self._state_inputs: list[tf.Tensor] = []


def rllib_tower_stack() -> Any:
    """Returns RLlib's class, or None where it is not installed."""
    try:
        module = importlib.import_module("ray.rllib.policy.dynamic_tf_policy")
    except ImportError:
        return None
    return module.TFMultiGPUTowerStack
