"""What the optimizer's arguments may be, and what is said of wrong ones."""

import re
from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral
from typing import Any

import tensorflow as tf

from tw_core import builds_session_graph
from tw_core.checks import check_flag, check_text, check_whole_number
from tw_syncrep._call_checks import check_methods, check_timeouts
from tw_syncrep._protocol.graph import SyncOptions
from tw_syncrep._transfer.gradients import SPARSE_MEANS

_CLASS = "SyncReplicasOptimizer"
_APPLY = f"{_CLASS}.apply_gradients"
_SCOPE_NAME = re.compile(r"[A-Za-z0-9.][A-Za-z0-9_./-]*")


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
      TypeError: ``compression`` is no float type, or ``fuse_below`` no number.
    """
    total = aggregate if total is None else total
    _check_counts(aggregate, total)
    check_choice("sparse_mean", sparse_mean, SPARSE_MEANS)
    fuse_below = check_whole_number(_CLASS, fuse_below=fuse_below, at_least=0)
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
            f"{_CLASS}: {name} must be one of {', '.join(known)}; got {got!r}."
        )


def timeouts(
    wait_timeout_s: float | None, start_timeout_s: float | None
) -> tuple[float | None, float | None]:
    """Returns the longest waits for a step and for the others' start, in seconds.

    Args:
      wait_timeout_s: None waits forever.
      start_timeout_s: None is as long as ``wait_timeout_s``.

    Raises:
      TypeError: one is no number.
      ValueError: one is no time at all; both are named.
    """
    start = wait_timeout_s if start_timeout_s is None else start_timeout_s
    check_timeouts(_CLASS, wait_timeout_s=wait_timeout_s, start_timeout_s=start)
    return wait_timeout_s, start


def check_wrapped(
    opt: Any, *, variable_averages: Any, variables_to_average: Any, use_locking: Any
) -> None:
    """Checks what the optimizer wraps, and what goes with that.

    Raises:
      TypeError: one is of another kind.
    """
    check_methods(
        _CLASS,
        ["compute_gradients", "apply_gradients"],
        "an optimizer as those of tf.compat.v1.train; tw_ampopt.Optimizer makes one of "
        "a Keras optimizer",
        opt=opt,
    )
    if variable_averages is not None:
        check_methods(
            _CLASS,
            ["apply"],
            "a tf.train.ExponentialMovingAverage",
            variable_averages=variable_averages,
        )
    if variables_to_average is not None:
        _check_variables(_CLASS, variables_to_average=variables_to_average)
    check_flag(_CLASS, use_locking=use_locking)


def check_scope_name(caller: str, name: Any) -> None:
    """Refuses what TensorFlow takes for no name of ops.

    Raises:
      TypeError: no string.
      ValueError: an empty one, or one with other characters.
    """
    check_text(caller, name=name)
    if not _SCOPE_NAME.fullmatch(name):
        raise ValueError(
            f"{caller}: name must have letters, digits and ./_- only, and begin with a "
            f"letter, a digit or a dot; got {name!r}."
        )


def check_loss(loss: Any, var_list: Any) -> None:
    """Checks what gradients are to be computed of.

    Raises:
      TypeError: a loss is no tensor, or a variable none.
    """
    caller = f"{_CLASS}.compute_gradients"
    if not (tf.is_tensor(loss) or callable(loss)):
        raise TypeError(
            f"{caller}: loss must be a tensor, or a function that returns one; got "
            f"{loss!r}."
        )
    if var_list is not None:
        _check_variables(caller, var_list=var_list)


def check_slot(args: Sequence[Any], given: Mapping[str, Any]) -> None:
    """Checks the variable of which a slot is asked for.

    Raises:
      TypeError: it is none.
    """
    variable = args[0] if args else given.get("var")
    if not isinstance(variable, tf.Variable):
        raise TypeError(
            f"{_CLASS}.get_slot: wants a variable and the name of a slot; got "
            f"{variable!r} for the variable."
        )


def check_graph() -> None:
    """Checks that a session's graph is built, and not a branch or a loop of one.

    Raises:
      RuntimeError: eager mode, a ``tf.function``, or the body of a ``tf.cond`` or
        ``tf.while_loop``.
    """
    found = _where_no_step_is()
    if found:
        raise RuntimeError(
            f"{_APPLY}: builds a step in the graph of a "
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


def read_pairs(grads_and_vars: Any) -> list[tuple[Any, Any]]:
    """Reads what ``apply_gradients`` is given.

    Raises:
      ValueError: there is no (gradient, variable) pair.
      TypeError: there are other things, or variables that are no resource variables;
        all are named.
    """
    tensors = tf.Tensor | tf.IndexedSlices | tf.Variable
    if isinstance(grads_and_vars, str | tensors) or not isinstance(
        grads_and_vars, Iterable
    ):
        raise TypeError(
            f"{_APPLY}: grads_and_vars must be a list of (gradient, variable) pairs; "
            f"got {grads_and_vars!r}."
        )
    pairs = list(grads_and_vars)
    if not pairs:
        raise ValueError(
            f"{_APPLY}: Must supply at least one variable; got no (gradient, variable) "
            "pairs."
        )
    others = [p for p in pairs if not (isinstance(p, tuple | list) and len(p) == 2)]
    if others:
        raise TypeError(
            f"{_APPLY}: grads_and_vars must hold (gradient, variable) pairs; got "
            f"{', '.join(map(repr, others))}."
        )
    _check_resources([variable for _, variable in pairs])
    return [(grad, variable) for grad, variable in pairs]


def check_pairs(pairs: Sequence[tuple[Any, Any]], global_step: Any) -> None:
    """Checks the global step, and that all are of the graph in force.

    Raises:
      ValueError: there is no global step, it is no whole number, or something is of
        another graph.
      TypeError: it is no resource variable.
    """
    if global_step is None:
        raise ValueError(
            f"{_APPLY}: Global step is required to check staleness; got none, and the "
            "graph has none. Pass global_step="
            "tf.compat.v1.train.get_or_create_global_step(), or create it first."
        )
    _check_resources([global_step])
    if not global_step.dtype.is_integer or global_step.shape.rank != 0:
        raise ValueError(
            f"{_APPLY}: global_step must be a scalar of whole numbers; got "
            f"{global_step.name} of {global_step.dtype.name} and shape "
            f"{global_step.shape}."
        )
    _check_graph_of([*pairs, (None, global_step)])


def _check_counts(aggregate: Any, total: Any) -> None:
    counts = {"replicas_to_aggregate": aggregate, "total_num_replicas": total}
    wrong = [
        f"{name}={count!r}"
        for name, count in counts.items()
        if isinstance(count, bool) or not isinstance(count, Integral) or count < 1
    ]
    if wrong:
        raise ValueError(
            f"{_CLASS}: counts must be whole numbers of at least 1; got "
            f"{', '.join(wrong)}."
        )


def _wire_dtype(compression: Any) -> tf.DType | None:
    if compression is None:
        return None
    try:
        dtype = tf.as_dtype(compression)
    except TypeError:
        dtype = None
    if dtype is None or not dtype.is_floating:
        raise TypeError(
            f"{_CLASS}: compression must be a float type such as tf.bfloat16; got "
            f"{compression!r}."
        )
    return dtype


def _check_variables(caller: str, **given: Any) -> None:
    """Refuses what is no list of variables, nor one variable."""
    ((name, value),) = given.items()
    strange = [v for v in tf.nest.flatten(value) if not isinstance(v, tf.Variable)]
    if strange:
        raise TypeError(
            f"{caller}: {name} must be a list of variables; got "
            f"{', '.join(map(repr, strange))}."
        )


def _check_resources(variables: Sequence[Any]) -> None:
    strange = [
        str(getattr(variable, "name", variable))
        for variable in variables
        if not hasattr(variable, "handle")
    ]
    if strange:
        raise TypeError(
            f"{_APPLY}: only resource variables work; these are none: "
            f"{', '.join(strange)}. Call tf.compat.v1.enable_resource_variables() "
            "before building the model; of a Keras variable, pass its value."
        )


def _check_graph_of(pairs: Sequence[tuple[Any, Any]]) -> None:
    graph = tf.compat.v1.get_default_graph()
    parts = [
        (variable.name, part)
        for pair in pairs
        for variable, part in ((pair[1], pair[0]), (pair[1], pair[1].handle))
        if isinstance(part, tf.Tensor | tf.IndexedSlices)
    ]
    # An eager tensor has no graph at all.
    others = [name for name, part in parts if getattr(part, "graph", None) is not graph]
    if others:
        raise ValueError(
            f"{_APPLY}: variables and gradients must be of the graph in force; of "
            f"another one are those of {', '.join(dict.fromkeys(others))}."
        )
