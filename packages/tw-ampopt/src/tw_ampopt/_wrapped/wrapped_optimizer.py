"""One face for the three families of optimizers that can be wrapped.

TensorFlow's v1 optimizers and tf_keras's legacy ones take pairs and give an op.
Keras 3 optimizers take two lists and give nothing; in a session graph they are
right only inside a function, so that is how they are called there.
"""

import sys
from collections.abc import Sequence
from typing import Any, Protocol

import tensorflow as tf

from tw_ampopt._variables import as_tf_variable, identity
from tw_core import OptimizerLike, orders_effects, sum_duplicate_rows

_CAN_BE_WRAPPED = (
    "tf.compat.v1.train optimizers (and whatever follows tw_core.OptimizerLike, as "
    "tw_ampopt.SimpleAdam does), tf_keras.optimizers.legacy optimizers, and Keras 3 "
    "optimizers that neither scale the loss nor accumulate themselves"
)


class Inner(Protocol):
    """An optimizer of one tower."""

    def build(self, variables: Sequence[Any]) -> None:
        """Makes the slots, ahead of the update."""
        ...

    def apply(self, grads: Sequence[Any], variables: Sequence[Any]) -> Any:
        """Updates variables by float32 gradients, sparse or not.

        Returns what an op must depend on for the update to have happened.
        """
        ...

    def variables(self) -> list[tf.Variable]:
        """Lists the optimizer's own variables, slots included."""
        ...

    def get_slot(self, var: Any, name: str) -> tf.Variable | None:
        """Returns a slot, or None."""
        ...

    def get_slot_names(self) -> list[str]:
        """Lists the names of the slots."""
        ...


def wrap(optimizer: Any, *, caller: str) -> Inner:
    """Gives an optimizer the face that the updater works with.

    Raises:
      TypeError: an optimizer of no known family.
    """
    if _is_keras_3(optimizer):
        _check_keras_3(optimizer, caller)
        return KerasInner(optimizer, caller=caller)
    if _is_tf_keras_legacy(optimizer) or isinstance(optimizer, OptimizerLike):
        return PairsInner(optimizer)
    raise TypeError(
        f"{caller}: cannot wrap {_class_of(optimizer)}; can wrap {_CAN_BE_WRAPPED}."
    )


class PairsInner:
    """An optimizer with ``apply_gradients(pairs)``: v1, or tf_keras legacy."""

    def __init__(self, optimizer: Any) -> None:
        """Wraps ``optimizer``."""
        self.optimizer = optimizer
        self._variables: dict[int, Any] = {}

    def build(self, variables: Sequence[Any]) -> None:
        """Makes the slots.

        These optimizers make slots when they first update. Tracing an update that
        is never run has them made without changing anything.
        """
        self._variables |= {identity(v): v for v in variables}
        scope = "" if tf.executing_eagerly() else _name_scope_in_force()

        def update() -> None:
            # A traced function starts without a scope; names say whose state it is.
            with tf.name_scope(scope):
                self.apply([tf.zeros(v.shape) for v in variables], variables)

        tf.function(update, autograph=False).get_concrete_function()

    def apply(self, grads: Sequence[Any], variables: Sequence[Any]) -> Any:
        """Returns the op that updates."""
        grads = cast_like(variables, grads)
        pairs = zip(grads, map(as_tf_variable, variables), strict=True)
        return self.optimizer.apply_gradients(list(pairs))

    def variables(self) -> list[tf.Variable]:
        """Lists slots and the like; complete after the first update was built.

        Slots come last, in the order of their variables. v1 optimizers sort them by
        names, which depend on what else the process has made.
        """
        variables = self.optimizer.variables
        every = list(variables() if callable(variables) else variables)
        names = self.get_slot_names()
        slots = [self.get_slot(v, n) for v in self._variables.values() for n in names]
        places = {id(slot): place for place, slot in enumerate(slots)}
        return sorted(every, key=lambda variable: places.get(id(variable), -1))

    def get_slot(self, var: Any, name: str) -> tf.Variable | None:
        """Returns a slot, or None."""
        try:
            return self.optimizer.get_slot(as_tf_variable(var), name)
        except KeyError:  # what tf_keras says of another tower's variable
            return None

    def get_slot_names(self) -> list[str]:
        """Lists the names of the slots."""
        return list(self.optimizer.get_slot_names())


class KerasInner:
    """A Keras 3 optimizer.

    Most of these take a square or another function of every row of a sparse gradient,
    and so are wrong where rows share an index: here such rows are added first.
    """

    def __init__(self, optimizer: Any, *, caller: str) -> None:
        """Wraps ``optimizer``; ``caller`` opens messages."""
        self.optimizer = optimizer
        self._caller = caller
        self._variables: list[Any] = []

    def build(self, variables: Sequence[Any]) -> None:
        """Makes the slots, once.

        Raises:
          ValueError: an optimizer that cannot name its slots in a session graph.
        """
        if self.optimizer.built:
            return
        try:
            self.optimizer.build(list(variables))
        except ValueError as error:
            if "scope name" not in str(error):
                raise
            # Adafactor calls a slot what its variable is called.
            raise ValueError(
                f"{self._caller}: {_class_of(self.optimizer)} names slots after "
                f"variables, and a session graph takes no names such as "
                f"{variables[0].name!r}. Pass keras.Variable objects, whose names have "
                "no colon, or use tw_ampopt.TowerOptimizer."
            ) from error
        self._variables = list(variables)

    def apply(self, grads: Sequence[Any], variables: Sequence[Any]) -> Any:
        """Updates; returns a tensor to depend on where that is needed."""

        def update() -> tf.Tensor:
            own = cast_like(variables, [_with_rows_once(grad) for grad in grads])
            self.optimizer.apply(own, list(variables))
            return tf.constant(True)

        self._check_known(variables)
        if orders_effects():
            return update()
        return tf.function(update, autograph=False)()

    def variables(self) -> list[tf.Variable]:
        """Lists iterations, learning rate and slots."""
        return [as_tf_variable(variable) for variable in self.optimizer.variables]

    def get_slot(self, var: Any, name: str) -> tf.Variable | None:
        """Returns a slot, or None."""
        own = next((v for v in self._variables if identity(v) == identity(var)), None)
        if own is None:
            return None
        # Variables may have the same name; their slots then come in their order.
        reference = _keras_reference(own)
        namesakes = [v for v in self._variables if _keras_reference(v) == reference]
        path = f"{self.optimizer.name}/{reference}_{name}"
        slots = [v for v in self.optimizer.variables if v.path == path]
        for variable, slot in zip(namesakes, slots, strict=False):
            if variable is own:
                return as_tf_variable(slot)
        return None

    def get_slot_names(self) -> list[str]:
        """Lists what follows the first variable's name in the slots' names."""
        if not self._variables:
            return []
        prefix = f"{self.optimizer.name}/{_keras_reference(self._variables[0])}_"
        paths = [variable.path for variable in self.optimizer.variables]
        names = [p.removeprefix(prefix) for p in paths if p.startswith(prefix)]
        return list(dict.fromkeys(names))

    def _check_known(self, variables: Sequence[Any]) -> None:
        known = set(map(identity, self._variables))
        strangers = [v.name for v in variables if identity(v) not in known]
        if strangers:
            raise ValueError(
                f"{self._caller}: the Keras optimizer {self.optimizer.name!r} has "
                f"slots for "
                f"{[v.name for v in self._variables]} and cannot take on {strangers}; "
                "an optimizer that shares another one's state must update the same "
                "variables or fewer."
            )


def _name_scope_in_force() -> str:
    scope = tf.compat.v1.get_default_graph().get_name_scope()
    return f"{scope}/" if scope else ""


def cast_like(variables: Sequence[Any], grads: Sequence[Any]) -> list[Any]:
    """Casts float32 gradients to their variables' dtypes, in the graph in force.

    Both Keras families refuse gradients of different graphs. In a branch some come
    from outside of it, and a cast to the same dtype makes no op: hence identities.
    """
    return [
        identity_of(_cast(grad, variable.dtype))
        for grad, variable in zip(grads, variables, strict=True)
    ]


def identity_of(grad: Any) -> Any:
    """Returns the same gradient, sparse or not, as ops of the graph in force."""
    if not isinstance(grad, tf.IndexedSlices):
        return tf.identity(grad)
    shape = grad.dense_shape
    return tf.IndexedSlices(
        tf.identity(grad.values),
        tf.identity(grad.indices),
        None if shape is None else tf.identity(shape),
    )


def _with_rows_once(grad: Any) -> Any:
    return sum_duplicate_rows(grad) if isinstance(grad, tf.IndexedSlices) else grad


def _cast(grad: Any, dtype: Any) -> Any:
    if not isinstance(grad, tf.IndexedSlices):
        return tf.cast(grad, dtype)
    return tf.IndexedSlices(tf.cast(grad.values, dtype), grad.indices, grad.dense_shape)


def _keras_reference(variable: Any) -> str:
    path = getattr(variable, "path", None) or str(variable.name).replace(":", "_")
    return str(path).replace("/", "_")


def _is_keras_3(optimizer: Any) -> bool:
    # Whoever has a Keras optimizer has imported Keras; nobody else needs to.
    keras = sys.modules.get("keras")
    return keras is not None and isinstance(optimizer, keras.optimizers.Optimizer)


def _check_keras_3(optimizer: Any, caller: str) -> None:
    keras = sys.modules["keras"]
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        problem = "scales the loss itself; pass the optimizer in it, and loss_scale="
    elif getattr(optimizer, "gradient_accumulation_steps", None):
        problem = "accumulates itself; use minibatch_multiplier= instead"
    else:
        return
    raise TypeError(f"{caller}: cannot wrap {_class_of(optimizer)}: it {problem}.")


def _is_tf_keras_legacy(optimizer: Any) -> bool:
    return any(
        base.__name__ == "OptimizerV2" and "legacy" in base.__module__
        for base in type(optimizer).__mro__
    )


def _class_of(value: Any) -> str:
    kind = type(value)
    return f"{kind.__module__}.{kind.__qualname__}"
