"""Factories of optimizers and learning rates, as callers may pass them.

``tf_optimizer`` is a class, a factory or a dotted name. In a dotted name ``tf.``
refers to TensorFlow's v1 names first, as ``"tf.train.AdamOptimizer"`` has always
meant TensorFlow 1's class.

A learning rate is a number, a tensor, a variable, or a schedule of updates.
"""

import inspect
import math
from collections.abc import Callable
from importlib import import_module
from typing import Any, TypeAlias

import tensorflow as tf

from tw_ampopt._checks.arguments import check_numeric_scalar
from tw_core.internal import weight_dtype

OptimizerFactory: TypeAlias = Callable[..., Any]
LearningRateLike: TypeAlias = (
    float | tf.Tensor | tf.Variable | Callable[[tf.Tensor], Any]
)


def find_factory(tf_optimizer: str | OptimizerFactory) -> Any:
    """Resolves a dotted name, and refuses anything that cannot make optimizers."""
    given = tf_optimizer
    if isinstance(given, str):
        given = _by_name(given)
    if not callable(given) or (
        hasattr(given, "apply_gradients") and not inspect.isclass(given)
    ):
        raise TypeError(
            "tf_optimizer must be a class, a factory or a dotted name, since every "
            f"tower needs its own optimizer; got {tf_optimizer!r}. Write e.g. "
            "tf_optimizer=keras.optimizers.Adam, learning_rate=0.001."
        )
    return given


def takes_name(factory: OptimizerFactory) -> bool:
    """Tests whether a factory takes ``name``; assumed if it hides its parameters."""
    try:
        parameters = inspect.signature(factory).parameters.values()
    except (TypeError, ValueError):
        return True
    return any(p.name == "name" or p.kind is p.VAR_KEYWORD for p in parameters)


def next_rate(value: LearningRateLike, updates: tf.Variable) -> tf.Tensor:
    """Returns the rate of the next update, after ``updates`` others.

    In float64 if it is a number or was computed in float64, else in float32.
    """
    if callable(value) and not isinstance(value, tf.Variable | tf.Tensor):
        value = value(updates.read_value())
        if isinstance(value, tf.Tensor | tf.Variable):
            _check_tensor(value)
        elif not is_number(value) and not hasattr(value, "dtype"):
            raise TypeError(
                "The schedule learning_rate must return a number or a scalar tensor; "
                f"got {value!r}."
            )
    # A number becomes float64 here: in float32 it would be rounded for all.
    rate = tf.constant(value, tf.float64) if is_number(value) else value
    rate = tf.convert_to_tensor(rate)
    return tf.cast(rate, weight_dtype([rate]))


def is_number(value: object) -> bool:
    """Tests whether a rate is a plain number."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def check_learning_rate(value: object) -> None:
    """Refuses an invalid learning rate; a negative one is accepted."""
    if is_number(value):
        _check_finite(value)
    elif isinstance(value, tf.Tensor | tf.Variable):
        _check_tensor(value)
    elif not callable(value) or not _takes_one(value):
        raise TypeError(
            "learning_rate must be a number, a scalar tensor or variable, or a "
            f"schedule (a function of the number of updates); got {value!r}."
        )


def same_rate(one: object, other: object) -> bool:
    """Compares two rates; tensors and schedules are equal only to themselves."""
    return one is other or (is_number(one) and is_number(other) and one == other)


def _by_name(dotted: str) -> Any:
    first, _, rest = dotted.partition(".")
    roots = [tf.compat.v1, tf] if first in ("tf", "tensorflow") else []
    for root in roots:
        found = _attribute(root, rest)
        if found is not None:
            return found
    found = None if roots else _imported(dotted)
    if found is None:
        raise ValueError(
            f"tf_optimizer={dotted!r} could not be resolved; write the name as Python "
            "would import it, e.g. 'tf.train.AdamOptimizer', 'keras.optimizers.Adam' "
            "or 'tw_ampopt.SimpleAdam', or pass the class."
        )
    return found


def _imported(dotted: str) -> Any:
    parts = dotted.split(".")
    for cut in range(len(parts) - 1, 0, -1):
        try:
            module = import_module(".".join(parts[:cut]))
        except ImportError:
            continue
        return _attribute(module, ".".join(parts[cut:]))
    return None


def _attribute(root: Any, dotted: str) -> Any:
    for part in dotted.split("."):
        root = getattr(root, part, None)
    return root


def _check_tensor(value: Any) -> None:
    check_numeric_scalar(value, name="learning_rate")
    if isinstance(value, tf.Tensor):
        _check_finite(tf.get_static_value(value))


def _check_finite(value: Any) -> None:
    if value is not None and not math.isfinite(value):
        raise ValueError(f"learning_rate must be finite; got {value}.")


def _takes_one(schedule: Callable[..., Any]) -> bool:
    try:
        inspect.signature(schedule).bind(0)
    except TypeError:
        return False
    except ValueError:  # a builtin without a known signature
        return True
    return True
