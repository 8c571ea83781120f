"""Finds the variables that a trace writes, and writes that differ between towers.

Tower 0 writes a variable outside of the towers' copies, for all, if all towers would
write the same value: one that depends on nothing specific to a tower, such as its rows,
random numbers, or state that depends on these.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf

from tw_core._tf_compat import (
    is_variable_handle,
    written_by,
)
from tw_core._tracing.bodies import Conditional
from tw_core._tracing.trace import Trace
from tw_core._variable_kinds import CALLS

_SEEDS = "seed_generator_state"  # Keras's name for the state of its generators
_LIBRARIES = ("/tensorflow/", "/keras/", "/tf_keras/", "/tw_")  # "/tw_": these packages


def written_handles(operations: Sequence[tf.Operation]) -> list[tf.Tensor]:
    """Lists the resources that operations may write, each once."""
    every = (tensor for op in operations for tensor in written_by(op))
    return list({tensor.name: tensor for tensor in every}.values())


def writers(trace: Trace) -> dict[int, tf.Operation]:
    """Maps ids of the handles that a trace and its branches write to a writing op."""
    found: dict[int, tf.Operation] = {}
    for own in with_branches(trace):
        for op in own.graph.get_operations():
            handles = map(own.outermost, written_by(op))
            for handle in filter(is_variable_handle, handles):
                found.setdefault(id(handle), op)
    return found


def random_states(trace: Trace) -> set[int]:
    """Returns ids of the handles of random generators; towers draw in turn."""
    found: set[int] = set()
    for own in with_branches(trace):
        found |= {id(v.handle) for v in own.graph.variables if _SEEDS in str(v.name)}
        for op in own.graph.get_operations():
            if op.type.startswith(("Rng", "Stateful")) and op.type not in CALLS:
                found |= {id(own.outermost(handle)) for handle in written_by(op)}
    return found


def unlike_writers(trace: Trace, random: set[int]) -> dict[int, tf.Operation]:
    """Maps ids of handles to an operation that writes different values in towers."""
    unlike: dict[int, Any] = dict.fromkeys(random)
    while True:
        count = len(unlike)
        _follow(trace, unlike, set())
        if len(unlike) == count:
            return {key: op for key, op in unlike.items() if op is not None}


def _follow(trace: Trace, unlike: dict[int, Any], around: set[str]) -> None:
    """Adds to ``unlike`` the variables written with values that differ by tower.

    ``around`` names the tensors that differ by tower in the trace around this one.
    """
    given = [t for m in trace.meetings if not m.is_same for t in m.given]
    own = {tensor.name for tensor in (*trace.inputs, *given)}
    own |= {t.name for t, outer in trace.captured if _is_named(outer, around)}
    draws: dict[str, bool] = {}
    for op in trace.graph.get_operations():
        reads = (id(trace.outermost(t)) for t in op.inputs if t.dtype == tf.resource)
        if not (
            any(tensor.name in own for tensor in op.inputs)
            or any(handle in unlike for handle in reads)
            or _draws(op, draws)
        ):
            continue
        passes_on = op.type == "IdentityN"  # each output one input, as sums do
        own |= {
            tensor.name
            for n, tensor in enumerate(op.outputs)
            if not passes_on or op.inputs[n].name in own
        }
        for handle in written_by(op):
            unlike.setdefault(id(trace.outermost(handle)), op)
    for meeting in trace.meetings:
        if isinstance(meeting.place, Conditional):
            for branch in meeting.place.branches:
                _follow(branch, unlike, own)


def _is_named(tensor: Any, names: set[str]) -> bool:
    return not hasattr(tensor, "numpy") and tensor.name in names


def _draws(op: tf.Operation, known: dict[str, bool]) -> bool:
    """Returns whether an operation, or one inside, is random or runs Python."""
    if op.type in CALLS:
        names = {op.get_attr(key).name for key in _bodies_of(op)}
        library = op.graph.as_graph_def().library.function
        return _any_draws({f.signature.name: f for f in library}, names)
    if op.type not in known:
        known[op.type] = _is_random(op.node_def)
    return known[op.type]


def _bodies_of(op: tf.Operation) -> list[str]:
    attributes = op.node_def.attr
    return [key for key, value in attributes.items() if value.HasField("func")]


def _any_draws(library: dict[str, Any], names: set[str]) -> bool:
    stack, seen = [*names], set[str]()
    while stack:
        name = stack.pop()
        if name in seen or name not in library:
            continue
        seen.add(name)
        for node in library[name].node_def:
            if _is_random(node):
                return True
            stack += [v.func.name for v in node.attr.values() if v.HasField("func")]
    return False


def _is_random(node: Any) -> bool:
    return "seed2" in node.attr or "PyFunc" in node.op


def line_of(op: tf.Operation) -> str:
    """Returns the line of the program that builds an operation."""
    frames = [own for own in op.traceback if not _is_library(own.filename)]
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else "unknown line"


def _is_library(filename: str) -> bool:
    path = filename.replace("\\", "/")
    return any(folder in path for folder in _LIBRARIES)


def with_branches(trace: Trace) -> Iterator[Trace]:
    """Yields a trace and its branches that contain meetings."""
    yield trace
    for meeting in trace.meetings:
        if isinstance(meeting.place, Conditional):
            for branch in meeting.place.branches:
                yield from with_branches(branch)


def written_outside(
    trace: Trace, given: Sequence[tf.Tensor], shared: set[int], advice: str
) -> set[int]:
    """Returns the variables that tower 0 writes for all: of no tower, or of every one.

    Refuses those to which towers would write different values, if there is advice.
    """
    known = set(map(id, given))
    random = random_states(trace)
    found = {
        handle: op
        for handle, op in writers(trace).items()
        if handle not in random and (handle in shared or handle not in known)
    }
    unlike = unlike_writers(trace, random) if found and advice else {}
    faults = [
        f"{_name_of(trace, handle)} ({line_of(unlike[handle])})"
        for handle in found
        if handle in unlike
    ]
    if faults:
        raise ValueError(
            f"Towers share {', '.join(faults)}, and each would write another value to "
            f"it: {advice}."
        )
    return set(found)


def _name_of(trace: Trace, handle: int) -> str:
    every = [v for own in with_branches(trace) for v in own.graph.variables]
    names = [v.name for v in every if id(v.handle) == handle]
    return repr(names[0]) if names else "a variable"
