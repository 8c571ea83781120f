"""One copy of a model per tower, and copying tower 0's values to the others."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import tensorflow as tf

from tw_core._checks import check_function, check_nested
from tw_core._modes import builds_session_graph, traces_function, without_autograph
from tw_core._records.builds import tower_build
from tw_core._records.matching import shared_variables
from tw_core._towers import Tower, check_towers
from tw_core._variable_kinds import (
    is_variable,
    refuse_reference_variables,
    tf_variables,
)
from tw_core.variables._policies import Replicated

_T = TypeVar("_T")


def replicate(towers: Sequence[Tower], factory: Callable[[Tower], _T]) -> list[_T]:
    """Makes one copy of a model per tower, each on its tower's device.

    Outside of graphs the copies start with tower 0's values, except the state of
    Keras's random generators. In a session graph the variables of
    towers 1 and up are local ones below ``tower<k>/``; run the op of
    ``copy_to_replicas`` after the initialisers.

    Args:
      towers: K towers.
      factory: takes a tower and returns a ``tf.Module``, a built Keras model,
        or anything with ``variables``; a new one each time.

    Returns:
      K models, tower 0's first.

    Raises:
      RuntimeError: inside a ``tf.function``, where variables must not be made.
      ValueError: no tower, an unknown device, an unbuilt Keras model, copies
        that share variables or whose variables differ.
      TypeError: ``factory`` is not a function, or returns something without
        ``variables``.
    """
    check_towers(towers)
    check_function(factory=factory)
    if traces_function():
        raise RuntimeError(
            "replicate: makes variables, and so must be called outside of the "
            "tf.function that uses them."
        )
    replicas = []
    with tower_build():
        for tower in towers:
            with tf.device(tower.device), _own_names(tower):
                replicas.append(factory(tower))
    variable_lists = [_variables_to_copy(replica) for replica in replicas]
    _check_replicas(variable_lists)
    if not builds_session_graph():
        copy_values(variable_lists)
    return replicas


@contextmanager
def _own_names(tower: Tower) -> Iterator[None]:
    if not builds_session_graph():
        yield
        return
    with Replicated().scope(tower):
        if tower.is_main:
            yield
            return
        scope = tf.compat.v1.get_default_graph().get_name_scope()
        # With a slash at the end, the name stays free for a tower context.
        with tf.name_scope(f"{scope}/{tower.name}/" if scope else f"{tower.name}/"):
            yield


def _variables_to_copy(replica: Any) -> list[Any]:
    if getattr(replica, "built", True) is False:
        raise ValueError(
            f"replicate: the factory returned {type(replica).__name__} "
            f"{getattr(replica, 'name', '')!r} without its variables; build the Keras "
            "model first: model.build(input_shape), or give it a keras.Input."
        )
    if not hasattr(replica, "variables"):
        raise TypeError(
            f"replicate: the factory returned {type(replica).__name__}, which has no "
            "`variables`; return a tf.Module, a Keras model, or an object with a "
            "`variables` list."
        )
    variables = replica.variables
    variables = variables() if callable(variables) else variables
    # Equal random states would give every tower the same dropout mask.
    return [
        v
        for v in variables
        if "seed_generator_state" not in str(getattr(v, "name", ""))
    ]


@without_autograph
def copy_to_replicas(
    variable_lists: Sequence[Sequence[tf.Variable]],
) -> tf.Operation | None:
    """Copies the variables of tower 0 to those of every other tower.

    Args:
      variable_lists: [K][M] variables; variable m of every tower is a copy of
        variable m of tower 0. Keras variables are accepted.

    Returns:
      In a graph, the op that copies (None for one tower). Eagerly, None, after
      copying. In a ``tf.function`` the copy happens at the point of the call.

    Raises:
      ValueError: no tower, lists that differ in length, shapes or dtypes, one
        variable in two towers, or a reference variable.
      TypeError: something that is not a variable.
    """
    _check_replicas(variable_lists)
    return copy_values(variable_lists)


@without_autograph
def copy_values(variable_lists: Sequence[Sequence[Any]]) -> tf.Operation | None:
    """As ``copy_to_replicas``, for lists that were checked."""
    lists = list(map(tf_variables, variable_lists))
    assigns = []
    with tf.name_scope("sync_variables"):  # for timelines
        for source, *copies in zip(*lists, strict=True):
            with tf.device(source.device):
                value = source.read_value()
            for variable in copies:
                with tf.device(variable.device):
                    assigns.append(variable.assign(value, read_value=False))
    if tf.executing_eagerly() or len(lists) == 1:
        return None
    return tf.group(*assigns, name="copy_to_replicas")


def _check_replicas(variable_lists: Sequence[Sequence[Any]]) -> None:
    """Refuses lists that are not [K][M] copies of each other; names every offender."""
    check_nested(variable_lists=variable_lists, of="variables")
    if not variable_lists:
        raise ValueError(
            "No tower's variables were given; pass [K][M] variables, one list per "
            "tower."
        )
    others = [
        f"tower {k} number {m}: {type(v).__name__}"
        for k, variables in enumerate(variable_lists)
        for m, v in enumerate(variables)
        if not is_variable(v)
    ]
    if others:
        raise TypeError(
            "variable_lists must be [K][M] TensorFlow or Keras variables; got "
            f"{', '.join(others)}."
        )
    refuse_reference_variables(v for vs in variable_lists for v in vs)
    _check_are_copies(variable_lists)


def _check_are_copies(variable_lists: Sequence[Sequence[Any]]) -> None:
    counts = [len(variables) for variables in variable_lists]
    if len(set(counts)) > 1:
        names = [[v.name for v in variables] for variables in variable_lists]
        raise ValueError(
            f"Every tower must have the same variables; got {counts} of them in towers "
            f"0..{len(counts) - 1}: {names}."
        )
    shared = [
        f"{name} in towers {towers}"
        for name, towers in shared_variables(variable_lists)
    ]
    if shared:
        raise ValueError(
            "Every tower must have variables of its own; got shared ones: "
            f"{', '.join(shared)}. Make a new model for each tower."
        )
    columns = zip(*map(tf_variables, variable_lists), strict=True)
    different = [
        f"number {m}: {[(v.name, str(v.shape), v.dtype.name) for v in column]}"
        for m, column in enumerate(columns)
        if len({(str(v.shape), v.dtype) for v in column}) > 1
    ]
    if different:
        raise ValueError(
            "The towers' variables must agree in shape and dtype; got "
            f"{'; '.join(different)}."
        )
