"""The families of optimizers, and the variables that each can update."""

import sys
from collections.abc import Sequence
from enum import Enum
from typing import Any, Protocol, runtime_checkable

import tensorflow as tf

from tw_core._modes import orders_effects
from tw_core.flat_variables._flat_variables import flat_among


@runtime_checkable
class OptimizerLike(Protocol):
    """The optimizer that every package accepts: TensorFlow's v1 interface, as a type.

    ``tf.compat.v1.train.Optimizer`` and its subclasses have it, tf_keras's legacy
    optimizers do not; ``tw-ampopt``'s has it too, and so works wherever a v1
    optimizer does.
    """

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


@runtime_checkable
class TowerOptimizerLike(Protocol):
    """An optimizer that takes the gradients of all towers and reduces them itself.

    ``tw_ampopt.TowerOptimizer`` is one: it scales losses, accumulates and skips.
    """

    def apply_loss_scaling(self, value: Any) -> Any:
        """Returns the scaled loss, which is the one to differentiate."""
        ...

    def apply(
        self,
        grads: Any,
        *,
        weights: Sequence[Any] | None = None,
        jit_compile: bool = False,
    ) -> Any:
        """Applies [K][N] gradients of scaled losses, weighted by ``weights[k]``."""
        ...


@runtime_checkable
class AccumulatingOptimizerLike(TowerOptimizerLike, Protocol):
    """A tower optimizer that may accumulate over calls, which all ranks make together.

    ``group`` has the ``size`` and ``sum`` of a ``tw_core.ranks.RankGroup``. Without it
    ``apply`` is that of ``TowerOptimizerLike``.
    """

    @property
    def progress(self) -> tuple[int, int] | None:
        """(calls accumulated, calls per update); None if each call updates."""

    def apply(self, grads: Any, *, group: Any = None, **options: Any) -> Any:
        """Applies the mean over ranks, exchanged only in calls that update."""

    def average_accumulated(self, group: Any) -> None:
        """Replaces each rank's accumulated gradients by their mean over ranks."""


class OptimizerKind(Enum):
    """The families of optimizers.

    Attributes:
      V1: ``tf.compat.v1.train.Optimizer`` and its subclasses.
      LIKE_V1: another class that has the interface ``OptimizerLike``.
      KERAS_3: an optimizer of Keras 3.
      TF_KERAS: a new optimizer of tf_keras; it updates nothing in a session graph.
      TF_KERAS_LEGACY: one of ``tf_keras.optimizers.legacy``.
      OTHER: none of these.
    """

    V1 = "tf.compat.v1.train"
    LIKE_V1 = "tw_core.OptimizerLike"
    KERAS_3 = "keras"
    TF_KERAS = "tf_keras"
    TF_KERAS_LEGACY = "tf_keras.optimizers.legacy"
    OTHER = "other"


def kind_of(optimizer: object) -> OptimizerKind:
    """Returns an optimizer's kind, without importing Keras or tf_keras.

    An object of no known family is ``OTHER``, and so is a class.
    """
    if isinstance(optimizer, type):
        return OptimizerKind.OTHER
    if isinstance(optimizer, tf.compat.v1.train.Optimizer):
        return OptimizerKind.V1
    homes = [base.__module__ for base in type(optimizer).__mro__]
    packages = {home.split(".")[0] for home in homes}
    if "keras" in packages:
        return OptimizerKind.KERAS_3
    if "tf_keras" in packages:
        is_legacy = any(".legacy" in home for home in homes)
        return OptimizerKind.TF_KERAS_LEGACY if is_legacy else OptimizerKind.TF_KERAS
    if isinstance(optimizer, OptimizerLike):
        return OptimizerKind.LIKE_V1
    return OptimizerKind.OTHER


_WITHOUT_OP = {
    OptimizerKind.KERAS_3: (
        "a Keras 3 optimizer, does not work in a session graph; use one of "
        "tf.compat.v1.train, a tf_keras legacy optimizer, or tw_ampopt.Optimizer, "
        "which wraps it; or train in a tf.function."
    ),
    OptimizerKind.TF_KERAS: (
        "an optimizer of tf_keras, updates nothing in a session graph; use the one of "
        "the same name in tf_keras.optimizers.legacy, or one of tf.compat.v1.train."
    ),
}


def check_optimizer(optimizer: Any) -> None:
    """Refuses non-optimizers, and optimizers that a session graph cannot use.

    Args:
      optimizer: the argument to check.

    Raises:
      TypeError: a class; an object without ``apply_gradients``; or, where ops are
        built for a session to run, an optimizer whose update is not an op: one
        from Keras 3, or a new one from tf_keras.
    """
    is_class = isinstance(optimizer, type)
    if is_class or not callable(getattr(optimizer, "apply_gradients", None)):
        got = (
            f"the class {optimizer.__name__}" if is_class else type(optimizer).__name__
        )
        raise TypeError(
            "optimizer must be an object with apply_gradients(pairs), as "
            f"tf.compat.v1.train.AdamOptimizer() is; got {got}."
        )
    # A function that a session graph calls orders effects; a branch of it does not.
    if not orders_effects() and (advice := _WITHOUT_OP.get(kind_of(optimizer))):
        raise TypeError(f"{type(optimizer).__name__}, {advice}")


# The classes that update each element by that element of gradient and state alone.
# Nadam of tf_keras moves its schedule on once per variable.
_OF_KERAS = ["Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "Ftrl", "Lion"]
_OF_KERAS += ["LossScaleOptimizer", "RMSprop", "SGD"]
_OF_V1 = ["Adadelta", "Adagrad", "AdagradDA", "Adam", "Ftrl", "GradientDescent"]
_OF_V1 += ["Momentum", "ProximalAdagrad", "ProximalGradientDescent", "RMSProp"]
_ELEMENTWISE = {
    "keras": {*_OF_KERAS, "Nadam", "ScheduleFreeAdamW"},
    "tf_keras": {*_OF_KERAS, "LossScaleOptimizerV3"},
    "tensorflow": {f"{name}Optimizer" for name in _OF_V1},
}


def check_elementwise(optimizer: Any, variables: Sequence[Any]) -> None:
    """Refuses flat variables for an optimizer that may treat a variable as a whole."""
    flat = [own.name for own in flat_among(variables)]
    if not flat:
        return
    for one in _with_wrapped(optimizer):
        reason = _why_not_elementwise(one)
        if reason is not None:
            raise ValueError(
                f"{type(one).__name__} {reason}, and {', '.join(flat)} holds several; "
                "keep these separate (below_bytes=0 or group=...)."
            )


def _why_not_elementwise(optimizer: Any, *, by_name: bool = True) -> str | None:
    if getattr(optimizer, "clipnorm", None):
        return "clips each variable's gradient by its norm (clipnorm)"
    if by_name and any(getattr(optimizer, own, None) for own in _EXCLUDED):
        return "excludes variables from weight decay by name"
    if not (_is_known(type(optimizer)) or getattr(optimizer, "elementwise", False)):
        return (
            "is not known to update each element of a variable by itself (if it does, "
            "set elementwise = True in its class)"
        )
    return None


_EXCLUDED = (
    "_exclude_from_weight_decay",
    "_exclude_from_weight_decay_names",
    "_exclude_from_weight_decay_pattern",
)


def _is_known(kind: type) -> bool:
    """Returns whether a class, not one derived from it, is known to be elementwise."""
    package, name = kind.__module__.partition(".")[0], kind.__name__
    home = sys.modules.get(kind.__module__)
    return name in _ELEMENTWISE.get(package, ()) and getattr(home, name, None) is kind


def updates_elementwise(optimizer: Any) -> bool:
    """Returns whether an optimizer is known to update each element independently."""
    wrapped = _with_wrapped(optimizer)
    return all(_why_not_elementwise(own, by_name=False) is None for own in wrapped)


def _with_wrapped(optimizer: Any) -> list[Any]:
    """Lists an optimizer and those that it wraps, as a loss scale optimizer does."""
    found = [optimizer]
    for name in ("inner_optimizer", "_optimizer", "optimizer", "_opt"):
        inner = getattr(optimizer, name, None)
        if callable(getattr(inner, "apply_gradients", None)) and inner not in found:
            found.extend(_with_wrapped(inner))
    return found
