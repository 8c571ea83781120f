"""Where a graph's variables and operations are, and what moves between devices.

Read from the graph alone, so it shows the requested devices: an op without one
appears under ``""``, and soft placement may still move an op. An op that uses a
variable is counted where the variable is, since it runs there no matter which
device it requests.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import tensorflow as tf

from tw_core._checks import check_list
from tw_core._variable_kinds import (
    HIDDEN_HANDLES,
    hands_on,
    is_variable,
    plain_name,
    tf_variable,
)
from tw_core.devices._logical import by_number, canonical_device

_NO_WORK = ("Const", "NoOp", "Placeholder", "VarHandleOp")


@dataclass(frozen=True)
class Transfer:
    """Tensors that cross from one device to another.

    Attributes:
      source: canonical device string.
      target: canonical device string.
      tensors: their number; one used by several ops of the target counts once.
      num_bytes: of the tensors whose shape is known.
    """

    source: str
    target: str
    tensors: int
    num_bytes: int


@dataclass(frozen=True)
class Placement:
    """Variables, operations and transfers, by canonical device string.

    Attributes:
      variables: device -> {variable name: bytes}.
      operations: device -> number of operations other than variables,
        constants and placeholders.
      transfers: tensors that move between devices, sorted by source and target;
        constants and ops without a device are left out.
    """

    variables: dict[str, dict[str, int]]
    operations: dict[str, int]
    transfers: tuple[Transfer, ...]

    @property
    def bytes_on(self) -> dict[str, int]:
        """Bytes of variables on each device."""
        return {device: sum(sizes.values()) for device, sizes in self.variables.items()}


class _Handle(NamedTuple):
    """A variable, as the graph knows it."""

    device: str
    name: str
    num_bytes: int


def placement(
    graph: tf.Graph,
    *,
    fetches: Sequence[Any] = (),
    variables: Sequence[tf.Variable] = (),
) -> Placement:
    """Reads the placement from a graph.

    Args:
      graph: a session graph, or a function's: ``concrete_function.graph``.
      fetches: tensors and operations of the graph; only operations and transfers
        needed to compute these count, without initialisers and savers. Empty for
        everything in the graph.
      variables: variables that a function does not read but passes to an op, as
        an optimizer does with its own; the function's graph does not know their
        names. Keras variables are accepted.

    Returns:
      Variables, operation counts and transfers by device. Ops in the bodies of
      nested functions, loops and conditions are not counted.

    Raises:
      TypeError: ``graph`` is not a graph, ``fetches`` holds something other than
        tensors and operations, or ``variables`` something other than variables.
      ValueError: a fetch of another graph.
    """
    if not isinstance(graph, tf.Graph):
        raise TypeError(
            f"placement: graph must be a tf.Graph; got {type(graph).__name__}. For a "
            "tf.function, pass function.get_concrete_function(...).graph."
        )
    _check_fetches(graph, fetches)
    check_list(variables=variables, of="variables", empty=True)
    others = [v for v in variables if not is_variable(v)]
    if others:
        raise TypeError(f"placement: variables must hold variables; got {others}.")
    handles = _handles(graph, variables)
    operations = _needed_for(fetches) if fetches else graph.get_operations()
    where = {op: _device_of(op, handles) for op in operations}
    counts = Counter(d for op, d in where.items() if op.type not in _NO_WORK)
    return Placement(
        variables=_by_device(handles.values()),
        operations={device: counts[device] for device in sorted(counts, key=by_number)},
        transfers=_transfers(where),
    )


def _check_fetches(graph: tf.Graph, fetches: Sequence[Any]) -> None:
    check_list(fetches=fetches, of="tensors and operations", empty=True)
    ops = [getattr(fetch, "op", fetch) for fetch in fetches]
    others = [op for op in ops if not isinstance(op, tf.Operation)]
    if others:
        raise TypeError(
            f"placement: fetches must hold tensors and operations; got {others}."
        )
    foreign = [op.name for op in ops if op.graph is not graph]
    if foreign:
        raise ValueError(f"placement: fetches must be of graph; got also {foreign}.")


def _handles(graph: tf.Graph, variables: Sequence[tf.Variable]) -> dict[str, _Handle]:
    """Maps the name of each tensor that is a variable's handle to the variable."""
    hidden = set(graph.get_collection(HIDDEN_HANDLES))
    made = {
        op.outputs[0].name: _Handle(
            canonical_device(op.device),
            "" if op.name in hidden else op.name,
            _num_bytes(op.get_attr("shape"), op.get_attr("dtype")),
        )
        for op in graph.get_operations()
        if op.type == "VarHandleOp"
    }
    return made | dict(_captured_handles(graph, variables))


def _captured_handles(
    graph: tf.Graph, variables: Sequence[tf.Variable]
) -> Iterator[tuple[str, _Handle]]:
    known = [*variables, *getattr(graph, "variables", ())]
    by_handle = {id(v.handle): v for v in map(tf_variable, known)}
    for outer, inner in getattr(graph, "captures", ()):
        variable = by_handle.get(id(outer))
        if variable is not None:
            device = canonical_device(variable.device)
            size = _num_bytes(variable.shape, variable.dtype)
            yield inner.name, _Handle(device, plain_name(variable), size)
        elif inner.dtype == tf.resource:
            yield inner.name, _Handle(canonical_device(outer.device), "", 0)


def _by_device(handles: Iterable[_Handle]) -> dict[str, dict[str, int]]:
    found: dict[str, dict[str, int]] = defaultdict(dict)
    for handle in handles:
        if not handle.name:  # not a known variable's resource
            continue
        # Outside of session graphs several variables may share a name.
        name, copies = handle.name, 1
        while name in found[handle.device]:
            copies += 1
            name = f"{handle.name}#{copies}"
        found[handle.device][name] = handle.num_bytes
    return {device: found[device] for device in sorted(found, key=by_number)}


def _needed_for(fetches: Sequence[Any]) -> list[tf.Operation]:
    waiting = [getattr(fetch, "op", fetch) for fetch in fetches]
    needed: dict[tf.Operation, None] = {}
    while waiting:
        op = waiting.pop()
        if op not in needed:
            needed[op] = None
            waiting += [*(tensor.op for tensor in op.inputs), *op.control_inputs]
    return list(needed)


def _device_of(op: tf.Operation, handles: dict[str, _Handle]) -> str:
    touched = [] if hands_on(op) else [*op.inputs, *op.outputs]
    for tensor in touched:
        if tensor.name in handles:
            return handles[tensor.name].device
    return canonical_device(op.device)


def _transfers(where: dict[tf.Operation, str]) -> tuple[Transfer, ...]:
    moved: dict[tuple[str, str], dict[str, int]] = defaultdict(dict)
    for op, target in where.items():
        for tensor in op.inputs:
            source = where.get(tensor.op, "")
            is_free = tensor.dtype == tf.resource or tensor.op.type == "Const"
            if source and target and source != target and not is_free:
                size = _num_bytes(tensor.shape, tensor.dtype)
                moved[source, target][tensor.name] = size
    return tuple(
        Transfer(source, target, len(sizes), sum(sizes.values()))
        for (source, target), sizes in sorted(
            moved.items(), key=lambda item: [*map(by_number, item[0])]
        )
    )


def _num_bytes(shape: Any, dtype: Any) -> int:
    shape = tf.TensorShape(shape)
    elements = shape.num_elements() if shape.is_fully_defined() else 0
    return int(elements) * int(tf.as_dtype(dtype).size)
