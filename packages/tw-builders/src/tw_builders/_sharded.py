"""Synchronous training with copies of the variables, each updated by one tower.

Each variable has an owner among the towers, which adds its gradients, applies them with
the only copy of the slots, and gives the other towers the new value. One optimizer
object works on the owners' copies: operations on all gradients at once (a global norm,
a gate) have them all, and state that exists once per optimizer exists once.
"""

from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeVar

import tensorflow as tf

from tw_builders._apply import (
    check_counts,
    ensure_and_pack,
    one_optimizer_per_tower,
    reduce_onto,
    replicated_pairs,
)
from tw_builders._base import (
    DataParallelBuilder,
    check_session_graph,
    check_tower_count,
)
from tw_builders._owners import (
    UpdateWatch,
    check_homes,
    copy_from_owners,
    owned,
    state_as_of,
)
from tw_builders._sharded_optimizer import for_owners, own_variables
from tw_builders._sync_variables import build_sync_op
from tw_core import Tower
from tw_core.checks import check_flag, check_function, check_list, naming, public
from tw_core.gradients import (
    GradList,
    check_any_gradient,
    check_grad_list,
    check_replicated_grad_list,
    merge_grad_list,
    split_grad_list,
)
from tw_core.modes import orders_effects, without_autograph
from tw_core.optimizers import apply_pairs, check_optimizer
from tw_core.variables import record_variables, tf_variable, tower_build
from tw_reduce.reducers import check_weights

_T = TypeVar("_T")


class SyncMultiGPUShardedBuilder(DataParallelBuilder):
    """Every tower has all variables; one tower updates each, and the rest copy it.

    Attributes:
      grads: after ``build``, [N] pairs of a reduced gradient and its owner's variable.
    """

    def __init__(
        self,
        towers: Sequence[int | str | Tower],
        average: bool,
        *,
        flat_below_bytes: int = 0,
        flat_group: Callable[[str], Hashable | None] | None = None,
    ) -> None:
        """Takes the towers.

        Args:
          towers: ints (GPU numbers) and device strings, or the result of
            ``tw_core.towers``.
          average: whether owners apply the mean of the gradients, or their sum.
          flat_below_bytes: as for ``DataParallelBuilder``; a flat variable has one
            owner.
          flat_group: as for ``DataParallelBuilder``.

        Raises:
          ValueError: as ``DataParallelBuilder``.
          TypeError: an ``average`` that is not a bool.
        """
        super().__init__(
            towers, flat_below_bytes=flat_below_bytes, flat_group=flat_group
        )
        check_flag("SyncMultiGPUShardedBuilder", average=average)
        self._average = average
        self.grads: list[tuple[Any, tf.Variable]] | None = None

    def call_for_each_tower(  # type: ignore[override]
        self, tower_fn: Callable[[], _T]
    ) -> list[_T]:
        """Calls ``tower_fn()`` in every tower.

        The variables of towers 1 and up are local and trainable, and are under
        ``tower<k>/``, as with ``SyncMultiGPUReplicatedBuilder``.

        Args:
          tower_fn: builds one tower; usually returns (gradient, variable) pairs.

        Returns:
          The K results.
        """
        check_function(
            "SyncMultiGPUShardedBuilder.call_for_each_tower", tower_fn=tower_fn
        )
        return DataParallelBuilder.build_on_towers(
            self.towers,
            self._in_flat(tower_fn),
            use_vs=[not tower.is_main for tower in self._towers],
        )

    def build(
        self,
        grad_list: GradList,
        get_opt_fn: Callable[[], Any],
        *,
        weights: Sequence[Any] | None = None,
    ) -> tuple[tf.Operation, tf.Operation | None]:
        """Builds reduction, updates and copies from the towers' gradients.

        Args:
          grad_list: [K][N] (gradient, variable) pairs.
          get_opt_fn: returns the optimizer; called once.
          weights: [K] weight of each tower's gradients in the mean, such as its
            rows; see ``tw_reduce.mean``. None for equal weights.

        Returns:
          The training op; and the op that copies every variable of tower 0 to the
          other towers (None for one tower). Run the copy after the initialisers and
          after restoring, or use ``SyncVariablesHook``. The optimizer's state exists
          once, under the names that it has for tower 0's variables.

        Raises:
          ValueError: towers with different gradients, or with None; a variable
            that several towers share, or that is not on its tower's device; weights
            without ``average``, or as ``tw_reduce.mean``.
          TypeError: something that is not an optimizer, or a Keras 3 one; weights as
            ``tw_reduce.mean``.
          RuntimeError: in eager mode or a ``tf.function``.
        """
        caller = "SyncMultiGPUShardedBuilder.build"
        check_session_graph(caller)
        check_tower_count(grad_list, len(self.towers), caller=caller)
        with naming(caller):
            check_replicated_grad_list(grad_list)
        packed = ensure_and_pack(grad_list)
        _, variables = split_grad_list(packed)
        check_homes(self._towers, variables, caller=caller)
        check_function(caller, get_opt_fn=get_opt_fn)
        public(caller)(check_weights)(
            weights, num_towers=len(self.towers), average=self._average
        )
        main = self._towers[:1]
        [optimizer] = one_optimizer_per_tower(main, get_opt_fn, caller=caller)
        self.grads = reduce_onto(
            owned(variables),
            packed,
            average=self._average,
            weights=weights,
            caller=caller,
        )
        train_op = _apply_and_copy(
            main[0], self.grads, variables, optimizer, caller=caller
        )
        post_init_op = build_sync_op(variables) if len(self.towers) > 1 else None
        return train_op, post_init_op


@without_autograph
def apply_sharded_gradients(
    towers: Sequence[Tower],
    grads: Sequence[Sequence[Any]],
    replicas: Sequence[Any],
    optimizer: Any,
    *,
    average: bool = True,
    weights: Sequence[Any] | None = None,
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

    Returns:
      In a session graph the op that does all of this; else None. In a session graph the
      optimizer's state is global, under the names that it has for tower 0's variables.

    Raises:
      ValueError: lengths other than K or N, gradients that are None or differ
        between towers, a variable that several towers share or that is not on its
        tower's device, a device that is known not to exist, or an optimizer that has
        its state for other variables; weights without ``average``, or as
        ``tw_reduce.mean``.
      TypeError: something that is not an optimizer, or a Keras 3 one in a session
        graph; something that is not a tower, gradient, replica or list of them;
        integer gradients with ``average``; weights as ``tw_reduce.mean``.
    """
    caller = "apply_sharded_gradients"
    check_counts(caller, towers, grads=grads, replicas=replicas)
    check_flag(caller, average=average)
    public(caller)(check_weights)(weights, num_towers=len(towers), average=average)
    public(caller)(check_optimizer)(optimizer)
    packed = ensure_and_pack(replicated_pairs(grads, replicas, caller=caller))
    _, variables = split_grad_list(packed)
    check_homes(towers, variables, caller=caller)
    owners = owned(variables)
    reduced = reduce_onto(
        owners, packed, average=average, weights=weights, caller=caller
    )
    return _apply_and_copy(towers[0], reduced, variables, optimizer, caller=caller)


@without_autograph
def apply_at_owners(
    towers: Sequence[Tower],
    grads: Sequence[Sequence[Any]],
    replicas: Sequence[Any],
    optimizer: Any,
) -> tf.Operation | None:
    """Updates each variable once from reduced gradients, and copies it to all towers.

    As ``apply_sharded_gradients`` without the sum: for gradients that were weighted,
    reduced or clipped before. It can serve as an ``apply_fn`` of ``tw_rlload``.

    Args:
      towers: K towers.
      grads: [K][N] reduced gradients, equal over the towers, of which the owner's is
        applied; tensors or ``IndexedSlices``, or None for a variable in all towers.
      replicas: K models with ``trainable_variables``, or lists of N variables.
      optimizer: the first that ``make_sharded_optimizer`` returned.

    Returns:
      As ``apply_sharded_gradients``.

    Raises:
      ValueError: as ``apply_sharded_gradients``, except that None in all towers is
        allowed; no gradient at all.
      TypeError: as ``apply_sharded_gradients``.
    """
    caller = "apply_at_owners"
    check_counts(caller, towers, grads=grads, replicas=replicas)
    public(caller)(check_optimizer)(optimizer)
    packed = ensure_and_pack(_reduced_pairs(towers, grads, replicas, caller=caller))
    _, variables = split_grad_list(packed)
    grad_of = {id(variable): grad for own in packed for grad, variable in own}
    pairs = [(grad_of[id(variable)], variable) for variable in owned(variables)]
    # An optimizer that computes gradients may need every variable that it was made for,
    # as tw_ampopt.TowerOptimizer does. Keras's compute none, and warn about None.
    takes_none = orders_effects() and hasattr(optimizer, "compute_gradients")
    used = [n for n, (grad, _) in enumerate(pairs) if takes_none or grad is not None]
    return _apply_and_copy(
        towers[0],
        [pairs[n] for n in used],
        [[own[n] for n in used] for own in variables],
        optimizer,
        caller=caller,
    )


def _reduced_pairs(
    towers: Sequence[Tower],
    grads: Sequence[Sequence[Any]],
    replicas: Sequence[Any],
    *,
    caller: str,
) -> GradList:
    """Makes [K][N] checked pairs; a gradient may be None, but then in all towers."""
    variables = own_variables(towers, replicas, caller=caller)
    for own in grads:
        check_list(caller, grads_of_a_tower=own, of="gradients", empty=True)
    with naming(caller):
        grad_list = merge_grad_list(grads, variables)
        check_grad_list(grad_list, allow_none=True)
    public(caller)(check_any_gradient)([g for own in grads for g in own], variables[0])
    partly = [
        variable.name
        for variable, *column in zip(variables[0], *grads, strict=True)
        if len({grad is None for grad in column}) > 1
    ]
    if partly:
        raise ValueError(
            f"{caller}: a variable has a gradient in every tower or in none; got None "
            f"in some towers for {', '.join(partly)}."
        )
    return grad_list


def _apply_and_copy(
    main: Tower,
    reduced: Sequence[tuple[Any, Any]],
    variables: Sequence[Sequence[Any]],
    optimizer: Any,
    *,
    caller: str,
) -> tf.Operation | None:
    """Applies [N] reduced pairs of owners, and copies the new values to all towers."""
    owners = [variable for _, variable in reduced]
    plain = [tf_variable(variable) for variable in owners]
    originals = [tf_variable(variable) for variable in variables[0]]
    watch = None if orders_effects() else UpdateWatch(plain)
    with (
        for_owners(optimizer, owners, variables, caller=caller),
        tower_build(),
        tf.device(main.device),
        record_variables(main),
        state_as_of(originals, plain),
    ):
        applied = apply_pairs(optimizer, reduced, name="apply_grad")
    if watch is None:
        copy_from_owners(variables, owners, [[]] * len(owners))
        return None
    with tf.name_scope("copy_from_owners"):
        copies = copy_from_owners(variables, owners, watch.updates(applied))
    return tf.group(applied, *copies, name="train_op")
