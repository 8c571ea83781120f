"""The optimizer of sharded towers, made once and saved as tower 0's.

Its slots are on the devices of the variables' owners. ``tf.train.Checkpoint`` finds
slots by the variable that they belong to, so saving and restoring takes a second object
over tower 0's variables, which holds the same state.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import tensorflow as tf

from tw_builders._apply import (
    MADE_EARLY,
    check_one_per_tower,
    one_optimizer_per_tower,
    trainable_variables,
)
from tw_builders._owners import check_homes, owned
from tw_core import Tower
from tw_core.gradients import check_grad_list, merge_grad_list
from tw_core.internal import (
    Gradients,
    OptimizerKind,
    check_any_gradient,
    check_function,
    check_nested,
    create_slots,
    kind_of,
    orders_effects,
    read_pairs,
    shared_variables,
    tf_variable,
)

_T = TypeVar("_T")


def make_sharded_optimizer(
    towers: Sequence[Tower], get_opt_fn: Callable[[], _T], replicas: Sequence[Any]
) -> tuple[_T, _T]:
    """Makes the optimizer of ``apply_sharded_gradients``.

    Outside graphs, optimizers of Keras and of ``tf.compat.v1.train`` create their
    state at once: slots on the device of the variable's owner.

    Args:
      towers: K towers.
      get_opt_fn: returns a new optimizer; called twice outside graphs.
      replicas: K models or lists of variables, as for ``apply_sharded_gradients``.

    Returns:
      The optimizer; and an optimizer of tower 0's variables with the same state, for
      ``tf.train.Checkpoint``: it saves and restores the structure of a replicated
      run. In a session graph, and for other kinds of optimizer, both are one object.

    Raises:
      ValueError: the numbers of replicas and towers differ; replicas that differ, share
        a variable or have one that is not on their tower's device; a device that is
        known not to exist; an optimizer that was built for other variables.
      TypeError: ``get_opt_fn`` did not return an optimizer, or in a session graph a
        Keras 3 one; something that is not a tower, function or replica.
    """
    variables = own_variables(towers, replicas)
    check_function(get_opt_fn=get_opt_fn)
    main, owners = towers[:1], owned(variables)
    if not tf.executing_eagerly():
        [optimizer] = one_optimizer_per_tower(main, get_opt_fn)
        return optimizer, optimizer
    state: list[tf.Variable] = []

    def note(next_creator: Callable[..., tf.Variable], **kwargs: Any) -> tf.Variable:
        state.append(next_creator(**kwargs))
        return state[-1]

    with tf.variable_creator_scope(note):
        [optimizer] = one_optimizer_per_tower(main, get_opt_fn)
        if getattr(optimizer, "built", False):
            raise ValueError(
                f"{type(optimizer).__name__} is already built, and its slots would not "
                "be with the owners of the variables; return a new one from "
                "get_opt_fn, without calling build."
            )
        if kind_of(optimizer) not in MADE_EARLY:
            return optimizer, optimizer
        with tf.device(main[0].device):
            create_slots(optimizer, owners)
    return optimizer, _over(state, main, get_opt_fn, variables[0])


def owned_variables(towers: Sequence[Tower], replicas: Sequence[Any]) -> list[Any]:
    """Returns the owner's copy of every variable, in the order of the variables.

    For optimizers that take their variables when they are made, such as
    ``tw_ampopt.TowerOptimizer``.

    Args:
      towers: K towers.
      replicas: K models or lists of variables, as for ``apply_sharded_gradients``.

    Returns:
      [N] variables, as given (Keras's or TensorFlow's).

    Raises:
      ValueError: as ``make_sharded_optimizer``.
      TypeError: something that is not a tower or replica.
    """
    return owned(own_variables(towers, replicas))


def own_variables(towers: Sequence[Tower], replicas: Sequence[Any]) -> list[list[Any]]:
    """Lists [K][N] variables; checks that towers share none and each is at home."""
    check_one_per_tower(towers, replicas=replicas)
    variables = [trainable_variables(replica) for replica in replicas]
    check_grad_list([[(None, v) for v in own] for own in variables], allow_none=True)
    shared = [f"{name} in towers {ks}" for name, ks in shared_variables(variables)]
    if shared:
        raise ValueError(
            "Every tower must have variables of its own; got shared ones: "
            f"{', '.join(shared)}. Make a new model for each tower."
        )
    check_homes(towers, variables)
    return variables


def read_with_none(
    towers: Sequence[Tower], grads: Sequence[Sequence[Any]], replicas: Sequence[Any]
) -> Gradients:
    """Reads [K][N] gradients; one may be None, but then in all towers."""
    check_nested(grads=grads, of="gradients")
    variables = own_variables(towers, replicas)
    read = read_pairs(merge_grad_list(grads, variables), allow_none=True)
    check_any_gradient([g for own in grads for g in own], variables[0])
    partly = [
        variable.name
        for variable, *column in zip(variables[0], *grads, strict=True)
        if len({grad is None for grad in column}) > 1
    ]
    if partly:
        raise ValueError(
            "A variable must have a gradient in every tower or in none; got None in "
            f"some towers for {', '.join(partly)}."
        )
    return read


@contextmanager
def for_owners(
    optimizer: Any, owners: Sequence[Any], columns: Sequence[Sequence[Any]]
) -> Iterator[None]:
    """Refuses an optimizer that has its state for variables other than ``owners``.

    Those of ``tf.compat.v1.train`` would make new slots, which no checkpoint has.
    """
    refusal = (
        f"{type(optimizer).__name__} has state for variables other than the "
        "owners' copies; pass the first optimizer that make_sharded_optimizer returned "
        "for these replicas (the second is for checkpoints), and flat models as "
        "flatten returned them."
    )
    if orders_effects():
        pairs = zip(owners, zip(*columns, strict=True), strict=True)
        if any(
            _has_slot_elsewhere(optimizer, owner, column) for owner, column in pairs
        ):
            raise ValueError(refusal)
    try:
        yield
    except (ValueError, KeyError) as error:
        # The messages of Keras 3 and tf_keras.
        if "Unknown variable" in str(error) or "cannot recognize" in str(error):
            raise ValueError(refusal) from error
        raise


def _has_slot_elsewhere(optimizer: Any, owner: Any, column: Sequence[Any]) -> bool:
    if kind_of(optimizer) is not OptimizerKind.V1:
        return False

    def has_slot(variable: Any) -> bool:
        plain, names = tf_variable(variable), optimizer.get_slot_names()
        return any(optimizer.get_slot(plain, name) is not None for name in names)

    return not has_slot(owner) and any(map(has_slot, column))


def _over(
    state: Sequence[tf.Variable],
    main: Sequence[Tower],
    get_opt_fn: Callable[[], _T],
    variables: Sequence[Any],
) -> _T:
    """Makes an optimizer of ``variables`` over the state of another, in its order."""
    left = iter(state)

    def hand_out(next_creator: Any, **kwargs: Any) -> tf.Variable:
        del next_creator, kwargs
        for variable in left:
            return variable
        raise other_state

    other_state = ValueError(
        "get_opt_fn made different variables in its second call than in its first; "
        "make variables that both calls share beforehand, and pass them to the "
        "optimizer."
    )
    with tf.variable_creator_scope(hand_out):
        [optimizer] = one_optimizer_per_tower(main, get_opt_fn)
        with tf.device(main[0].device):
            create_slots(optimizer, variables)
    if any(True for _ in left):
        raise other_state
    return optimizer
