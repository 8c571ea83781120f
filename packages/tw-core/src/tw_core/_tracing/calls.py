"""Calls of a traced function, one per tower, with meetings in between."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import tensorflow as tf

from tw_core._flat_packs import (
    cut_flat,
    is_small,
    pack_tensors,
    plan_packing,
    unpack_tensors,
    whole_of_parts,
)
from tw_core._modes import orders_effects, traces_function, without_autograph
from tw_core._tf_compat import captured_from, is_variable_handle
from tw_core._tracing.bodies import Conditional, agreed, meeting_in_bodies
from tw_core._tracing.copies import Copies
from tw_core._tracing.segments import (
    Segment,
    Stage,
    make_segment,
    name_in,
    own_seeds,
    seeded_operations,
    stages_of,
)
from tw_core._tracing.stand_ins import Settle, StandIns, make_equal, read
from tw_core._tracing.trace import Combine, Meeting, Trace, trace_function
from tw_core._tracing.written import written_handles, written_outside
from tw_core._variable_kinds import tf_variables

Scope = Callable[[], AbstractContextManager[Any]]


@without_autograph
def call_once(
    fn: Callable[..., Any],
    items: Sequence[Sequence[Any]],
    scopes: Sequence[Scope],
    *,
    combine: Combine | None = None,
    written_once: Sequence[Any] = (),
    kept_equal: Sequence[Any] = (),
    settle: Settle | None = None,
    outside: str | None = None,
    inline: bool | None = None,
    jit_compile: bool = False,
    packs_results: bool = False,
) -> list[Any]:
    """Traces ``fn(*items[0])`` once and calls it for each of K towers.

    Args:
      fn: the function of a tower.
      items: [K] lists of arguments. Tensors are passed as such; Keras models and
        optimizers, ``tf.Module``s, variables, and nests of them stand for their
        variables; anything else must be equal in all towers.
      scopes: [K] functions that return the context of a tower's calls, which places
        them on its device.
      combine: takes a meeting's place and the [K] values passed there; returns [K]
        answers. None for a function without meetings.
      written_once: variables that several towers share and tower 0 alone assigns; until
        the next meeting the others see the values that they would have assigned.
      kept_equal: variables of the first tower, whose copies get its value wherever the
        function assigns them, at the next meeting.
      settle: takes the first tower's [N] handles so assigned, and their values; returns
        the values that all towers get.
      outside: advice on a variable that no tower was given, or all share, if towers
        would write different values to it: the end of an error. If they would write
        equal ones, tower 0 writes it, for all. None to refuse writing variables that no
        tower was given; empty to let tower 0 write whatever it computes.
      inline: whether calls are inlined, which runs small functions faster and starts
        large ones more slowly; None to decide by the number of operations.
      jit_compile: whether XLA compiles the function, part by part. Tensors among the
        items that were cut from a pack are passed as that pack.
      packs_results: whether small tensors leave a compiled function as packs.

    Returns:
      The K results.

    Raises:
      RuntimeError: outside of ``tf.function``.
      ValueError: items that do not match, a variable made in ``fn``, or one that is
        written and belongs to no tower.
      TypeError: tensors of different dtypes.
    """
    if not traces_function() or not orders_effects():
        raise RuntimeError(
            "A function can be traced once for all towers in a tf.function only; call "
            "it in one, or use trace='each'."
        )
    copies = Copies.of(items)
    arguments = [copies.arguments(k) for k in range(len(items))]
    rebuild: Callable[[Sequence[Any]], Sequence[Any]] = copies.rebuilt
    if jit_compile:
        arguments, cut = whole_of_parts(arguments)
        rebuild = lambda tensors: copies.rebuilt(cut(tensors))  # noqa: E731
    with nullcontext() if combine is None else meeting_in_bodies():
        trace = trace_function(
            fn,
            copies.specs(arguments),
            rebuild,
            total=len(items),
            may_meet=combine is not None,
            jit_compile=jit_compile,
            home=_device_in(scopes[0]),
            devices=list(map(_device_in, scopes)) if jit_compile else (),
            packs_results=packs_results,
        )
    towers = [
        _Tower.of(trace, copies, k, own, scope)
        for k, (own, scope) in enumerate(zip(arguments, scopes, strict=True))
    ]
    columns = zip(*(map(id, own) for own in copies.handles), strict=True)
    shared = {own[0] for own in columns if len(own) > 1 and len(set(own)) == 1}
    once = shared & {id(own.handle) for own in tf_variables(written_once)}
    if outside is not None:
        once |= written_outside(trace, copies.handles[0], shared - once, outside)
    equal = {id(own.handle) for own in tf_variables(kept_equal)}
    calls = _Calls(
        copies=copies,
        arguments=arguments,
        combine=combine,
        written_once=once,
        kept_equal=equal,
        settle=settle,
        may_write=outside is not None,
        inline=inline,
        jit_compile=jit_compile,
    )
    return calls.run(trace, towers)


@dataclass(frozen=True, kw_only=True)
class _Calls:
    """How the parts of a trace are called for all towers."""

    copies: Copies
    arguments: Sequence[Sequence[tf.Tensor]]
    combine: Combine | None
    written_once: set[int]  # ids of handles that tower 0 alone assigns
    kept_equal: set[int]  # ids of the first tower's handles
    settle: Settle | None
    may_write: bool  # variables that no tower was given
    inline: bool | None
    jit_compile: bool
    stand_ins: StandIns = field(default_factory=StandIns)

    def run(self, trace: Trace, towers: Sequence["_Tower"]) -> list[Any]:
        """Calls all parts for all towers; returns the towers' results."""
        _check_captured(trace, self.copies, self.arguments, self.may_write)
        seeded = seeded_operations(trace) if len(towers) > 1 else frozenset()
        elsewhere = _elsewhere(trace, towers) if self.jit_compile else []
        for stage in stages_of(trace):
            make = partial(
                make_segment,
                *(trace, stage),
                elsewhere=elsewhere,
                inline=self.inline,
                jit_compile=self.jit_compile,
            )
            self._call(stage, towers, make, seeded)
            for meeting in stage.meetings:
                if meeting is not trace.meetings[-1]:
                    answers = self._answers(meeting, towers)
                    for tower, answer in zip(towers, answers, strict=True):
                        tower.go_on(meeting, answer)
        return [tower.brought(trace.meetings[-1]) for tower in towers]

    def _call(
        self,
        stage: Stage,
        towers: Sequence["_Tower"],
        make: Callable[[], Segment | None],
        seeded: Set[tf.Operation],
    ) -> None:
        """Calls a part for all towers.

        Tower 0 alone assigns variables that all share. The others are given stand-ins,
        with the values from before, so that an assignment counts once. Operations with
        seeds are made again for each tower, whose random numbers are its own.
        """
        first = towers[0].values
        handles = written_handles(stage.operations)
        written = [t.name for t in handles if t.name in first]
        once = [name for name in written if id(first[name]) in self.written_once]
        shared = [first[name] for name in once] if len(towers) > 1 else []
        before = list(map(read, shared))
        segment = make()
        for tower in towers:
            instead: dict[str, Any] = {}
            if tower.index:
                if not seeded.isdisjoint(stage.operations):
                    with own_seeds(seeded, tower.index):
                        segment = make()
                if once:
                    own = self.stand_ins.of(tower.index, shared, before)
                    instead = dict(zip(once, own, strict=True))
            tower.call(segment, instead)
        kept = [name for name in written if id(first[name]) in self.kept_equal]
        if kept:
            make_equal(kept, [tower.values for tower in towers], self.settle)

    def _answers(self, meeting: Meeting, towers: Sequence["_Tower"]) -> Sequence[Any]:
        brought = [tower.brought(meeting) for tower in towers]
        if not isinstance(meeting.place, Conditional):
            return [] if self.combine is None else self.combine(meeting.place, brought)
        branches = [
            partial(self._run_branch, branch, towers)
            for branch in meeting.place.branches
        ]
        answers: Sequence[Any] = tf.cond(agreed([own[0] for own in brought]), *branches)
        return answers

    def _run_branch(self, branch: Trace, towers: Sequence["_Tower"]) -> list[Any]:
        results = self.run(branch, [tower.inside(branch) for tower in towers])
        leaves = [tf.nest.flatten(own, expand_composites=True) for own in results]
        return [[leaf for leaf in own if leaf is not None] for own in leaves]


@dataclass(frozen=True, eq=False)
class _Tower:
    """The values that one tower has for the tensors of the trace."""

    index: int
    scope: Scope
    graph: tf.Graph
    counterparts: dict[int, Any]
    handles: dict[int, Any]  # by the first tower's
    values: dict[str, Any]
    around: "_Tower | None" = None  # where this is a branch

    @classmethod
    def of(
        cls,
        trace: Trace,
        copies: Copies,
        index: int,
        arguments: Sequence[tf.Tensor],
        scope: Scope,
    ) -> "_Tower":
        pairs = zip(copies.handles[0], copies.handles[index], strict=True)
        handles = {id(first): own for first, own in pairs}
        values = {
            tensor.name: value
            for tensor, value in zip(trace.inputs, arguments, strict=True)
        }
        for tensor, outer in trace.captured:
            values[tensor.name] = handles.get(id(outer), outer)
        counterparts = copies.counterparts(index)
        return cls(index, scope, trace.graph, counterparts, handles, values)

    def inside(self, branch: Trace) -> "_Tower":
        """Returns the tower inside a branch that it runs."""
        values = {
            tensor.name: self.handles.get(id(outer), self._value(outer))
            for tensor, outer in branch.captured
        }
        return replace(self, graph=branch.graph, values=values, around=self)

    def call(self, segment: Segment | None, instead: Mapping[str, Any]) -> None:
        """Calls a part of the trace, with some inputs replaced; keeps its results."""
        if segment is None:
            return
        values = {**self.values, **instead}
        of_device = defaultdict(list)
        for op in segment.reads:
            of_device[values[op.inputs[0].name].device].append(op)
        for device, reads in of_device.items():
            handles = [values[op.inputs[0].name] for op in reads]
            found = self._read(device, handles, [op.outputs[0] for op in reads])
            values.update(found)
            self.values.update(found)
        with self.scope():
            results = segment.function(*(values[t.name] for t in segment.inputs))
        for tensor, result in zip(segment.outputs, results, strict=True):
            self.values[tensor.name] = result

    def is_on(self, device: str) -> bool:
        """Returns whether a device, perhaps named in part, is this tower's."""
        own = tf.DeviceSpec.from_string(_device_in(self.scope))
        other = tf.DeviceSpec.from_string(device)
        return not other.device_type or bool(other.make_merged_spec(own) == other)

    def _read(
        self, device: str, handles: Sequence[Any], wanted: Sequence[tf.Tensor]
    ) -> dict[str, tf.Tensor]:
        """Reads variables where they are; small ones are sent as one tensor."""
        is_here = self.is_on(device)
        plan = plan_packing(
            [None if is_here or not is_small(t, device) else t.dtype for t in wanted]
        )
        with self.scope(), tf.device(device):
            read = [
                tf.raw_ops.ReadVariableOp(resource=handle, dtype=tensor.dtype)
                for handle, tensor in zip(handles, wanted, strict=True)
            ]
            packed = pack_tensors(read, plan)
        with self.scope():
            read = unpack_tensors(packed, plan, [tensor.shape for tensor in wanted])
        return {t.name: own for t, own in zip(wanted, read, strict=True)}

    def brought(self, meeting: Meeting) -> Any:
        """Returns the value that this tower passes to a meeting."""
        for pack, own in meeting.packs:
            with self.scope():
                parts = cut_flat(self.values[pack.name], [part.shape for part in own])
            self.values.update(zip((part.name for part in own), parts, strict=True))
        leaves = zip(tf.nest.flatten(meeting.brought), meeting.parts, strict=True)
        own = [self._own(leaf, parts) for leaf, parts in leaves]
        return tf.nest.pack_sequence_as(meeting.brought, own)

    def go_on(self, meeting: Meeting, answer: Any) -> None:
        """Stores the answer of a meeting."""
        leaves = tf.nest.flatten(answer) if meeting.given else []
        for tensor, leaf in zip(meeting.given, leaves, strict=True):
            self.values[tensor.name] = tf.convert_to_tensor(leaf)

    def _own(self, leaf: Any, parts: Sequence[tf.Tensor]) -> Any:
        if not parts:
            return self.counterparts.get(id(leaf), leaf)
        own = list(map(self._value, parts))
        return tf.nest.pack_sequence_as(leaf, own, expand_composites=True)

    def _value(self, tensor: tf.Tensor) -> Any:
        if getattr(tensor, "graph", None) is self.graph:
            return self.values[tensor.name]
        return tensor if self.around is None else self.around._value(tensor)


def _device_in(scope: Scope) -> str:
    """Returns the device of a tower's calls, perhaps named in part."""
    with scope():
        return str(tf.no_op().device)


def _elsewhere(trace: Trace, towers: Sequence[_Tower]) -> list[tf.Tensor]:
    """Returns captured handles of variables that some tower has on another device."""
    captured = [own for own, outer in trace.captured if is_variable_handle(outer)]
    devices = {tower.values[own.name].device for tower in towers for own in captured}
    here = {
        (tower.index, device)
        for tower in towers
        for device in devices
        if tower.is_on(device)
    }
    return [
        own
        for own in captured
        if any((t.index, t.values[own.name].device) not in here for t in towers)
    ]


def _check_captured(
    trace: Trace,
    copies: Copies,
    arguments: Sequence[Sequence[tf.Tensor]],
    may_write: bool,
) -> None:
    """Refuses tensors and variables captured from outside that towers cannot share."""
    owners: dict[int, set[int]] = defaultdict(set)  # towers, by id of their tensors
    for k, (own, more) in enumerate(zip(copies.handles, arguments, strict=True)):
        for tensor in (*own, *more):
            owners[id(tensor)].add(k)
    first = {id(handle) for handle in copies.handles[0]}
    for tensor, outer in trace.captured:
        if id(outer) in first or (trace.around and trace.around.reaches(outer)):
            continue
        towers = _towers_behind(outer, owners)
        if towers and len(towers) < len(arguments):
            raise ValueError(
                "A function that is traced once for all towers uses "
                f"{name_in(trace, outer)}, which belongs to towers {sorted(towers)} "
                "only; pass it to the function, one item per tower."
            )
        if may_write or not is_variable_handle(outer):
            continue
        if tensor.name not in trace.only_read:
            raise ValueError(
                "A function that is traced once for all towers writes "
                f"{name_in(trace, outer)}, which no tower was given; pass an object "
                "that holds it to the function, one per tower, or use trace='each'."
            )


def _towers_behind(tensor: tf.Tensor, owners: dict[int, set[int]]) -> set[int]:
    """Returns the towers whose tensors and variables a tensor was computed from."""
    found: set[int] = set()
    stack, seen = [tensor], set()
    while stack:
        own = stack.pop()
        if id(own) in seen:
            continue
        seen.add(id(own))
        if id(own) in owners:
            found |= owners[id(own)]
        elif not hasattr(own, "numpy"):  # An eager tensor has no record of its inputs.
            outside = captured_from(own.graph).get(id(own))
            stack += own.op.inputs if outside is None else [outside]
    return found
