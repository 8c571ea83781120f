"""What the optimizer's arguments may be, and what is said of wrong ones."""

from collections.abc import Sequence
from numbers import Integral
from typing import Any

import tensorflow as tf

from tw_core import builds_session_graph
from tw_syncrep._gradients import SPARSE_MEANS
from tw_syncrep._sync_graph import SyncOptions


def sync_options(
    aggregate: Any,
    total: Any,
    *,
    fuse_below: int,
    compression: Any,
    sparse_mean: str,
) -> SyncOptions:
    """Checks how gradients are to travel and to be counted.

    Args:
      aggregate: gradients that make a step.
      total: replicas; None for as many as gradients.
      fuse_below: bytes of a tensor that travels in a pack with others.
      compression: what wider floats are pushed as, or None.
      sparse_mean: one of SPARSE_MEANS.

    Raises:
      ValueError: a count or a choice is none of the possible ones.
      TypeError: ``compression`` is no float type.
    """
    total = aggregate if total is None else total
    _check_counts(aggregate, total)
    check_choice("sparse_mean", sparse_mean, SPARSE_MEANS)
    if fuse_below < 0:
        raise ValueError(
            "SyncReplicasOptimizer: fuse_below must be 0 or more bytes; got "
            f"{fuse_below}."
        )
    return SyncOptions(
        aggregate=int(aggregate),
        total=int(total),
        below=fuse_below,
        wire_dtype=_wire_dtype(compression),
        sparse_mean=sparse_mean,
    )


def check_choice(name: str, got: str, known: Sequence[str]) -> None:
    """Raises a ValueError unless ``got`` is one of the known words."""
    if got not in known:
        raise ValueError(
            f"SyncReplicasOptimizer: {name} must be one of {', '.join(known)}; got "
            f"{got!r}."
        )


def timeouts(
    wait_timeout_s: float | None, start_timeout_s: float | None
) -> tuple[float | None, float | None]:
    """Returns the longest waits for a step and for the others' start, in seconds.

    Args:
      wait_timeout_s: None waits forever.
      start_timeout_s: None is as long as ``wait_timeout_s``.

    Raises:
      ValueError: one is no time at all; both are named.
    """
    start = wait_timeout_s if start_timeout_s is None else start_timeout_s
    given = {"wait_timeout_s": wait_timeout_s, "start_timeout_s": start}
    wrong = [f"{name}={s!r}" for name, s in given.items() if s is not None and s <= 0]
    if wrong:
        raise ValueError(
            "SyncReplicasOptimizer: timeouts must be seconds above 0, or None to wait "
            f"forever; got {', '.join(wrong)}."
        )
    return wait_timeout_s, start


def check_graph() -> None:
    """Checks that a session's graph is built, and not a branch or a loop of one.

    Raises:
      RuntimeError: eager mode, a ``tf.function``, or the body of a ``tf.cond`` or
        ``tf.while_loop``.
    """
    found = _where_no_step_is()
    if found:
        raise RuntimeError(
            "SyncReplicasOptimizer.apply_gradients: builds a step in the graph of a "
            f"session; got {found}. Call it under tf.Graph().as_default(), outside of "
            "tf.cond and tf.while_loop, as the chief's rounds go on by themselves; "
            "whether a replica takes its step is decided by what its session runs."
        )


def _where_no_step_is() -> str | None:
    if tf.executing_eagerly():
        return "eager mode"
    if not builds_session_graph():
        return "a tf.function"
    graph = tf.compat.v1.get_default_graph()
    # A body is a graph of its own or, as of old, a context that cannot be fetched.
    if hasattr(graph, "outer_graph") or not graph.is_fetchable(tf.no_op(name="here")):
        return "the body of a tf.cond or tf.while_loop"
    return None


def check_pairs(pairs: Sequence[tuple[Any, Any]], global_step: Any) -> None:
    """Checks what ``apply_gradients`` has: pairs and a global step.

    Raises:
      ValueError: there is no (gradient, variable) pair, or no global step.
      TypeError: some are no resource variables; all are named.
    """
    if not pairs:
        raise ValueError(
            "SyncReplicasOptimizer.apply_gradients: Must supply at least one "
            "variable; got no (gradient, variable) pairs."
        )
    if global_step is None:
        raise ValueError(
            "SyncReplicasOptimizer.apply_gradients: Global step is required to "
            "check staleness; got none, and the graph has none. Pass global_step="
            "tf.compat.v1.train.get_or_create_global_step(), or create it first."
        )
    _check_resources([*(variable for _, variable in pairs), global_step])


def _check_counts(aggregate: Any, total: Any) -> None:
    counts = {"replicas_to_aggregate": aggregate, "total_num_replicas": total}
    wrong = [
        f"{name}={count!r}"
        for name, count in counts.items()
        if isinstance(count, bool) or not isinstance(count, Integral) or count < 1
    ]
    if wrong:
        raise ValueError(
            "SyncReplicasOptimizer: counts must be whole numbers of at least 1; got "
            f"{', '.join(wrong)}."
        )


def _wire_dtype(compression: Any) -> tf.DType | None:
    if compression is None:
        return None
    dtype = tf.as_dtype(compression)
    if not dtype.is_floating:
        raise TypeError(
            "SyncReplicasOptimizer: compression must be a float type such as "
            f"tf.bfloat16; got {dtype.name}."
        )
    return dtype


def _check_resources(variables: Sequence[Any]) -> None:
    strange = [
        str(getattr(variable, "name", variable))
        for variable in variables
        if not hasattr(variable, "handle")
    ]
    if strange:
        raise TypeError(
            "SyncReplicasOptimizer.apply_gradients: only resource variables work; "
            f"these are none: {', '.join(strange)}. Call "
            "tf.compat.v1.enable_resource_variables() before building the model."
        )
