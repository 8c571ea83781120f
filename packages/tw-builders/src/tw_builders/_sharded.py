"""Synchronous training with copies of the variables, each updated by one tower.

Each variable has an owner among the towers, which adds its gradients, applies them with
the only copy of the slots, and gives the other towers the new value. One optimizer
object works on the owners' copies: operations on all gradients at once (a global norm,
a gate) have all of them, and state that an optimizer has once exists once.
"""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tw_builders._apply import (
    check_one_per_tower,
    read_replicas,
    reduce_onto,
    with_flat,
)
from tw_builders._owners import (
    UpdateWatch,
    check_homes,
    copy_from_owners,
    owned,
    state_as_of,
)
from tw_builders._sharded_optimizer import for_owners, read_with_none
from tw_core import Tower
from tw_core.internal import (
    apply_pairs,
    check_flag,
    check_optimizer,
    orders_effects,
    record_variables,
    tf_variable,
    tower_build,
    without_autograph,
)
from tw_reduce.reducers import check_weights


@without_autograph
def apply_sharded_gradients(
    towers: Sequence[Tower],
    grads: Sequence[Sequence[Any]],
    replicas: Sequence[Any],
    optimizer: Any,
    *,
    average: bool = True,
    weights: Sequence[Any] | None = None,
    jit_compile: bool = False,
) -> tf.Operation | None:
    """Adds all towers' gradients, updates each variable once, and copies it.

    Each variable's gradients are added and applied by its owner; the other towers take
    the new value. Sums for large variables do not wait for each other; the gradients of
    small ones are sent to their owner in one packed tensor. In a session graph nothing
    is updated before all sums are computed.

    Args:
      towers: K towers.
      grads: [K][N] gradients of the towers, not reduced; tensors or
        ``IndexedSlices``.
      replicas: K models with ``trainable_variables``, or lists of N variables.
      optimizer: the first that ``make_sharded_optimizer`` returned.
      average: whether to divide by K.
      weights: [K] weight of each tower's gradients in the mean, such as its rows;
        see ``tw_reduce.mean``. None for equal weights.
      jit_compile: as for ``apply_gradients``, with an optimizer of Keras 3.

    Returns:
      In a session graph the op that does all of this; else None. In a session graph the
      optimizer's state is global, under the names that it has for tower 0's variables.

    Raises:
      ValueError: lengths other than K or N, gradients that are None or differ
        between towers, a variable that several towers share or that is not on its
        tower's device, a device that is known not to exist, or an optimizer that has
        its state for other variables; weights without ``average``, or as
        ``tw_reduce.mean``; ``jit_compile`` with another optimizer.
      TypeError: something that is not an optimizer, or a Keras 3 one in a session
        graph; something that is not a tower, gradient, replica or list of them;
        integer gradients with ``average``; weights as ``tw_reduce.mean``.
      RuntimeError: ``jit_compile`` outside of ``tf.function``.
    """
    check_one_per_tower(towers, grads=grads, replicas=replicas)
    check_flag(average=average)
    check_flag(jit_compile=jit_compile)
    check_weights(weights, num_towers=len(towers), average=average)
    check_optimizer(optimizer)
    packed = read_replicas(grads, replicas)
    variables = packed.variables
    check_homes(towers, variables)
    owners = owned(variables, optimizer)
    reduced = reduce_onto(owners, packed, average=average, weights=weights)
    return apply_and_copy(
        towers[0], reduced, variables, optimizer, jit_compile=jit_compile
    )


@without_autograph
def apply_at_owners(
    towers: Sequence[Tower],
    grads: Sequence[Sequence[Any]],
    replicas: Sequence[Any],
    optimizer: Any,
    *,
    jit_compile: bool = False,
) -> tf.Operation | None:
    """Updates each variable once from reduced gradients, and copies it to all towers.

    Like ``apply_sharded_gradients`` without the sum: for gradients that are already
    weighted, reduced or clipped. It can serve as an ``apply_fn`` of ``tw_rlload``.

    Args:
      towers: K towers.
      grads: [K][N] reduced gradients, equal over the towers, of which the owner's is
        applied; tensors or ``IndexedSlices``, or None for a variable in all towers.
      replicas: K models with ``trainable_variables``, or lists of N variables.
      optimizer: the first that ``make_sharded_optimizer`` returned.
      jit_compile: as for ``apply_sharded_gradients``.

    Returns:
      As ``apply_sharded_gradients``.

    Raises:
      ValueError: as ``apply_sharded_gradients``, except that None in all towers is
        allowed; no gradient at all.
      TypeError: as ``apply_sharded_gradients``.
    """
    check_one_per_tower(towers, grads=grads, replicas=replicas)
    check_flag(jit_compile=jit_compile)
    check_optimizer(optimizer)
    packed = with_flat(read_with_none(towers, grads, replicas))
    variables = packed.variables
    grad_of = {id(variable): grad for own in packed.pairs for grad, variable in own}
    pairs = [(grad_of[id(own)], own) for own in owned(variables, optimizer)]
    # An optimizer that computes gradients may need every variable that it was made for,
    # as tw_ampopt.TowerOptimizer does. Keras's compute none, and warn about None.
    takes_none = orders_effects() and hasattr(optimizer, "compute_gradients")
    used = [n for n, (grad, _) in enumerate(pairs) if takes_none or grad is not None]
    return apply_and_copy(
        towers[0],
        [pairs[n] for n in used],
        [[own[n] for n in used] for own in variables],
        optimizer,
        jit_compile=jit_compile,
    )


def apply_and_copy(
    main: Tower,
    reduced: Sequence[tuple[Any, Any]],
    variables: Sequence[Sequence[Any]],
    optimizer: Any,
    *,
    jit_compile: bool = False,
) -> tf.Operation | None:
    """Applies [N] reduced pairs of owners, and copies the new values to all towers."""
    owners = [variable for _, variable in reduced]
    plain = [tf_variable(variable) for variable in owners]
    originals = [tf_variable(variable) for variable in variables[0]]
    watch = None if orders_effects() else UpdateWatch(plain)
    with (
        for_owners(optimizer, owners, variables),
        tower_build(),
        tf.device(main.device),
        record_variables(main),
        state_as_of(originals, plain),
    ):
        applied = apply_pairs(
            optimizer, reduced, name="apply_grad", jit_compile=jit_compile
        )
    with tf.name_scope("copy_from_owners"):
        if watch is None:
            copy_from_owners(variables, owners, jit_compile=jit_compile)
            return None
        copies = copy_from_owners(variables, owners, watch.updates(applied))
    return tf.group(applied, *copies, name="train_op")
