"""Arguments of several public methods, checked once, where they come in."""

import inspect
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tw_ampopt._checks.graphs import check_same_graph
from tw_ampopt._variables import as_tf_variable, name_of
from tw_core import canonical_device
from tw_core.checks import check_text

_SCOPE = re.compile(r"[A-Za-z0-9.][A-Za-z0-9_.\\/>-]*")


def check_name(name: object, *, caller: str) -> str:
    """Refuses what names no scope.

    Raises:
      TypeError: no string.
      ValueError: empty, or characters that TensorFlow takes in no scope.
    """
    text = check_text(caller, name=name)
    if not _SCOPE.fullmatch(text.replace("/", ".")):
        raise ValueError(
            f"{caller}: name must begin with a letter, a digit or '.', and hold only "
            f"these, '_', '-', '/', '>' and backslashes; got {text!r}."
        )
    return text


def check_device(device: str, *, caller: str) -> None:
    """Refuses what is no device string.

    Raises:
      ValueError: something else.
    """
    try:
        canonical_device(device)
    except ValueError as error:
        raise ValueError(f"{caller}: {error}") from error


def check_loss(loss: object, *, caller: str) -> tf.Tensor:
    """Refuses what is no scalar to be differentiated.

    Raises:
      TypeError: no tensor, or one that is not floating.
      ValueError: more than one element, or another graph's.
    """
    if not isinstance(loss, tf.Tensor):
        raise TypeError(f"{caller}: loss must be a tensor; got {loss!r}.")
    if not loss.dtype.is_floating:
        raise TypeError(
            f"{caller}: loss must be of a floating dtype; got {loss.dtype.name}."
        )
    if loss.shape.is_fully_defined() and loss.shape.num_elements() != 1:
        raise ValueError(
            f"{caller}: loss must be a scalar; got a tensor of shape {loss.shape}. "
            "Take its mean or sum."
        )
    check_same_graph({"the loss": loss}, caller=caller)
    return loss


def check_variables(variables: Iterable[Any], *, caller: str) -> list[Any]:
    """Refuses what is no variable, or none that can be trained.

    Raises:
      TypeError: something else, a reference variable, or one that is not floating.
      ValueError: another graph's.
    """
    found = list(variables)
    wrong = [v for v in found if not is_trainable_kind(v)]
    if wrong:
        raise TypeError(
            f"{caller}: wants resource variables, TensorFlow's or Keras's; got "
            f"{wrong!r}. Reference variables become resource variables by "
            "tf.compat.v1.enable_resource_variables()."
        )
    check_dtypes(found, caller=caller)
    check_same_graph({f"the variable {name_of(v)}": v for v in found}, caller=caller)
    return found


def check_dtypes(variables: Iterable[Any], *, caller: str) -> None:
    """Refuses variables that are not floating.

    Raises:
      TypeError: some are whole numbers, complex, or no numbers; all are named.
    """
    wrong = [
        f"{name_of(v)} of {tf.as_dtype(v.dtype).name}"
        for v in variables
        if not tf.as_dtype(v.dtype).is_floating
    ]
    if wrong:
        raise TypeError(
            f"{caller}: trains variables of a floating dtype; got {', '.join(wrong)}. "
            "Leave them out."
        )


def is_trainable_kind(value: Any) -> bool:
    """Tells whether a value is a resource variable, or Keras's that holds one."""
    held = value if isinstance(value, tf.Variable) else getattr(value, "value", None)
    # The dtype of a reference variable is a reference to its base.
    return isinstance(held, tf.Variable) and held.dtype == held.dtype.base_dtype


def check_value(value: object, *, caller: str) -> Any:
    """Refuses what cannot be scaled.

    Raises:
      TypeError: no tensor, variable, array or ``IndexedSlices``, or not floating.
      ValueError: another graph's.
    """
    kinds = (tf.Tensor, tf.Variable, tf.IndexedSlices, np.ndarray, np.generic)
    if not isinstance(value, kinds):
        raise TypeError(
            f"{caller}: value must be a tensor, e.g. a loss; got {value!r}."
        )
    dtype = tf.as_dtype(value.dtype)
    if not dtype.is_floating:
        raise TypeError(
            f"{caller}: value must be of a floating dtype; got {dtype.name}."
        )
    check_same_graph({"value": value}, caller=caller)
    return value


def check_counter(global_step: Any, *, caller: str) -> None:
    """Refuses what cannot count updates; None is fine.

    Raises:
      TypeError: no variable, or none of numbers.
      ValueError: no scalar, or another graph's.
    """
    if global_step is None:
        return
    held = getattr(global_step, "value", None)
    if not isinstance(global_step, tf.Variable) and not isinstance(held, tf.Variable):
        raise TypeError(
            f"{caller}: global_step must be a variable that counts updates; got "
            f"{global_step!r}."
        )
    variable = as_tf_variable(global_step)
    dtype = variable.dtype.base_dtype
    if not (dtype.is_integer or dtype.is_floating):
        raise TypeError(f"{caller}: global_step must be numeric; got {dtype.name}.")
    if not variable.shape.is_compatible_with([]):
        raise ValueError(
            f"{caller}: global_step must be a scalar; got shape {variable.shape}."
        )
    check_same_graph({"global_step": variable}, caller=caller)


def check_slot(var: object, name: object, *, caller: str) -> None:
    """Refuses what has no slots.

    Raises:
      TypeError: no variable, or a name that is no string.
    """
    held = getattr(var, "value", None)
    if not isinstance(var, tf.Variable) and not isinstance(held, tf.Variable):
        raise TypeError(f"{caller}: var must be a variable; got {var!r}.")
    check_text(caller, name=name)


def check_flags(
    flags: Any, variables: Sequence[Sequence[Any]], *, caller: str
) -> list[list[bool]]:
    """Returns [K][N] flags of an array or nested list.

    Args:
      flags: what ``nonfinite_gradients`` gave, as numbers.
      variables: [K][N], or [1][N] where towers share, for any K.
      caller: who asks; opens the message.

    Raises:
      ValueError: another shape, or no flags at all.
    """
    array = np.asarray(flags) if _is_regular(flags) else np.asarray(None)
    num_towers, num_variables = len(variables), len(variables[0])
    fits = array.ndim == 2 and array.shape[1] == num_variables and len(array) > 0
    if num_towers > 1:
        fits = fits and len(array) == num_towers
    if not fits or array.dtype != np.bool_:
        raise ValueError(
            f"{caller}: flags must be [towers, variables] bools, here "
            f"[{num_towers}, {num_variables}], as nonfinite_gradients gives them when "
            f"it has run; got {flags!r}."
        )
    rows: list[list[bool]] = array.tolist()
    return rows


def check_options(
    function: Callable[..., Any], options: Mapping[str, Any], *, caller: str
) -> None:
    """Refuses options that a function of TensorFlow's does not take.

    Raises:
      TypeError: some are unknown; all are named.
    """
    known = [*inspect.signature(function).parameters][2:]
    unknown = sorted(set(options) - set(known))
    if unknown:
        raise TypeError(f"{caller}: got unknown options {unknown}; takes {known}.")


def check_finite(value: object, *, caller: str, name: str) -> None:
    """Refuses numbers that are NaN or infinite; what is no number passes.

    Raises:
      ValueError: NaN or infinite.
    """
    if isinstance(value, int | float | np.generic) and not math.isfinite(value):
        raise ValueError(f"{caller}: {name} must be finite; got {value}.")


def _is_regular(flags: Any) -> bool:
    if isinstance(flags, np.ndarray):
        return True
    is_nested = isinstance(flags, Sequence) and not isinstance(flags, str)
    return is_nested and len({np.size(row) for row in flags}) == 1
