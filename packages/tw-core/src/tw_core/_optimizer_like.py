"""The optimizer that every package takes: TensorFlow's v1 interface, as a type.

``tf.compat.v1.train.Optimizer`` and its subclasses have it, tf_keras's legacy
optimizers do not; ``tw-ampopt``'s has it too, and so fits wherever a v1
optimizer does.
"""

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import tensorflow as tf


@runtime_checkable
class OptimizerLike(Protocol):
    """What is asked of an optimizer."""

    def compute_gradients(
        self, loss: Any, var_list: Sequence[tf.Variable] | None = None
    ) -> list[tuple[Any, tf.Variable]]:
        """Returns [N] (gradient or None, variable) pairs of a scalar loss."""
        ...

    def apply_gradients(
        self,
        grads_and_vars: Any,
        global_step: tf.Variable | None = None,
        name: str | None = None,
    ) -> Any:
        """Returns the op that applies [N] (gradient, variable) pairs."""
        ...

    def get_slot(self, var: tf.Variable, name: str) -> tf.Variable | None:
        """Returns the slot ``name`` of ``var``, or None."""
        ...

    def get_slot_names(self) -> list[str]:
        """Returns the names of the slots."""
        ...

    def variables(self) -> list[tf.Variable]:
        """Returns the optimizer's own variables, slots included."""
        ...
