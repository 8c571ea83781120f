"""From ``get_variable``'s arguments to a variable's initial value and its loss.

The initializer takes many forms: None, a class, a function or object called with a
shape and a dtype, a function without arguments, or a value. As in TensorFlow
(``get_variable``'s documentation), a value or a function without arguments has
its own dtype and shape.
"""

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import tensorflow as tf

_CALLER = "VariableStore"


class InitialValue(NamedTuple):
    """The initial value of a ``tf.Variable``."""

    value: Any  # or a function without arguments that makes it
    dtype: tf.DType | None  # None leaves it to the value


def initial_value(
    name: str, shape: Any, dtype: tf.DType, initializer: Any
) -> InitialValue:
    """Makes an initial value from the arguments of ``get_variable``."""
    if initializer is None:
        initializer = _default_initializer(name, dtype)
    if inspect.isclass(initializer):
        initializer = initializer()
    if not callable(initializer):
        return _from_value(name, shape, initializer)
    parameters = _parameters(initializer)
    if parameters == []:
        return InitialValue(initializer, None)
    full_shape = tf.TensorShape(shape)
    if full_shape.is_fully_defined():
        make = partial(initializer, full_shape.as_list(), dtype=dtype)
        return InitialValue(make, dtype)
    needed = [
        one
        for one in parameters or []
        if one.default is one.empty
        and one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)
    ]
    if not needed:
        return InitialValue(initializer, None)
    raise ValueError(
        f"{_CALLER}: the variable {name!r} has the shape {full_shape}; its initializer "
        "needs a fully known one."
    )


def regularize(
    variable: tf.Variable, name: str, regularizer: Callable[..., Any]
) -> None:
    """Adds a variable's regularization loss to the graph, as ``get_variable`` does."""
    with tf.name_scope(f"{name}/Regularizer/"):
        loss = regularizer(variable)
    if loss is not None:
        tf.compat.v1.add_to_collection(
            tf.compat.v1.GraphKeys.REGULARIZATION_LOSSES, loss
        )


def _from_value(name: str, shape: Any, value: Any) -> InitialValue:
    if shape is not None:
        raise ValueError(
            f"{_CALLER}: the variable {name!r} has a value as initializer and the "
            f"shape {shape}; leave the shape out."
        )
    if tf.is_tensor(value) and tf.is_symbolic_tensor(value):
        raise ValueError(
            f"{_CALLER}: the variable {name!r} starts with {value.name!r}, a tensor of "
            "the tf.function, which the variable outlives; pass a function that makes "
            "the tensor."
        )
    return InitialValue(value, None)


def _default_initializer(name: str, dtype: tf.DType) -> Any:
    if dtype.is_floating:
        return tf.compat.v1.glorot_uniform_initializer()
    if dtype.is_integer or dtype.is_bool:
        return tf.compat.v1.zeros_initializer()
    raise ValueError(
        f"{_CALLER}: the variable {name!r} of dtype {dtype.name} needs an "
        "initializer; there is a default for floats, integers and bools only."
    )


def _parameters(function: Callable[..., Any]) -> list[inspect.Parameter] | None:
    try:
        return list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # some builtins have no signature
        return None
