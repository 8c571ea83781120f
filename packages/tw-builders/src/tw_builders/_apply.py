"""Applying reduced gradients: once to shared variables, or in every replica.

The same functions serve a session graph (they return the op) and a
``tf.function`` (the update happens where they are called).
"""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tw_builders._callers import naming
from tw_builders._optimizers import (
    as_tf_variable,
    check_optimizer,
    check_optimizers,
    check_towers,
    is_keras_optimizer,
    tower_name_scope,
    trainable_variables,
)
from tw_core import (
    Tower,
    check_replicated_grad_list,
    check_shared_grad_list,
    ensure_gradient_shapes,
    leave_no_summaries,
    merge_grad_list,
    orders_effects,
    override_to_local_variable,
    record_variables,
    sum_duplicate_rows,
    tower_build,
    without_autograph,
)
from tw_core.checks import check_flag, check_list
from tw_reduce import aggregate_grads_colocate


@without_autograph
def apply_gradients(
    towers: Sequence[Tower],
    grads: Sequence[Sequence[Any]],
    replicas: Sequence[Any],
    optimizers: Sequence[Any],
) -> tf.Operation | None:
    """Applies every tower's gradients to its replica, with its own optimizer.

    Args:
      towers: K towers.
      grads: [K][N] reduced gradients, equal over the towers; tensors or
        ``IndexedSlices``.
      replicas: K models with ``trainable_variables``, or lists of N variables.
      optimizers: K distinct optimizers: of ``tf.compat.v1.train``, of Keras 3
        (not in a session graph), or alike.

    Returns:
      In a session graph the op that applies all; else None. In a session graph
      the optimizer state of towers 1 and up is local and below ``tower<k>/``.

    Raises:
      ValueError: lengths other than K or N, gradients that are None or differ
        between towers, a variable that several towers share, or the same optimizer
        twice.
      TypeError: something that is no optimizer, or a Keras 3 one in a session
        graph; what is no tower, gradient, replica or list of them.
    """
    _check_counts(towers, grads, replicas, optimizers)
    check_towers(towers, caller="apply_gradients")
    check_optimizers(optimizers, caller="apply_gradients")
    variables = [trainable_variables(r, caller="apply_gradients") for r in replicas]
    for own in grads:
        check_list("apply_gradients", grads_of_a_tower=own, of="gradients", empty=True)
    pairs = merge_grad_list(grads, variables)
    check_replicated_grad_list(pairs, caller="apply_gradients")
    ensured = ensure_gradient_shapes(pairs)
    with tower_build():
        ops = [
            _apply_in_tower(tower, optimizer, own)
            for tower, optimizer, own in zip(towers, optimizers, ensured, strict=True)
        ]
    return None if orders_effects() else tf.group(*ops, name="train_op")


@without_autograph
def apply_shared_gradients(
    grad_list: Sequence[Sequence[tuple[Any, Any]]],
    optimizer: Any,
    *,
    average: bool = True,
) -> Any:
    """Adds all towers' gradients where each variable lives and applies them once.

    Args:
      grad_list: [K][N] (gradient, variable) pairs of the same N variables.
      optimizer: one optimizer.
      average: whether to divide by K.

    Returns:
      In a session graph the op that applies them; else None.

    Raises:
      ValueError: towers that bring different gradients or variables, or None.
      TypeError: something that is no optimizer, or a Keras 3 one in a session
        graph; integer gradients with ``average``.
    """
    check_flag("apply_shared_gradients", average=average)
    check_shared_grad_list(grad_list, caller="apply_shared_gradients")
    check_optimizer(optimizer, caller="apply_shared_gradients")
    own = [variable for _, variable in grad_list[0]]
    ensured = ensure_gradient_shapes(grad_list)
    plain = [[(grad, as_tf_variable(v)) for grad, v in tower] for tower in ensured]
    with naming("apply_shared_gradients"):
        reduced = aggregate_grads_colocate(plain, average=average)
    pairs = [(grad, v) for (grad, _), v in zip(reduced, own, strict=True)]
    op = apply_pairs(optimizer, pairs, name="train_op")
    return None if orders_effects() else op


def apply_pairs(
    optimizer: Any, pairs: Sequence[tuple[Any, Any]], *, name: str | None = None
) -> Any:
    """Calls an optimizer with the kind of variables and of rows that it takes.

    Keras optimizers get rows of one index as their sum: most of them take a
    square or the like of every row by itself.

    Returns:
      What ``optimizer.apply_gradients`` returned.
    """
    if is_keras_optimizer(optimizer):
        return optimizer.apply_gradients([(_rows_once(g), v) for g, v in pairs])
    plain = [(grad, as_tf_variable(variable)) for grad, variable in pairs]
    return optimizer.apply_gradients(plain, name=name)


def _rows_once(grad: Any) -> Any:
    return sum_duplicate_rows(grad) if isinstance(grad, tf.IndexedSlices) else grad


def _apply_in_tower(tower: Tower, optimizer: Any, pairs: Sequence[Any]) -> Any:
    # Without a name scope each, the beta1_power of two Adams would collide in a
    # tf.function, and have another name than tower 0's in a session graph.
    with (
        tf.device(tower.device),
        tower_name_scope(tower),
        override_to_local_variable(enable=not tower.is_main),
        leave_no_summaries(enable=not tower.is_main),
        record_variables(tower),
    ):
        return apply_pairs(optimizer, pairs, name="apply_grad")


def _check_counts(
    towers: Sequence[Tower],
    grads: Sequence[Any],
    replicas: Sequence[Any],
    optimizers: Sequence[Any],
) -> None:
    given = {"grads": grads, "replicas": replicas, "optimizers": optimizers}
    check_list("apply_gradients", towers=towers, of="tw_core.Tower", empty=True)
    for name, items in given.items():
        one = {name: items}
        check_list("apply_gradients", of="one item a tower", empty=True, **one)
    counts = {name: len(items) for name, items in given.items()}
    if not towers or any(count != len(towers) for count in counts.values()):
        raise ValueError(
            f"apply_gradients: wants one of each a tower; got {counts} for "
            f"{len(towers)} towers."
        )
