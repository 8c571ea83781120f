"""The contenders of the benchmark rlload on two devices: ours, and RLlib's class."""

import importlib
from collections.abc import Callable
from functools import partial
from typing import Any

import tensorflow as tf
from racing import Contender, checked
from rlload_session import Policies
from rlload_works import RATE, Work

import tw_core
import tw_rlload

v1 = tf.compat.v1


class TwoTowers:
    """A step per call on two devices, beside RLlib's present class."""

    def __init__(self, work: Work, want: list[Any]) -> None:
        self.work, (self.x, self.y), self.want = work, work.columns(), want
        self.per_device = work.step // 2

    def built(self) -> list[Contender]:
        found = [self.race_entry("tw-rlload", self.ours)]
        stack = rllib_tower_stack()
        if stack is None:
            print("RLlib's TFMultiGPUTowerStack is left out: ray[rllib] is missing")
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
