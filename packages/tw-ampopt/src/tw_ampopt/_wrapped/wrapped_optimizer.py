"""One interface to the families of optimizers that can be wrapped.

TensorFlow's v1 optimizers and tf_keras's legacy ones look up slots by variable and
name. Keras 3 optimizers do not, and update only the variables that they were built
for. Any of them may update float32 masters in place of half-precision variables.
"""

import sys
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, TypeAlias

import tensorflow as tf

from tw_ampopt._variables import are_local, identity, make_state, present
from tw_core.internal import (
    OptimizerKind,
    apply_pairs,
    check_elementwise,
    create_slots,
    kind_of,
    map_values,
    tf_variable,
    tf_variables,
    with_unique_rows,
)
from tw_core.variables import override_to_local_variable

_HALF = (tf.float16, tf.bfloat16)
_LIKE_V1 = (OptimizerKind.V1, OptimizerKind.LIKE_V1, OptimizerKind.TF_KERAS_LEGACY)


WrappedOptimizer: TypeAlias = "WrappedV1 | WrappedKeras3 | MasterWeights"
"""An optimizer of one tower; all kinds have the same methods."""


def wrap(optimizer: Any) -> WrappedOptimizer:
    """Gives an optimizer the interface that the updater uses."""
    kind = kind_of(optimizer)
    if kind is OptimizerKind.KERAS_3:
        _check_keras_3(optimizer)
        return WrappedKeras3(optimizer)
    if kind in _LIKE_V1:
        return WrappedV1(optimizer)
    raise TypeError(
        f"Cannot wrap {_class_of(optimizer)}; can wrap tf.compat.v1.train optimizers "
        "(and classes that follow tw_core.OptimizerLike, as "
        "tw_ampopt.SimpleAdam does), tf_keras.optimizers.legacy optimizers, and Keras "
        "3 optimizers that neither scale the loss nor accumulate themselves."
    )


class WrappedV1:
    """A v1 optimizer, or one of tf_keras's legacy ones."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer
        self.inner: Any = optimizer
        self._variables: dict[int, tf.Variable] = {}

    def build(self, variables: Sequence[Any]) -> None:
        """Makes the slots, ahead of the update."""
        self._variables |= {id(v): v for v in tf_variables(variables)}
        # In eager mode their names have never had a scope.
        with tf.name_scope("") if tf.executing_eagerly() else nullcontext():
            create_slots(self.optimizer, variables)

    def apply(self, grads: Sequence[Any], variables: Sequence[Any]) -> Any:
        """Updates by float32 gradients, maybe sparse; returns a dependency or None."""
        return apply_pairs(self.optimizer, _cast_pairs(grads, variables))

    def variables(self) -> list[tf.Variable]:
        """Lists slots and other state, in the same order in every process.

        Slots come last, in the order of their variables. v1 optimizers sort them by
        names, which depend on all that the process has made before.
        """
        variables = self.optimizer.variables
        every = list(variables() if callable(variables) else variables)
        names = self.get_slot_names()
        slots = [self._slot(v, n) for v in self._variables.values() for n in names]
        places = {id(slot): place for place, slot in enumerate(slots)}
        return sorted(every, key=lambda variable: places.get(id(variable), -1))

    def get_slot(self, var: Any, name: str) -> tf.Variable | None:
        """Returns a slot, or None."""
        return self._slot(tf_variable(var), name)

    def get_slot_names(self) -> list[str]:
        """Lists the names of the slots."""
        return list(self.optimizer.get_slot_names())

    def _slot(self, variable: tf.Variable, name: str) -> tf.Variable | None:
        try:
            return self.optimizer.get_slot(variable, name)
        except KeyError:  # raised by tf_keras for another tower's variable
            return None


class WrappedKeras3:
    """A Keras 3 optimizer."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer
        self.inner: Any = optimizer
        self._variables: list[Any] = []

    def build(self, variables: Sequence[Any]) -> None:
        """Makes the slots, once."""
        if self.optimizer.built:
            return
        create_slots(self.optimizer, variables)
        self._variables = list(variables)

    def apply(self, grads: Sequence[Any], variables: Sequence[Any]) -> Any:
        """Updates by float32 gradients, maybe sparse; returns a dependency or None."""
        self._check_known(variables)
        # Rows of equal index are added before they are rounded.
        grads = [
            grad if tf.as_dtype(v.dtype) == tf.float32 else with_unique_rows(grad)
            for grad, v in zip(grads, variables, strict=True)
        ]
        return apply_pairs(self.optimizer, _cast_pairs(grads, variables))

    def variables(self) -> list[tf.Variable]:
        """Lists iterations, learning rate and slots."""
        return tf_variables(self.optimizer.variables)

    def get_slot(self, var: Any, name: str) -> tf.Variable | None:
        """Returns a slot, or None."""
        own = next((v for v in self._variables if identity(v) == identity(var)), None)
        if own is None:
            return None
        # Variables may have the same name; their slots are then in the same order.
        reference = _keras_reference(own)
        namesakes = [v for v in self._variables if _keras_reference(v) == reference]
        path = f"{self.optimizer.name}/{reference}_{name}"
        slots = [v for v in self.optimizer.variables if v.path == path]
        for variable, slot in zip(namesakes, slots, strict=False):
            if variable is own:
                return tf_variable(slot)
        return None

    def get_slot_names(self) -> list[str]:
        """Lists the slots' names, without the first variable's name in front."""
        if not self._variables:
            return []
        prefix = f"{self.optimizer.name}/{_keras_reference(self._variables[0])}_"
        paths = [variable.path for variable in self.optimizer.variables]
        names = [p.removeprefix(prefix) for p in paths if p.startswith(prefix)]
        return list(dict.fromkeys(names))

    def _check_known(self, variables: Sequence[Any]) -> None:
        known = set(map(identity, self._variables))
        unknown = [v.name for v in variables if identity(v) not in known]
        if unknown:
            raise ValueError(
                f"The Keras optimizer {self.optimizer.name!r} has slots for "
                f"{[v.name for v in self._variables]} and cannot add any for "
                f"{unknown}; an optimizer that shares another one's state must update "
                "the same variables or fewer."
            )


class MasterWeights:
    """A wrapped optimizer that updates float32 masters in place of half variables.

    A half-precision variable cannot hold small updates. The optimizer updates a
    float32 master instead, and the variable is the master, rounded. If rounding the
    master does not give the variable, the variable has been assigned since (by a
    restore, or a copy between towers), and the master takes its value, so that masters
    need no special treatment.
    """

    def __init__(self, wrapped: WrappedOptimizer) -> None:
        self._wrapped = wrapped
        self.inner: Any = wrapped.inner
        self._masters: dict[int, tf.Variable] = {}

    def build(self, variables: Sequence[Any]) -> None:
        """Makes masters and slots."""
        check_elementwise(self.inner, variables)  # A master of a flat one is not flat.
        self._wrapped.build([self._master_of(variable) for variable in variables])

    def apply(self, grads: Sequence[Any], variables: Sequence[Any]) -> Any:
        """Updates masters, then the variables; returns the last assignments."""
        pairs = [(self._master_of(v), v) for v in variables]
        halves = [(m, tf_variable(v)) for m, v in pairs if m is not v]
        follow = [_follow(master, variable) for master, variable in halves]
        with tf.control_dependencies(follow):
            # Carries the dependency into functions that optimizers call.
            grads = tf.nest.map_structure(tf.identity, grads, expand_composites=True)
            updated = present([self._wrapped.apply(grads, [m for m, _ in pairs])])
        with tf.control_dependencies(updated):
            rounded = [_round_into(variable, master) for master, variable in halves]
        return tf.group(*updated, *present(rounded))

    def variables(self) -> list[tf.Variable]:
        """Lists the optimizer's variables, then the masters."""
        return [*self._wrapped.variables(), *self._masters.values()]

    def get_slot(self, var: Any, name: str) -> tf.Variable | None:
        """Returns the slot of ``var``, or of its master."""
        return self._wrapped.get_slot(self._masters.get(identity(var), var), name)

    def get_slot_names(self) -> list[str]:
        """Lists the names of the slots."""
        return self._wrapped.get_slot_names()

    def _master_of(self, variable: Any) -> Any:
        if tf.as_dtype(variable.dtype) not in _HALF:
            return variable
        if identity(variable) not in self._masters:
            name = f"{variable.name.split(':')[0].replace('/', '_')}_master"
            with override_to_local_variable(are_local([variable])):
                self._masters[identity(variable)] = make_state(
                    lambda: tf.zeros(variable.shape, tf.float32),
                    name=name,
                    device=tf_variable(variable).device,
                )
        return self._masters[identity(variable)]


def _follow(master: tf.Variable, variable: tf.Variable) -> Any:
    with tf.device(variable.device):
        held, shown = master.read_value(), variable.read_value()
        same = tf.equal(tf.cast(held, shown.dtype), shown)
        value = tf.where(same, held, tf.cast(shown, tf.float32))
        return master.assign(value, read_value=False)


def _round_into(variable: tf.Variable, master: tf.Variable) -> Any:
    with tf.device(variable.device):
        rounded = tf.cast(master.read_value(), variable.dtype)
        return variable.assign(rounded, read_value=False)


def _cast_pairs(
    grads: Sequence[Any], variables: Sequence[Any]
) -> list[tuple[Any, Any]]:
    return [
        (grad if v.dtype == tf.float32 else _cast(grad, v.dtype), v)
        for grad, v in zip(grads, variables, strict=True)
    ]


def _cast(grad: Any, dtype: Any) -> Any:
    return map_values(partial(tf.cast, dtype=dtype), grad)


def _keras_reference(variable: Any) -> str:
    path = getattr(variable, "path", None) or str(variable.name).replace(":", "_")
    return str(path).replace("/", "_")


def _check_keras_3(optimizer: Any) -> None:
    keras = sys.modules["keras"]
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        problem = "scales the loss itself; pass its inner optimizer, and loss_scale="
    elif getattr(optimizer, "gradient_accumulation_steps", None):
        problem = "accumulates itself; use the accumulation of tw_ampopt instead"
    else:
        return
    raise TypeError(f"Cannot wrap {_class_of(optimizer)}: it {problem}.")


def _class_of(value: Any) -> str:
    kind = type(value)
    return f"{kind.__module__}.{kind.__qualname__}"
