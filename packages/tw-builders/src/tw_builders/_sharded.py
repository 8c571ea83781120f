"""Synchronous training with a copy of the variables on every device, applied once.

Each variable has an owner among the towers, which adds its gradients, applies them with
the only slots there are, and gives the others the new value. One optimizer object works
on the owners' copies: what needs all gradients at once (a global norm, a gate) has
them, and what exists once per optimizer exists once.
"""

from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, TypeVar

import tensorflow as tf

from tw_builders._apply import (
    MADE_EARLY,
    check_counts,
    ensure_and_pack,
    one_optimizer_per_tower,
    reduce_onto,
    replicated_pairs,
    trainable_variables,
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
from tw_builders._sync_variables import build_sync_op
from tw_core import Tower
from tw_core.checks import check_flag, check_function, naming
from tw_core.gradients import (
    GradList,
    check_grad_list,
    check_replicated_grad_list,
    split_grad_list,
)
from tw_core.modes import orders_effects, without_autograph
from tw_core.optimizers import apply_pairs, check_optimizer, create_slots, kind_of
from tw_core.variables import (
    record_variables,
    shared_variables,
    tf_variable,
    tower_build,
)

_T = TypeVar("_T")


class SyncMultiGPUShardedBuilder(DataParallelBuilder):
    """Every tower has its variables; one tower applies each, and the others copy it.

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
          towers: ints (GPU numbers) and device strings, or what ``tw_core.towers``
            gives.
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

        The variables of towers 1 and up are local and trainable, and lie below
        ``tower<k>/``, as a ``SyncMultiGPUReplicatedBuilder`` makes them.

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
    ) -> tuple[tf.Operation, tf.Operation | None]:
        """Builds reduction, updates and copies from the towers' gradients.

        Args:
          grad_list: [K][N] (gradient, variable) pairs.
          get_opt_fn: returns the optimizer; called once.

        Returns:
          The training op; and the op that copies every variable of tower 0 to the
          others (None for one tower). Run that one after the initialisers and after
          restoring, or use ``SyncVariablesHook``. The optimizer's state exists once,
          under the names that it has for tower 0's variables.

        Raises:
          ValueError: towers that bring different gradients, or None; a variable
            that several towers share, or that is not on its tower's device.
          TypeError: something that is not an optimizer, or a Keras 3 one.
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
        main = self._towers[:1]
        [optimizer] = one_optimizer_per_tower(main, get_opt_fn, caller=caller)
        self.grads = reduce_onto(
            owned(variables), packed, average=self._average, caller=caller
        )
        train_op = _apply_and_copy(main[0], self.grads, variables, optimizer)
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
) -> tf.Operation | None:
    """Adds all towers' gradients, applies each variable once, and copies it.

    Each variable's gradients are added and applied by its owner; the other towers take
    the new value. Large variables do not wait for each other, unless the optimizer has
    them wait; the gradients of small ones travel to their owner in a pack.

    Args:
      towers: K towers.
      grads: [K][N] gradients of the towers, not reduced; tensors or
        ``IndexedSlices``.
      replicas: K models with ``trainable_variables``, or lists of N variables.
      optimizer: what ``make_sharded_optimizer`` made.
      average: whether to divide by K.

    Returns:
      In a session graph the op that does all; else None. In a session graph the
      optimizer's state is global, under the names that it has for tower 0's variables.

    Raises:
      ValueError: lengths other than K or N, gradients that are None or differ
        between towers, a variable that several towers share or that is not on its
        tower's device, or a device that is known not to exist.
      TypeError: something that is not an optimizer, or a Keras 3 one in a session
        graph; something that is not a tower, gradient, replica or list of them;
        integer gradients with ``average``.
    """
    caller = "apply_sharded_gradients"
    check_counts(caller, towers, grads=grads, replicas=replicas)
    check_flag(caller, average=average)
    check_optimizer(caller, optimizer)
    packed = ensure_and_pack(replicated_pairs(grads, replicas, caller=caller))
    _, variables = split_grad_list(packed)
    check_homes(towers, variables, caller=caller)
    owners = owned(variables)
    reduced = reduce_onto(owners, packed, average=average, caller=caller)
    return _apply_and_copy(towers[0], reduced, variables, optimizer)


def make_sharded_optimizer(
    towers: Sequence[Tower], get_opt_fn: Callable[[], _T], replicas: Sequence[Any]
) -> tuple[_T, _T]:
    """Makes the optimizer of ``apply_sharded_gradients``.

    Outside of graphs, optimizers of Keras and of ``tf.compat.v1.train`` make their
    state at once: slots on the device of the variable's owner.

    Args:
      towers: K towers.
      get_opt_fn: returns a new optimizer; called twice outside of graphs.
      replicas: K models or lists of variables, as for ``apply_sharded_gradients``.

    Returns:
      The optimizer; and the same state as an optimizer of tower 0's variables, for
      ``tf.train.Checkpoint``: what it saves and restores has the structure of a
      replicated run's. Where that is no other one, it is the same object.

    Raises:
      ValueError: another number of replicas than towers, replicas that differ, share a
        variable or have one that is not on their tower's device; a device that is
        known not to exist; an optimizer that was built for other variables.
      TypeError: ``get_opt_fn`` did not return an optimizer, or in a session graph a
        Keras 3 one; something that is not a tower, function or replica.
    """
    caller = "make_sharded_optimizer"
    variables = _checked_variables(towers, replicas, caller=caller)
    check_function(caller, get_opt_fn=get_opt_fn)
    main, owners = towers[:1], owned(variables)
    if not tf.executing_eagerly():
        [optimizer] = one_optimizer_per_tower(main, get_opt_fn, caller=caller)
        return optimizer, optimizer
    state: list[tf.Variable] = []
    with tf.variable_creator_scope(_noting(state)):
        [optimizer] = one_optimizer_per_tower(main, get_opt_fn, caller=caller)
        _check_is_new(optimizer, owners, caller=caller)
        if kind_of(optimizer) not in MADE_EARLY:
            return optimizer, optimizer
        _make_state(main[0], optimizer, owners)
    handed = iter(state)
    with tf.variable_creator_scope(_handing_out(handed, caller=caller)):
        [saved] = one_optimizer_per_tower(main, get_opt_fn, caller=caller)
        _make_state(main[0], saved, variables[0])
    if any(True for _ in handed):
        raise _other_state(caller)
    return optimizer, saved


def owned_variables(towers: Sequence[Tower], replicas: Sequence[Any]) -> list[Any]:
    """Returns the owner's copy of every variable, in the order of the variables.

    For optimizers that take their variables when they are made, such as
    ``tw_ampopt.TowerOptimizer``.

    Args:
      towers: K towers.
      replicas: K models or lists of variables, as for ``apply_sharded_gradients``.

    Returns:
      [N] variables, as they came (Keras's or TensorFlow's).

    Raises:
      ValueError: as ``make_sharded_optimizer``.
      TypeError: something that is not a tower or replica.
    """
    return owned(_checked_variables(towers, replicas, caller="owned_variables"))


def _checked_variables(
    towers: Sequence[Tower], replicas: Sequence[Any], *, caller: str
) -> list[list[Any]]:
    check_counts(caller, towers, replicas=replicas)
    variables = [trainable_variables(r, caller=caller) for r in replicas]
    with naming(caller):
        check_grad_list(
            [[(None, v) for v in own] for own in variables], allow_none=True
        )
    shared = [f"{name} in towers {ks}" for name, ks in shared_variables(variables)]
    if shared:
        raise ValueError(
            f"{caller}: every tower must have variables of its own; got the same one "
            f"for {', '.join(shared)}. Make a new model for each tower."
        )
    check_homes(towers, variables, caller=caller)
    return variables


def _make_state(main: Tower, optimizer: Any, variables: Sequence[Any]) -> None:
    with tf.device(main.device):
        create_slots(optimizer, variables)


def _check_is_new(optimizer: Any, owners: Sequence[Any], *, caller: str) -> None:
    """Refuses a Keras optimizer that has its slots, of whatever variables."""
    if getattr(optimizer, "built", False):
        raise ValueError(
            f"{caller}: {type(optimizer).__name__} was built before, and its slots "
            "would not be with the owners of the variables; return a new one from "
            "get_opt_fn, without calling build."
        )


def _noting(state: list[tf.Variable]) -> Callable[..., tf.Variable]:
    def create(next_creator: Callable[..., tf.Variable], **kwargs: Any) -> tf.Variable:
        state.append(next_creator(**kwargs))
        return state[-1]

    return create


def _handing_out(
    state: Iterator[tf.Variable], *, caller: str
) -> Callable[..., tf.Variable]:
    """Makes a creator of variables that gives those which are there, in their order."""

    def create(next_creator: Callable[..., tf.Variable], **kwargs: Any) -> tf.Variable:
        del next_creator, kwargs
        variable = next(state, None)
        if variable is None:
            raise _other_state(caller)
        return variable

    return create


def _other_state(caller: str) -> ValueError:
    return ValueError(
        f"{caller}: get_opt_fn made other variables in its second call than in its "
        "first; make what calls have in common before, and pass it to the optimizer."
    )


def _apply_and_copy(
    main: Tower,
    reduced: Sequence[tuple[Any, Any]],
    variables: Sequence[Sequence[Any]],
    optimizer: Any,
) -> tf.Operation | None:
    """Applies [N] reduced pairs of owners and gives all towers the new values.

    Args:
      main: tower 0.
      reduced: [N] pairs of a gradient and the owner's variable.
      variables: [K][N] of all towers.
      optimizer: made for the owners' variables.

    Returns:
      The op that does all in a session graph, else None.
    """
    owners = [variable for _, variable in reduced]
    plain = [tf_variable(variable) for variable in owners]
    originals = [tf_variable(variable) for variable in variables[0]]
    watch = None if orders_effects() else UpdateWatch(plain)
    with (
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
