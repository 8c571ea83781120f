"""The trace of one tower's function, and the meetings where towers synchronise."""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import tensorflow as tf

from tw_core._flat_packs import is_small, join_flat, plan_packing
from tw_core._modes import without_autograph
from tw_core._tf_compat import captured_from, read_only_inputs
from tw_core._variable_kinds import READS, is_variable

Combine = Callable[[Any, list[Any]], Sequence[Any]]


def components(leaf: Any) -> list[tf.Tensor]:
    """Lists the tensors of a leaf: itself, or the components of a composite one."""
    if isinstance(leaf, tf.Tensor):
        return [leaf]
    if not tf.is_tensor(leaf) or is_variable(leaf):
        return []
    parts: list[tf.Tensor] = tf.nest.flatten(leaf, expand_composites=True)
    return parts


@dataclass(eq=False)
class Meeting:
    """A place where all towers pass a value, wait, and continue with an answer."""

    place: Any
    brought: Any  # nest of tensors of the trace, and of other objects
    given: list[tf.Tensor]  # placeholders of the answer
    position: int  # the trace's number of operations at that time
    waits: bool  # whether the towers wait for the answer
    is_same: bool = False  # whether the answer is equal in all towers
    packs: Sequence[tuple[tf.Tensor, list[tf.Tensor]]] = ()  # with the tensors packed

    @cached_property
    def parts(self) -> list[list[tf.Tensor]]:
        """The tensors of each leaf of the value."""
        return [components(leaf) for leaf in tf.nest.flatten(self.brought)]

    def tensors(self) -> list[tf.Tensor]:
        """Lists the tensors that are sent: the values' components, and packs."""
        packed = {id(tensor) for _, own in self.packs for tensor in own}
        alone = [part for own in self.parts for part in own if id(part) not in packed]
        return [*(pack for pack, _ in self.packs), *alone]


@dataclass(eq=False)
class Trace:
    """A function, or the branch of a conditional in one, traced for the first tower."""

    graph: tf.Graph
    may_meet: bool
    total: int  # of towers
    around: "Trace | None"  # for a branch, the function's trace
    inputs: list[tf.Tensor]  # without captured ones
    meetings: list[Meeting] = field(default_factory=list)  # the last one is the end
    captured: list[tuple[tf.Tensor, tf.Tensor]] = field(default_factory=list)
    must_run: set[tf.Operation] = field(default_factory=set)
    only_read: set[str] = field(default_factory=set)  # names of captured resources
    home: str = ""  # the first tower's device
    devices: Sequence[str] = ()  # the towers', if XLA compiles it
    _met_inside: bool = field(default=False, init=False)

    def is_here(self) -> bool:
        """Returns whether operations made now are in it, and not in a body inside."""
        graph = tf.compat.v1.get_default_graph
        return not tf.executing_eagerly() and graph() is self.graph

    def note_inside(self) -> None:
        """Notes that a meeting was reached in a body."""
        self._met_inside = True

    def has_met_inside(self) -> bool:
        """Returns, once, whether a body was abandoned because it reached a meeting."""
        met, self._met_inside = self._met_inside, False
        return met

    def has(self, tensor: Any) -> bool:
        """Returns whether a tensor is one of this trace."""
        return getattr(tensor, "graph", None) is self.graph

    def reaches(self, tensor: Any) -> bool:
        """Returns whether a tensor is one of this trace, or of one around it."""
        around = self.around
        return self.has(tensor) or (around is not None and around.reaches(tensor))

    def record(
        self,
        place: Any,
        brought: Any,
        answer: Sequence[tf.TensorSpec] = (),
        *,
        waits: bool = False,
        is_same: bool = False,
        together: Mapping[int, str] | None = None,
    ) -> list[tf.Tensor]:
        """Adds a meeting after the operation that was built last; returns its answer.

        Where XLA compiles the trace, small tensors sent to one device are packed;
        ``together`` maps the tensors' ids to devices; None for no packs.
        """
        packs = []
        if self.devices and together is not None:
            packs = _packs(brought, together, self.devices)
        position = len(self.graph.get_operations())
        given = [tf.compat.v1.placeholder(spec.dtype, spec.shape) for spec in answer]
        waits = waits or bool(given)
        self.meetings.append(
            Meeting(place, brought, given, position, waits, is_same, packs)
        )
        return given

    def outermost(self, tensor: Any) -> Any:
        """Returns the tensor that was captured from outside all traces; else itself."""
        for own, outer in self.captured:
            if own is tensor:
                around = self.around
                return outer if around is None else around.outermost(outer)
        return tensor

    def own(self, brought: Any) -> Any:
        """Copies tensors from outside a branch into it."""

        def own(leaf: Any) -> Any:
            is_own = all(map(self.has, components(leaf)))
            return leaf if is_own else tf.identity(leaf)

        return brought if self.around is None else tf.nest.map_structure(own, brought)


def _packs(
    brought: Any, together: Mapping[int, str], devices: Sequence[str]
) -> list[tuple[tf.Tensor, list[tf.Tensor]]]:
    """Joins values that are small dense tensors, except those from outside."""
    leaves = {id(leaf): leaf for leaf in tf.nest.flatten(brought)}.values()
    small = [
        leaf
        for leaf in leaves
        if isinstance(leaf, tf.Tensor) and leaf.dtype.is_floating
        if leaf.op.type != "Placeholder"
        for home in [together.get(id(leaf), devices[0])]
        if all(is_small(leaf, at) for at in (*devices, home))
    ]
    plan = plan_packing([(own.dtype, together.get(id(own))) for own in small])
    packs = [[small[n] for n in places] for places in plan.packs]
    return [(join_flat(own), own) for own in packs]


class _Here(threading.local):
    trace: Trace | None = None
    combine: Combine | None = None  # if a single tower runs, untraced


_here = _Here()


def current_trace() -> Trace | None:
    """Returns the trace being built here, if it is a tower's that allows meetings."""
    trace = _here.trace
    is_one = trace is not None and trace.may_meet and trace.is_here()
    return trace if is_one else None


@contextmanager
def meeting_alone(combine: Combine | None) -> Iterator[None]:
    """Makes untraced code inside the only tower of its meetings.

    Args:
      combine: as for ``call_once``; called immediately, with a list of one. None to
        allow no meetings.
    """
    outer, _here.combine = _here.combine, combine
    try:
        yield
    finally:
        _here.combine = outer


def traces_tower() -> bool:
    """Returns whether ops made now are a tower's, traced for all, and not in a body.

    If XLA compiles the trace, variables of other devices are read before the call.
    """
    return _here.trace is not None and _here.trace.is_here()


def device_in_trace(device: str) -> str:
    """Returns a device as operations made now may name it: "" for the tower's own.

    A trace for all towers runs on each tower's device, not only on the first one's.
    """
    if _here.trace is None:
        return device
    own, home = map(tf.DeviceSpec.from_string, (device, _here.trace.home))
    return "" if own.make_merged_spec(home) == own else device


def may_meet() -> bool:
    """Returns whether this thread traces or runs a tower that allows meetings."""
    if _here.trace is not None:
        return _here.trace.may_meet
    return _here.combine is not None


def meet(
    place: Any,
    brought: Any,
    *,
    answer: Any = None,
    waits: bool = False,
    is_same: bool = False,
    together: Mapping[int, str] | None = None,
) -> Any:
    """Passes a value to a meeting, where all towers synchronise; returns the answer.

    Called while a tower is traced. Operations built after an answer run when all towers
    have passed their values. Without an answer the towers continue, unless ``waits``,
    and their values are combined at the next meeting that waits.

    Args:
      place: names the meeting for the ``combine`` of ``call_once``.
      brought: the value; a nest of tensors, and of variables or other objects, which
        are replaced by each tower's own.
      answer: nest of ``tf.TensorSpec`` of the answer that a tower gets.
      waits: whether to wait for all towers even if there is no answer.
      is_same: whether all towers get the same answer.
      together: if XLA compiles the towers, small dense tensors are sent in packs: maps
        tensors' ids to the devices that they are sent to, one pack each; those without
        an entry share a pack. None for no packs.

    Returns:
      Tensors in the structure of ``answer``.

    Raises:
      RuntimeError: in the body of a loop or a ``tf.switch_case`` inside the tower. In
        that of a ``tf.cond`` or a function it makes the body be split or inlined.
    """
    trace, combine = _here.trace, _here.combine
    if trace is None and combine is not None:
        with meeting_alone(None):  # There are no meetings inside a meeting.
            (answered,) = combine(place, [brought])
        return answered
    if trace is None:
        raise RuntimeError(f"Towers synchronise at {place}, outside of a tower.")
    if not trace.is_here():  # The tf.cond or function is then taken apart.
        trace.note_inside()
        raise RuntimeError(
            f"Towers synchronise at {place}, which was reached in the body of a "
            "branch, a loop or a function inside a tower, where the others cannot "
            "follow; do it in the tower itself, in a tf.function that it calls, or in "
            "a tf.cond."
        )
    brought = trace.own(brought)
    specs = tf.nest.flatten(answer) if answer is not None else []
    given = trace.record(
        place, brought, specs, waits=waits, is_same=is_same, together=together
    )
    return tf.nest.pack_sequence_as(answer, given) if specs else None


def is_same_in_towers(tensor: Any) -> bool:
    """Returns whether a traced tensor depends on nothing specific to a tower.

    Answers of meetings that are the same in all towers, such as sums, do not. Lengths
    are assumed to be equal in all towers, except the number of rows.
    """
    trace = _here.trace
    if trace is None or not trace.reaches(tensor):
        return False
    outside: dict[int, tf.Tensor] = {}
    of_tower: set[tf.Operation] = set()
    while trace is not None:
        given = [t for m in trace.meetings if not m.is_same for t in m.given]
        of_tower |= {own.op for own in (*trace.inputs, *given)}
        outside |= captured_from(trace.graph)
        trace = trace.around
    stack, seen = [tensor], set[int]()
    while stack:
        own = stack.pop()
        own = outside.get(id(own), own)
        if hasattr(own, "numpy"):  # from outside of all towers
            continue
        op = own.op
        if op in of_tower or (op._is_stateful and op.type not in READS):
            return False
        if id(own) not in seen and not _is_length(op):
            passes_on = op.type == "IdentityN"  # each output one input, as sums do
            stack += [op.inputs[own.value_index]] if passes_on else op.inputs
        seen.add(id(own))
    return True


def _is_length(op: tf.Operation) -> bool:
    """Returns whether an operation reads one length of a tensor, not of its rows."""
    if op.type != "StridedSlice" or op.inputs[0].op.type != "Shape":
        return False
    begin = tf.get_static_value(op.inputs[1])
    return begin is not None and bool(begin[0] >= 1)


@without_autograph
def trace_function(
    fn: Callable[..., Any],
    specs: Sequence[tf.TensorSpec],
    rebuild: Callable[[Sequence[tf.Tensor]], Sequence[Any]],
    *,
    total: int,
    may_meet: bool = True,
    jit_compile: bool = False,
    home: str = "",
    devices: Sequence[str] = (),
    packs_results: bool = False,
    around: Trace | None = None,
) -> Trace:
    """Traces ``fn(*rebuild(tensors))`` for tensors of the given specs."""
    traces = []

    def body(*tensors: tf.Tensor) -> None:
        graph = tf.compat.v1.get_default_graph()
        trace = Trace(graph, may_meet, total, around, list(tensors))
        trace.home = home if around is None else around.home
        trace.devices = devices if around is None else around.devices
        with _tracing(trace), tf.variable_creator_scope(_refuse_variable):
            try:
                result = fn(*rebuild(tensors))
            except Exception as error:
                if around is None:
                    error.add_note(f"(in tower0 of {total}, which is traced for all)")
                raise
            together: dict[int, str] | None = {} if packs_results else None
            trace.record("the end", trace.own(result), together=together)
        traces.append(trace)

    # Each tower's call chooses the device: no operation may have one from here.
    with tf.device(None):
        traced = tf.function(
            body, autograph=False, jit_compile=jit_compile or None
        ).get_concrete_function(
            *[
                tf.TensorSpec(spec.shape, spec.dtype, f"argument_{n}")
                for n, spec in enumerate(specs)
            ]
        )
    (trace,) = traces
    own = traced.graph.inputs[len(trace.inputs) :]
    trace.captured = list(zip(own, traced.captured_inputs, strict=True))
    trace.must_run = set(traced.graph.control_outputs)
    trace.only_read = {tensor.name for tensor in read_only_inputs(traced.graph)}
    return trace


@contextmanager
def _tracing(trace: Trace) -> Iterator[None]:
    outer, _here.trace = _here.trace, trace
    try:
        yield
    finally:
        _here.trace = outer


def _refuse_variable(next_creator: Callable[..., Any], **kwargs: Any) -> Any:
    del next_creator
    raise ValueError(
        f"The variable {kwargs.get('name')!r} would be made in a function that is "
        "traced for all towers; make each tower's variables beforehand."
    )
