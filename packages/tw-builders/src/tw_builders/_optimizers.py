"""One optimizer object per tower, and what is asked of each.

One object over several replicated towers would advance its own state (such as
Adam's ``beta1_power``) several times a step, and the replicas would drift
apart.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import tensorflow as tf

from tw_builders._tf_compat import create_v1_slots
from tw_core import (
    Tower,
    leave_no_summaries,
    orders_effects,
    override_to_local_variable,
    record_variables,
    tower_build,
)
from tw_core.checks import check_function, check_list

_T = TypeVar("_T")


def make_optimizers(
    towers: Sequence[Tower],
    get_opt_fn: Callable[[], _T],
    replicas: Sequence[Any] | None = None,
) -> list[_T]:
    """Calls ``get_opt_fn`` once per tower.

    In a session graph, variables that it makes with ``get_variable`` are shared
    between the calls, and those that it makes otherwise are local ones from
    tower 1 on; of its summaries only those of the first call are kept. Outside of
    graphs, optimizers of Keras 3 and of ``tf.compat.v1.train`` make their state at
    once, on their tower's device, where ``replicas`` is given: inside a
    ``tf.function`` that would trace it twice.

    Args:
      towers: K towers.
      get_opt_fn: returns a new optimizer.
      replicas: K models or lists of variables, as for ``apply_gradients``.

    Returns:
      K optimizers.

    Raises:
      ValueError: two calls returned the same object, or another number of replicas
        than towers.
      TypeError: a call returned no optimizer, or in a session graph a Keras 3
        optimizer; no towers, function or replicas.
    """
    check_towers(towers, caller="make_optimizers")
    variables = _variables_of(replicas, len(towers))
    optimizers = one_optimizer_per_tower(towers, get_opt_fn, caller="make_optimizers")
    if tf.executing_eagerly():
        for tower, optimizer, own in zip(towers, optimizers, variables, strict=False):
            _build(tower, optimizer, own)
    return optimizers


def one_optimizer_per_tower(
    towers: Sequence[Tower], get_opt_fn: Callable[[], _T], *, caller: str
) -> list[_T]:
    """Makes the optimizers of ``make_optimizers``, without their state."""
    check_function(caller, get_opt_fn=get_opt_fn)
    with tower_build():
        optimizers = [_make(tower, get_opt_fn) for tower in towers]
    check_optimizers(optimizers, caller=caller)
    return optimizers


def check_towers(towers: Sequence[Tower], *, caller: str) -> None:
    """Refuses what is no list of towers."""
    check_list(caller, towers=towers, of="tw_core.Tower")
    others = [tower for tower in towers if not isinstance(tower, Tower)]
    if others:
        raise TypeError(
            f"{caller}: towers must hold tw_core.Tower; got {others}. Make them with "
            "tw_core.towers(devices)."
        )


def _variables_of(replicas: Sequence[Any] | None, total: int) -> list[list[Any]]:
    if replicas is None:
        return []
    check_list("make_optimizers", replicas=replicas, of="models", empty=True)
    if len(replicas) != total:
        raise ValueError(
            f"make_optimizers: wants one replica a tower; got {len(replicas)} for "
            f"{total} towers."
        )
    return [trainable_variables(r, caller="make_optimizers") for r in replicas]


def check_optimizers(optimizers: Sequence[Any], *, caller: str) -> None:
    """Refuses a shared object, what is no optimizer, and Keras 3 in a session."""
    for k, optimizer in enumerate(optimizers):
        check_optimizer(optimizer, caller=caller)
        same = [j for j in range(k) if optimizers[j] is optimizer]
        if same:
            raise ValueError(
                f"{caller}: towers {same[0]} and {k} got the same "
                f"{type(optimizer).__name__} object; every tower needs an optimizer "
                "of its own, or the replicas drift apart. Make a new one in each "
                "call of get_opt_fn."
            )


def check_optimizer(optimizer: Any, *, caller: str) -> None:
    """Refuses what is no optimizer, and a Keras 3 one in a session graph."""
    is_class = isinstance(optimizer, type)
    if is_class or not callable(getattr(optimizer, "apply_gradients", None)):
        got = (
            f"the class {optimizer.__name__}" if is_class else type(optimizer).__name__
        )
        raise TypeError(
            f"{caller}: got {got} where an optimizer was wanted; "
            "it needs apply_gradients(pairs), as tf.compat.v1.train.AdamOptimizer has."
        )
    # A function called by a session graph orders them; a branch of it does not.
    needs_op = not orders_effects()
    if needs_op and is_keras_optimizer(optimizer):
        raise TypeError(
            f"{caller}: the Keras 3 optimizer {type(optimizer).__name__} does not work "
            "in a session graph; use one of tf.compat.v1.train, a tf_keras legacy "
            "optimizer, or tw_ampopt.Optimizer, which wraps it; or train in a "
            "tf.function."
        )
    if needs_op and _is_new_tf_keras_optimizer(optimizer):
        raise TypeError(
            f"{caller}: the tf_keras optimizer {type(optimizer).__name__} updates "
            "nothing in a session graph; use the one of the same name in "
            "tf_keras.optimizers.legacy, or one of tf.compat.v1.train."
        )


def as_tf_variable(variable: Any) -> tf.Variable:
    """Returns the TensorFlow variable that a Keras variable holds, or itself."""
    return variable if isinstance(variable, tf.Variable) else variable.value


def is_keras_optimizer(optimizer: Any) -> bool:
    """Tells whether an optimizer is one of Keras 3."""
    return any(c.__module__.split(".")[0] == "keras" for c in type(optimizer).__mro__)


def _is_new_tf_keras_optimizer(optimizer: Any) -> bool:
    homes = [c.__module__ for c in type(optimizer).__mro__]
    return any(home.startswith("tf_keras.") for home in homes) and not any(
        ".legacy" in home for home in homes
    )


def trainable_variables(replica: Any, *, caller: str) -> list[Any]:
    """Lists a replica's trainable variables, as they are (Keras's or TensorFlow's)."""
    is_list = isinstance(replica, Sequence) and not isinstance(replica, str)
    variables = replica if is_list else getattr(replica, "trainable_variables", None)
    if not isinstance(variables, Sequence):
        raise TypeError(
            f"{caller}: a replica must be a list of variables, or have "
            f"trainable_variables; got {type(replica).__name__}."
        )
    others = [v for v in variables if not _is_variable(v)]
    if others:
        raise TypeError(f"{caller}: a replica must hold variables; got {others}.")
    return list(variables)


def _is_variable(value: Any) -> bool:
    held = getattr(value, "value", None)
    return isinstance(value, tf.Variable) or isinstance(held, tf.Variable)


def _build(tower: Tower, optimizer: Any, variables: Sequence[Any]) -> None:
    with tf.device(tower.device), tower_name_scope(tower):
        if is_keras_optimizer(optimizer):
            optimizer.build(variables)
        else:
            create_v1_slots(optimizer, [as_tf_variable(v) for v in variables])


def _make(tower: Tower, get_opt_fn: Callable[[], _T]) -> _T:
    if tf.executing_eagerly():
        with tf.device(tower.device):
            return get_opt_fn()
    v1 = tf.compat.v1
    with (
        v1.variable_scope(
            v1.get_variable_scope(), reuse=v1.AUTO_REUSE, auxiliary_name_scope=False
        ),
        override_to_local_variable(enable=not tower.is_main),
        leave_no_summaries(enable=not tower.is_main),
        tower_name_scope(tower),
        record_variables(tower),
    ):
        return get_opt_fn()


def tower_name_scope(tower: Tower) -> AbstractContextManager[Any]:
    """Re-enters a tower's name scope, from tower 1 on.

    Variables that an optimizer makes there (``tower1/beta1_power``) then have
    tower 0's name behind the tower's.
    """
    return nullcontext() if tower.is_main else tf.name_scope(f"{tower.name}/")
