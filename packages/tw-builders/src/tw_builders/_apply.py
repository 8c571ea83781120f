"""Applying reduced gradients: once to shared variables, or in every replica.

The same functions serve a session graph (they return the op) and a ``tf.function``
(they update when called).

Each replica needs its own optimizer object. One object shared by several would advance
its own state (such as Adam's ``beta1_power``) several times per step, and the replicas
would diverge.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, TypeVar

import tensorflow as tf

from tw_core import Tower
from tw_core.flat_variables import pack_gradients
from tw_core.gradients import GradList, merge_grad_list
from tw_core.internal import (
    Gradients,
    OptimizerKind,
    apply_pairs,
    are_alike,
    call_once,
    check_flag,
    check_function,
    check_list,
    check_nested,
    check_optimizer,
    check_towers,
    create_slots,
    is_variable,
    kind_of,
    orders_effects,
    placing_calls,
    read_pairs,
    record_variables,
    tf_variables,
    tower_build,
    traces_function,
    without_autograph,
)
from tw_reduce.reducers import check_weights
from tw_reduce.tensorpack import aggregate_grads_colocate

_T = TypeVar("_T")
Pairs = Sequence[tuple[Any, Any]]

# Other kinds may need a session graph, or create their state in their own way.
MADE_EARLY = (
    OptimizerKind.V1,
    OptimizerKind.KERAS_3,
    OptimizerKind.TF_KERAS,
    OptimizerKind.TF_KERAS_LEGACY,
)


@without_autograph
def apply_gradients(
    towers: Sequence[Tower],
    grads: Sequence[Sequence[Any]],
    replicas: Sequence[Any],
    optimizers: Sequence[Any],
    *,
    jit_compile: bool = False,
) -> tf.Operation | None:
    """Applies every tower's gradients to its replica, with its own optimizer.

    Args:
      towers: K towers.
      grads: [K][N] reduced gradients, equal over the towers; tensors or
        ``IndexedSlices``.
      replicas: K models with ``trainable_variables``, or lists of N variables.
      optimizers: K distinct optimizers: of ``tf.compat.v1.train``, of Keras 3
        (not in a session graph), or similar.
      jit_compile: in a ``tf.function``, whether XLA compiles the update, one function
        a device; pays where launches take longer than arithmetic, as on GPUs.

    Returns:
      In a session graph the op that applies all gradients; else None. In a session
      graph the optimizer state of towers 1 and up is local and under ``tower<k>/``.

    Raises:
      ValueError: lengths other than K or N, gradients that are None or differ
        between towers, a variable that several towers share, the same optimizer
        twice, or a device that is known not to exist.
      TypeError: something that is not an optimizer, or a Keras 3 one in a session
        graph; something that is not a tower, gradient, replica or list of them.
      RuntimeError: ``jit_compile`` outside of ``tf.function``.
    """
    check_flag(jit_compile=jit_compile)
    check_one_per_tower(towers, grads=grads, replicas=replicas, optimizers=optimizers)
    _check_optimizers(optimizers)
    packed = read_replicas(grads, replicas)
    return apply_to_replicas(towers, packed, optimizers, jit_compile=jit_compile)


@without_autograph
def apply_shared_gradients(
    grad_list: GradList,
    optimizer: Any,
    *,
    average: bool = True,
    weights: Sequence[Any] | None = None,
    jit_compile: bool = False,
) -> Any:
    """Adds all towers' gradients where each variable lives and applies them once.

    Args:
      grad_list: [K][N] (gradient, variable) pairs of the same N variables.
      optimizer: one optimizer.
      average: whether to divide by K.
      weights: [K] weight of each tower's gradients in the mean, such as its rows;
        see ``tw_reduce.mean``. None for equal weights.
      jit_compile: as for ``apply_gradients``; where variables are on several devices,
        with an optimizer of Keras 3.

    Returns:
      In a session graph the op that applies them; else None.

    Raises:
      ValueError: towers with different gradients or variables, or with None;
        weights without ``average``, or as ``tw_reduce.mean``; ``jit_compile`` where
        another optimizer updates variables on several devices.
      TypeError: something that is not an optimizer, or a Keras 3 one in a session
        graph; integer gradients with ``average``; weights as ``tw_reduce.mean``.
      RuntimeError: ``jit_compile`` outside of ``tf.function``.
    """
    check_flag(average=average)
    check_flag(jit_compile=jit_compile)
    check_optimizer(optimizer)
    read = read_pairs(grad_list, variables="shared")
    check_weights(weights, num_towers=len(read), average=average)
    packed = with_flat(read)
    pairs = reduce_onto(packed.variables[0], packed, average=average, weights=weights)
    op = apply_pairs(optimizer, pairs, name="train_op", jit_compile=jit_compile)
    return None if orders_effects() else op


def make_optimizers(
    towers: Sequence[Tower],
    get_opt_fn: Callable[[], _T],
    replicas: Sequence[Any] | None = None,
) -> list[_T]:
    """Calls ``get_opt_fn`` once per tower.

    In a session graph, variables that it makes with ``get_variable`` are shared
    between the calls, all other variables are local from tower 1 on, and only the
    summaries of the first call are kept. Outside graphs, if ``replicas`` is given,
    optimizers of Keras and of ``tf.compat.v1.train`` create their state at once, on
    their tower's device: creating it inside a ``tf.function`` would trace that twice.

    Args:
      towers: K towers.
      get_opt_fn: returns a new optimizer.
      replicas: K models or lists of variables, as for ``apply_gradients``.

    Returns:
      K optimizers.

    Raises:
      ValueError: two calls returned the same object, another number of replicas
        than towers, or a device that is known not to exist.
      TypeError: a call did not return an optimizer, or in a session graph a Keras 3
        optimizer; something that is not a tower, function or replica.
    """
    if replicas is None:
        check_towers(towers)
    else:
        check_one_per_tower(towers, replicas=replicas)
    check_function(get_opt_fn=get_opt_fn)
    variables = [trainable_variables(replica) for replica in replicas or ()]
    optimizers = one_optimizer_per_tower(towers, get_opt_fn)
    if tf.executing_eagerly():
        for tower, optimizer, own in zip(towers, optimizers, variables, strict=False):
            if kind_of(optimizer) in MADE_EARLY:
                with tf.device(tower.device), _name_scope_of(tower):
                    create_slots(optimizer, own)
    return optimizers


def one_optimizer_per_tower(
    towers: Sequence[Tower], get_opt_fn: Callable[[], _T]
) -> list[_T]:
    """Does the work of ``make_optimizers``, but creates no state."""
    with tower_build():
        optimizers = [_make(tower, get_opt_fn) for tower in towers]
    _check_optimizers(optimizers)
    return optimizers


def read_replicas(grads: Sequence[Sequence[Any]], replicas: Sequence[Any]) -> Gradients:
    """Reads [K][N] gradients of K replicas' variables, and packs flat ones'."""
    check_nested(grads=grads, of="gradients")
    variables = [trainable_variables(replica) for replica in replicas]
    grad_list = merge_grad_list(grads, variables)
    return with_flat(read_pairs(grad_list, variables="own"))


def apply_to_replicas(
    towers: Sequence[Tower],
    grads: Gradients,
    optimizers: Sequence[Any],
    *,
    jit_compile: bool = False,
) -> tf.Operation | None:
    """Applies [K][N] gradients, tower by tower; returns as ``apply_gradients``."""
    if traces_function() and orders_effects() and len(towers) > 1:
        for tower, optimizer, own in zip(
            towers, optimizers, grads.variables, strict=True
        ):
            if kind_of(optimizer) in MADE_EARLY:
                with _in_tower(tower):
                    create_slots(optimizer, own)
        if are_alike(optimizers):
            _apply_once(towers, grads, optimizers, jit_compile=jit_compile)
            return None
    with tower_build():
        ops = [
            _apply_in_tower(tower, optimizer, pairs, jit_compile=jit_compile)
            for tower, optimizer, pairs in zip(
                towers, optimizers, grads.pairs, strict=True
            )
        ]
    return None if orders_effects() else tf.group(*ops, name="train_op")


def reduce_onto(
    variables: Sequence[Any],
    grads: Gradients,
    *,
    average: bool,
    weights: Sequence[Any] | None,
) -> list[tuple[Any, Any]]:
    """Adds [K][N] gradients on the devices of ``variables``, [N].

    Returns [N] pairs of a reduced gradient and its variable. The variables that the
    gradients were read with may be other copies of these.
    """
    plain = tf_variables(variables)
    at_home = Gradients(grads, [plain] * len(grads), grads.tests)
    reduced = aggregate_grads_colocate(at_home, average=average, weights=weights)
    return [(grad, v) for (grad, _), v in zip(reduced, variables, strict=True)]


def with_flat(read: Gradients) -> Gradients:
    """Packs the gradients of the parts of flat variables into those of the whole."""
    packed = [pack_gradients(pairs) for pairs in read.pairs]
    grads = [[grad for grad, _ in pairs] for pairs in packed]
    return Gradients(grads, [[v for _, v in pairs] for pairs in packed], read.tests)


def _apply_in_tower(
    tower: Tower, optimizer: Any, pairs: Pairs, *, jit_compile: bool
) -> Any:
    with _in_tower(tower):
        return apply_pairs(optimizer, pairs, name="apply_grad", jit_compile=jit_compile)


@contextmanager
def _in_tower(tower: Tower) -> Iterator[None]:
    # Without a name scope for each, the beta1_power of two Adams would collide in a
    # tf.function, and its name would not match tower 0's in a session graph.
    with (
        tf.device(tower.device),
        _name_scope_of(tower),
        record_variables(tower, are_copies=True),
    ):
        yield


def _apply_once(
    towers: Sequence[Tower],
    grads: Gradients,
    optimizers: Sequence[Any],
    *,
    jit_compile: bool,
) -> None:
    """Traces the update of one tower, and calls it for each."""

    def update(optimizer: Any, grads: list[Any], variables: list[Any]) -> None:
        pairs = list(zip(grads, variables, strict=True))
        apply_pairs(optimizer, pairs, name="apply_grad")

    with tf.name_scope("apply_gradients"):  # for timelines
        call_once(
            update,
            list(zip(optimizers, map(list, grads), grads.variables, strict=True)),
            [partial(placing_calls, tower) for tower in towers],
            jit_compile=jit_compile,
        )


def _make(tower: Tower, get_opt_fn: Callable[[], _T]) -> _T:
    if tf.executing_eagerly():
        with tf.device(tower.device):
            return get_opt_fn()
    v1 = tf.compat.v1
    with (
        v1.variable_scope(
            v1.get_variable_scope(), reuse=v1.AUTO_REUSE, auxiliary_name_scope=False
        ),
        _name_scope_of(tower),
        record_variables(tower, are_copies=True),
    ):
        return get_opt_fn()


def _name_scope_of(tower: Tower) -> AbstractContextManager[Any]:
    """Re-enters a tower's name scope, from tower 1 on.

    Variables that an optimizer makes there are then named as tower 0's, prefixed with
    the tower's name (``tower1/beta1_power``).
    """
    return nullcontext() if tower.is_main else tf.name_scope(f"{tower.name}/")


def _check_optimizers(optimizers: Sequence[Any]) -> None:
    for k, optimizer in enumerate(optimizers):
        check_optimizer(optimizer)
        same = [j for j in range(k) if optimizers[j] is optimizer]
        if same:
            raise ValueError(
                f"Towers {same[0]} and {k} got the same {type(optimizer).__name__} "
                "object; every tower needs an optimizer of its own, or the replicas "
                "drift apart. Make a new one in each call of get_opt_fn."
            )


def trainable_variables(replica: Any) -> list[Any]:
    """Lists a replica's trainable variables, as they are (Keras's or TensorFlow's)."""
    is_list = isinstance(replica, Sequence) and not isinstance(replica, str)
    variables = replica if is_list else getattr(replica, "trainable_variables", None)
    if not isinstance(variables, Sequence):
        raise TypeError(
            "A replica must be a list of variables, or have trainable_variables; got "
            f"{type(replica).__name__}."
        )
    try:
        tf_variables(variables)
    except TypeError:
        others = [v for v in variables if not is_variable(v)]
        raise TypeError(f"A replica must hold variables; got {others}.") from None
    return list(variables)


def check_one_per_tower(
    towers: Sequence[Tower], **per_tower: Sequence[Any] | None
) -> None:
    """Refuses anything but a list of towers, and lists of any other length."""
    check_towers(towers)
    for name, items in per_tower.items():
        check_list(of="one item per tower", empty=True, **{name: items})
    counts = {name: len(items or ()) for name, items in per_tower.items()}
    if any(count != len(towers) for count in counts.values()):
        *first, last = per_tower
        names = f"{', '.join(first)} and {last}" if first else last
        raise ValueError(
            f"{names} must hold one item per tower; got {counts} for {len(towers)} "
            "towers."
        )
