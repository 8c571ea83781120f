"""One copy of a model per tower, on the tower's device."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import tensorflow as tf

from tw_core._copy_to_replicas import check_replicas, copy_to_replicas
from tw_core._mode import builds_session_graph, traces_function
from tw_core._tower import Tower, check_towers
from tw_core._tower_variables import tower_build
from tw_core._variable_policies import Replicated
from tw_core.checks import check_function

_T = TypeVar("_T")


def replicate(towers: Sequence[Tower], factory: Callable[[Tower], _T]) -> list[_T]:
    """Makes one copy of a model per tower, each on its tower's device.

    Outside of graphs the copies start with tower 0's values; the state of Keras's
    random generators stays each tower's own. In a session graph the variables of
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
      ValueError: no tower, an unknown device, a Keras model without its
        variables yet, copies that share variables or whose variables differ.
      TypeError: ``factory`` is no function, or returns something without
        ``variables``.
    """
    check_towers(towers, caller="replicate")
    check_function("replicate", factory=factory)
    if traces_function():
        raise RuntimeError(
            "replicate: makes variables, and so must be called outside of the "
            "tf.function that uses them."
        )
    with tower_build():
        replicas = [_make_replica(tower, factory) for tower in towers]
    variable_lists = [_variables_to_copy(replica) for replica in replicas]
    check_replicas(variable_lists, caller="replicate")
    if not builds_session_graph():
        copy_to_replicas(variable_lists)
    return replicas


def _make_replica(tower: Tower, factory: Callable[[Tower], _T]) -> _T:
    with tf.device(tower.device), _own_names(tower):
        return factory(tower)


@contextmanager
def _own_names(tower: Tower) -> Iterator[None]:
    if not builds_session_graph():
        yield
        return
    if tower.is_main:
        with Replicated().scope(tower):
            yield
        return
    scope = tf.compat.v1.get_default_graph().get_name_scope()
    # Ending in a slash, the name stays free for a tower context.
    with (
        Replicated().scope(tower),
        tf.name_scope(f"{scope}/{tower.name}/" if scope else f"{tower.name}/"),
    ):
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
    return [v for v in variables if not _is_random_state(v)]


def _is_random_state(variable: Any) -> bool:
    # Equal states would give every tower the same dropout mask.
    return "seed_generator_state" in str(getattr(variable, "name", ""))
