"""Plain Adam, as in StyleGAN2's ``dnnlib/tflib/optimizer.py``.

It follows Kingma and Ba, "Adam" (2015), in the form with the bias correction in the
learning rate. TensorFlow's op fuses the update; this class spells it out in ordinary
ops, so it runs wherever those run.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import tensorflow as tf

from tw_ampopt._checks.arguments import check_differentiation, check_name, check_slot
from tw_ampopt._checks.gradients import check_application
from tw_ampopt._variables import make_state
from tw_ampopt._wrapped.factory import check_learning_rate
from tw_core.internal import (
    check_number,
    scalar_of,
    weight_dtype,
    without_autograph,
)

_SLOTS = ("m", "v")


class SimpleAdam:
    """A v1-style Adam for session graphs and ``tf.function``.

    With gradient g and learning rate a, update t = 1, 2, ... computes::

        m = beta1 * m + (1 - beta1) * g
        v = beta2 * v + (1 - beta2) * g**2
        variable -= a * sqrt(1 - beta2**t) / (1 - beta1**t) * m / (sqrt(v) + epsilon)
    """

    elementwise = True

    def __init__(
        self,
        name: str = "Adam",
        learning_rate: float | tf.Tensor | Callable[[], Any] = 0.001,
        beta1: float = 0.9,
        beta2: float = 0.999,
        epsilon: float = 1e-8,
    ) -> None:
        """Stores the settings; state is made when variables are known.

        Args:
          name: prefix of the state's names.
          learning_rate: number, scalar tensor, or function of no arguments.
          beta1: decay of the mean gradient, in [0, 1).
          beta2: decay of the mean squared gradient, in [0, 1).
          epsilon: added to the root of the mean square.

        Raises:
          TypeError: an argument has the wrong type.
          ValueError: a decay outside of [0, 1), a negative epsilon, a learning rate
            that is not finite or not a scalar, or an invalid name of a scope.
        """
        check_name(name)
        if isinstance(learning_rate, tf.Variable) or not callable(learning_rate):
            check_learning_rate(learning_rate)
        check_number(at_least=0, below=1, beta1=beta1)
        check_number(at_least=0, below=1, beta2=beta2)
        check_number(at_least=0, epsilon=epsilon)
        self.name = name
        self.learning_rate = learning_rate
        self.beta1 = beta1
        self.beta2 = beta2
        self.epsilon = epsilon
        self._powers: list[tf.Variable] = []
        self._slots: dict[int, dict[str, tf.Variable]] = {}

    @without_autograph
    def compute_gradients(
        self,
        loss: tf.Tensor,
        var_list: Sequence[tf.Variable] | None = None,
        **options: Any,
    ) -> list[tuple[Any, tf.Variable]]:
        """Returns [N] (gradient or None, variable) pairs of a scalar loss.

        Args:
          loss: scalar tensor of a graph.
          var_list: by default all trainable variables of the graph.
          **options: options of ``tf.compat.v1.gradients``.

        Raises:
          RuntimeError: in eager mode.
          TypeError: an invalid loss, variable or option.
          ValueError: no variables, a non-scalar loss, or anything of another graph.
        """
        if tf.executing_eagerly():
            raise RuntimeError(
                "compute_gradients needs a graph; call it inside a tf.function, or use "
                "a GradientTape and apply_gradients."
            )
        variables = check_differentiation(
            *(loss, var_list, options),
            default=tf.compat.v1.trainable_variables(),
            gradients=tf.compat.v1.gradients,
        )
        grads = tf.compat.v1.gradients(loss, variables, **options)
        return list(zip(grads, variables, strict=True))

    @without_autograph
    def apply_gradients(
        self,
        grads_and_vars: Sequence[tuple[Any, tf.Variable]],
        global_step: tf.Variable | None = None,
        name: str | None = None,
    ) -> tf.Operation:
        """Returns the op that applies [N] pairs; None gradients are left out.

        Raises:
          TypeError: an invalid pair, gradient, variable or counter.
          ValueError: no gradient at all, a repeated variable, or a gradient
            whose shape is not its variable's.
        """
        pairs = zip(
            *check_application(grads_and_vars, global_step, name),
            strict=True,
        )
        present = [(grad, var) for grad, var in pairs if grad is not None]
        with tf.name_scope(name or self.name):
            ops, rate = self._advance(present[0][1])
            for grad, var in present:
                with tf.device(var.device):
                    ops.append(self._apply_one(tf.convert_to_tensor(grad), var, rate))
            if global_step is not None:
                with tf.control_dependencies(ops):
                    ops.append(global_step.assign_add(1, read_value=False))
            return tf.group(*ops)

    def variables(self) -> list[tf.Variable]:
        """Lists the powers of the betas and the slots, in the order of creation."""
        slots = [slots[key] for slots in self._slots.values() for key in _SLOTS]
        return [*self._powers, *slots]

    def get_slot(self, var: tf.Variable, name: str) -> tf.Variable | None:
        """Returns the slot ``"m"`` or ``"v"`` of ``var``, or None."""
        check_slot(var, name)
        return self._slots.get(id(var), {}).get(name)

    def get_slot_names(self) -> list[str]:
        """Returns the names of the slots."""
        return list(_SLOTS)

    def _advance(self, var: tf.Variable) -> tuple[list[Any], tf.Tensor]:
        """Returns the ops that update the powers, and the corrected learning rate."""
        if not self._powers:
            one = partial(tf.ones, [], weight_dtype([var]))
            self._powers = [
                make_state(one, name=f"{self.name}/{key}", device=var.device)
                for key in ("b1pow", "b2pow")
            ]
        with tf.device(var.device):
            rate = self.learning_rate
            first, second = self._powers
            rate = scalar_of(rate() if callable(rate) else rate, first.dtype)
            b1 = first.read_value() * self.beta1
            b2 = second.read_value() * self.beta2
            ops = [
                first.assign(b1, read_value=False),
                second.assign(b2, read_value=False),
            ]
            return ops, rate * tf.sqrt(1.0 - b2) / (1.0 - b1)

    def _apply_one(self, grad: tf.Tensor, var: tf.Variable, rate: tf.Tensor) -> Any:
        slots = self._slots_of(var)
        grad = tf.cast(grad, weight_dtype([var]))
        mean = _blend(slots["m"].read_value(), grad, self.beta1)
        square = _blend(slots["v"].read_value(), tf.square(grad), self.beta2)
        step = tf.cast(rate, grad.dtype) * mean / (tf.sqrt(square) + self.epsilon)
        return tf.group(
            slots["m"].assign(mean, read_value=False),
            slots["v"].assign(square, read_value=False),
            var.assign_sub(tf.cast(step, var.dtype), read_value=False),
        )

    def _slots_of(self, var: tf.Variable) -> dict[str, tf.Variable]:
        if id(var) not in self._slots:
            self._slots[id(var)] = {
                key: make_state(
                    lambda: tf.zeros(var.shape, weight_dtype([var])),
                    name=f"{self.name}/{var.name.split(':')[0]}/{key}",
                    device=var.device,
                )
                for key in _SLOTS
            }
        return self._slots[id(var)]


def _blend(old: tf.Tensor, new: tf.Tensor, keep: float) -> tf.Tensor:
    return old * keep + new * (1.0 - keep)
