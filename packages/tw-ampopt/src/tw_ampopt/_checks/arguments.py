"""Checks of arguments of several public methods, and of the graphs they belong to."""

import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tw_ampopt._variables import identity
from tw_core.gradients import check_grad_list
from tw_core.internal import (
    builds_session_graph,
    check_text,
    is_variable,
    repeated_variables,
    tf_variable,
    tf_variables,
    values_of,
)

_SCOPE = re.compile(r"[A-Za-z0-9.][A-Za-z0-9_.\\/>-]*")


def check_name(name: object) -> str:
    """Refuses a name that is not valid for a scope."""
    text = check_text(name=name)
    if not _SCOPE.fullmatch(text.replace("/", ".")):
        raise ValueError(
            "name must begin with a letter, a digit or '.', and contain only these, "
            f"'_', '-', '/', '>' and backslashes; got {text!r}."
        )
    return text


def check_loss(loss: object) -> None:
    """Refuses a loss that is not a scalar to be differentiated."""
    if not isinstance(loss, tf.Tensor):
        raise TypeError(f"loss must be a tensor; got {loss!r}.")
    if not loss.dtype.is_floating:
        raise TypeError(f"loss must be of a floating dtype; got {loss.dtype.name}.")
    if loss.shape.is_fully_defined() and loss.shape.num_elements() != 1:
        raise ValueError(
            f"loss must be a scalar; got a tensor of shape {loss.shape}. Take its mean "
            "or sum."
        )
    check_same_graph([loss], lambda _: "the loss")


def check_variables(variables: Iterable[Any]) -> list[Any]:
    """Refuses anything but floating resource variables of known shape."""
    found = list(variables)
    wrong = [
        v
        for v in found
        # A reference variable's dtype is the reference type of its base dtype.
        if not is_variable(v) or tf_variable(v).dtype != tf_variable(v).dtype.base_dtype
    ]
    if wrong:
        raise TypeError(
            "Only resource variables, TensorFlow's or Keras's, are supported; got "
            f"{wrong!r}. tf.compat.v1.enable_resource_variables() makes variables "
            "resource variables."
        )
    dtypes = [tf.as_dtype(v.dtype) for v in found]
    wrong = [
        f"{name_of(v)} of {dtype.name}"
        for v, dtype in zip(found, dtypes, strict=True)
        if not dtype.is_floating
    ]
    if wrong:
        raise TypeError(
            "Only variables of a floating dtype can be trained; got "
            f"{', '.join(wrong)}. Leave them out."
        )
    wrong = [
        f"{name_of(v)} {v.shape}"
        for v in found
        if not tf.TensorShape(v.shape).is_fully_defined()
    ]
    if wrong:
        raise ValueError(
            "Variables must have known shapes, since slots and accumulators have the "
            f"same; got {', '.join(wrong)}. Make them with a full shape."
        )
    wrong = [name_of(v) for v in found if getattr(v, "overwrite_with_gradient", False)]
    if wrong:
        raise ValueError(
            "Keras overwrites the records of float8 layers with their gradients, which "
            f"must not be averaged or clipped; got {', '.join(wrong)}. Leave them out, "
            "and assign the largest of the towers' gradients to them."
        )
    check_same_graph(found, lambda n: f"the variable {name_of(found[n])}")
    return found


def variables_by_tower(variables: Any, *, knows_towers: bool) -> list[list[Any]]:
    """Returns checked [K][N] variables; [1][N] if all towers share theirs.

    Shared variables do not define towers: then ``knows_towers`` must be true.
    """
    wanted = "variables must be one list per tower, or one list for all"
    lists = lists_by_tower(variables, wanted)
    for tower in lists:
        check_variables(tower)
    if not any(lists):
        raise ValueError(
            "No variables; build the model before the optimizer, and pass e.g. "
            "[model.trainable_variables for model in models]."
        )
    keys = [list(map(identity, tower)) for tower in lists]
    if all(key == keys[0] for key in keys):
        if len(lists) > 1 and not knows_towers:
            raise ValueError(
                f"variables holds one list {len(lists)} times; for {len(lists)} towers "
                "that share it, pass it once, and the towers, as in "
                "towers=tw_core.towers(devices)."
            )
        lists = lists[:1]
    check_alike(lists)
    twice = repeated_variables([v for tower in lists for v in tower])
    if twice:
        raise ValueError(
            f"variables holds {sorted(v.name for v in twice)} more than once; every "
            "tower must have its own variables, or all the same list."
        )
    return lists


def check_alike(lists: Sequence[Sequence[Any]]) -> None:
    """Refuses towers whose variables differ, or are not in the same order."""
    pairs = [[(None, v) for v in tf_variables(tower)] for tower in lists]
    check_grad_list(pairs, allow_none=True)


def check_differentiation(
    loss: object,
    var_list: Iterable[Any] | None,
    options: Mapping[str, Any],
    *,
    default: Iterable[Any],
    gradients: Callable[..., Any],
) -> list[Any]:
    """Checks the arguments of a ``compute_gradients``; returns its variables."""
    check_loss(loss)
    known = [*inspect.signature(gradients).parameters][2:]
    unknown = sorted(set(options) - set(known))
    if unknown:
        raise TypeError(f"Unknown options {unknown}; known are {known}.")
    if var_list is not None and not isinstance(var_list, list | tuple):
        raise TypeError(
            "var_list must be a list of variables, or None for all trainable ones; got "
            f"{var_list!r}."
        )
    variables = list(default if var_list is None else var_list)
    if not variables:
        raise ValueError(
            "No variables; pass those that the loss trains, or None for all trainable "
            f"ones made so far; got var_list={var_list!r}."
        )
    return check_variables(variables)


def check_value(value: object) -> None:
    """Refuses a value that cannot be scaled."""
    kinds = (tf.Tensor, tf.Variable, tf.IndexedSlices, np.ndarray, np.generic)
    if not isinstance(value, kinds):
        raise TypeError(f"value must be a tensor, e.g. a loss; got {value!r}.")
    dtype = tf.as_dtype(value.dtype)
    if not dtype.is_floating:
        raise TypeError(f"value must be of a floating dtype; got {dtype.name}.")
    check_same_graph([value], lambda _: "value")


def check_counter(global_step: Any) -> None:
    """Refuses a ``global_step`` that cannot count updates; accepts None."""
    if global_step is None:
        return
    if not is_variable(global_step):
        raise TypeError(
            f"global_step must be a variable that counts updates; got {global_step!r}."
        )
    check_numeric_scalar(tf_variable(global_step), name="global_step")


def check_numeric_scalar(value: Any, *, name: str) -> None:
    """Refuses a tensor or variable that is not a numeric scalar."""
    dtype = tf.as_dtype(value.dtype).base_dtype
    if not (dtype.is_floating or dtype.is_integer):
        raise TypeError(f"{name} must be numeric; got {dtype.name}.")
    if not tf.TensorShape(value.shape).is_compatible_with([]):
        raise ValueError(f"{name} must be a scalar; got shape {value.shape}.")
    check_same_graph([value], lambda _: name)


def check_slot(var: object, name: object) -> None:
    """Refuses arguments that cannot identify a slot."""
    if not is_variable(var):
        raise TypeError(f"var must be a variable; got {var!r}.")
    check_text(name=name)


def check_same_graph(values: Sequence[Any], name: Callable[[int], str]) -> None:
    """Refuses values that ops made now cannot use; ``name(n)`` names value n."""
    is_eager = tf.executing_eagerly()
    usable = [] if is_eager else [*graphs_around(tf.compat.v1.get_default_graph())]
    foreign = [name(n) for n, v in enumerate(values) if not _is_usable(v, usable)]
    if foreign:
        raise ValueError(
            "Everything must belong to the graph that is being built; got "
            f"{', '.join(foreign)} of another graph, of eager mode, or of a tf.cond "
            "branch, a loop or a function that is finished. Build both in one place."
        )


def graphs_around(graph: tf.Graph) -> Iterator[tf.Graph]:
    """Yields a graph, then the graphs around it, from the inside out."""
    while graph is not None:
        yield graph
        graph = getattr(graph, "outer_graph", None)


def lists_by_tower(values: Any, wanted: str) -> list[list[Any]]:
    """Returns [K][N] values; [1][N] if they were passed as a single list."""
    if not isinstance(values, Sequence) or isinstance(values, str):
        raise TypeError(f"{wanted}; got {values!r}.")
    are_lists = [isinstance(tower, list | tuple) for tower in values]
    if not any(are_lists):
        return [list(values)]
    if not all(are_lists):
        raise TypeError(f"{wanted}; got lists and others: {values!r}.")
    return [list(tower) for tower in values]


def name_of(variable: Any) -> str:
    """Returns a variable's name for messages; for a Keras variable, its path."""
    return str(getattr(variable, "path", None) or variable.name)


def _is_usable(value: Any, usable: Sequence[tf.Graph]) -> bool:
    if not isinstance(value, tf.Tensor):
        value = tf_variable(value) if is_variable(value) else values_of(value)
    if not isinstance(value, tf.Tensor | tf.Variable):
        return True
    try:
        graph = value.graph
    except AttributeError:  # eager tensors and variables have none
        return not builds_session_graph()
    return any(graph is other for other in usable)
