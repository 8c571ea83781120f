"""The parts of a trace between meetings, each as a function.

Operations are divided in build order: those built before a meeting depend on nothing
that was built after it, control dependencies included. So calling a tower's parts one
after the other keeps every order that the whole had. Loops are the exception: taking a
gradient gives the loop new inputs, the empty lists in which it collects its
intermediate values. These are moved to the loop's part.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf

from tw_core._tf_compat import function_of_part, set_seed
from tw_core._tracing.trace import Meeting, Trace
from tw_core._variable_kinds import CALLS, READS

# Functions of fewer operations are inlined: optimizing them once saves little. Networks
# of 300 operations ran no faster inlined; smaller ones were not measured.
INLINE_BELOW = 200
_SEED_STEP = 0x9E3779B1  # odd and large, so that towers' seeds stay distinct


@dataclass(eq=False)
class Segment:
    """A part of a trace, as a function of tensors of the trace."""

    function: Callable[..., Sequence[tf.Tensor]]
    inputs: list[tf.Tensor]
    outputs: list[tf.Tensor]
    reads: list[tf.Operation]  # of variables, whose values are inputs


@dataclass(eq=False)
class Stage:
    """The operations up to a meeting that waits, and the meetings among them."""

    operations: list[tf.Operation] = field(default_factory=list)
    meetings: list[Meeting] = field(default_factory=list)
    outputs: list[tf.Tensor] = field(default_factory=list)  # tensors used later


def stages_of(trace: Trace) -> list[Stage]:
    """Cuts a trace at the meetings that wait."""
    stages, ends = [Stage()], []
    for meeting in trace.meetings:
        stages[-1].meetings.append(meeting)
        if meeting.waits:
            ends.append(meeting.position)
            stages.append(Stage())
    outside = _outside(trace)
    number = 0
    stage_of: dict[tf.Operation, int] = {}
    for position, op in enumerate(trace.graph.get_operations()):
        while number < len(ends) and position >= ends[number]:
            number += 1
        if op not in outside:
            stage_of[op] = number
    if len(stages) > 1:
        _move_to_users(stage_of)
    for op, number in stage_of.items():
        stages[number].operations.append(op)
    _find_outputs(stages, stage_of, trace.graph)
    return stages


def _move_to_users(stage_of: dict[tf.Operation, int]) -> None:
    """Moves operations built later than an operation that uses them to its stage."""
    stack = list(stage_of)
    while stack:
        op = stack.pop()
        for tensor in op.inputs:
            if stage_of.get(tensor.op, 0) > stage_of[op]:
                stage_of[tensor.op] = stage_of[op]
                stack.append(tensor.op)


def make_segment(
    trace: Trace,
    stage: Stage,
    *,
    elsewhere: Sequence[tf.Tensor] = (),
    inline: bool | None,
    jit_compile: bool,
) -> Segment | None:
    """Makes the function of a stage; None where nothing has to run.

    ``elsewhere`` are captured handles of variables that are read before the call.
    """
    own = set(stage.operations)
    users = {op for tensor in elsewhere for op in tensor.consumers()} & own
    reads = [op for op in stage.operations if op in users and _is_read(op)]
    own -= set(reads)
    outputs = [tensor for tensor in stage.outputs if tensor.op not in reads]
    effects = {op for op in trace.must_run & own if op.type not in READS}
    needed = _needed(own, outputs, effects)
    if users:
        _check_elsewhere(trace, needed & users)
    if needed.isdisjoint(own):
        return None
    operations = [op for op in trace.graph.get_operations() if op in needed]
    used = (tensor for op in operations for tensor in op.inputs)
    inputs = list({t.name: t for t in used if t.op not in needed}.values())
    if jit_compile:
        _check_lists(inputs)
    if inline is None:
        inline = len(operations) < INLINE_BELOW
    function = function_of_part(
        trace.graph,
        operations,
        inputs=inputs,
        outputs=outputs,
        # These must have run when the call ends; reads too, before a later write.
        effects=[
            op
            for op in operations
            if op in effects or any(own.dtype == tf.resource for own in op.inputs)
        ],
        inline=inline,
        jit_compile=jit_compile,
    )
    return Segment(function, inputs, outputs, reads)


def _is_read(op: tf.Operation) -> bool:
    return bool(op.type == "ReadVariableOp")


def _check_elsewhere(trace: Trace, users: Iterable[tf.Operation]) -> None:
    """Refuses anything but reads of variables on other devices."""
    outer = {own.name: tensor for own, tensor in trace.captured}
    unlike = [
        f"{name_in(trace, outer[own.name])} (by {op.type} {op.name!r})"
        for op in users
        for own in op.inputs
        if own.name in outer and own.dtype == tf.resource
    ]
    if unlike:
        raise ValueError(
            "XLA compiles a tower for its device, and variables of other devices can "
            "only be read, outside of branches, loops and functions; got "
            f"{', '.join(sorted(unlike))}. Give each tower its own variable, or use "
            "jit_compile=False."
        )


def _check_lists(inputs: Iterable[tf.Tensor]) -> None:
    """Refuses lists, which XLA cannot pass from one function to the next."""
    loops = sorted({own.op.name for own in inputs if own.dtype == tf.variant})
    if loops:
        raise ValueError(
            "XLA compiles the parts of a function between sums over towers, and lists "
            "cannot leave a part, such as those of a loop whose gradient is computed "
            f"after a sum; got {', '.join(loops)}. Avoid loops in a model with "
            "synchronised layers, or use jit_compile=False."
        )


def name_in(trace: Trace, tensor: tf.Tensor) -> str:
    """Returns the variable's name for its handle, the tensor's for any other."""
    names = [v.name for v in trace.graph.variables if v.handle is tensor]
    return str(names[0] if names else getattr(tensor, "name", tensor))


def seeded_operations(trace: Trace) -> frozenset[tf.Operation]:
    """Returns random operations with a seed, which draw the same numbers in every call.

    Refuses those in the body of a ``tf.cond``, a loop or a function.
    """
    every = trace.graph.get_operations()
    if any(op.type in CALLS for op in every):
        bodies = trace.graph.as_graph_def().library.function
        inside = [node.name for b in bodies for node in b.node_def if _has_seed(node)]
        if inside:
            raise ValueError(
                f"{', '.join(inside)} have a seed, inside a tf.cond, a loop or a "
                "function, and would draw the same numbers in every tower that is "
                "traced once; use tf.random.stateless_uniform and the like, or one "
                "keras.random.SeedGenerator per copy."
            )
    kinds = {op.type: op for op in every}
    random = {t for t, op in kinds.items() if "seed2" in op.node_def.attr}
    return frozenset(op for op in every if op.type in random and _has_seed(op.node_def))


def _has_seed(node: Any) -> bool:
    return "seed2" in node.attr and bool(node.attr["seed"].i or node.attr["seed2"].i)


@contextmanager
def own_seeds(seeded: Iterable[tf.Operation], tower: int) -> Iterator[None]:
    """Gives operations the seeds of a tower, for the functions made inside."""
    seeds = {op: op.get_attr("seed2") for op in seeded}
    for op, seed in seeds.items():
        set_seed(op, seed + tower * _SEED_STEP)
    try:
        yield
    finally:
        for op, seed in seeds.items():
            set_seed(op, seed)


def _outside(trace: Trace) -> set[tf.Operation]:
    """Returns the placeholders for values from outside the trace."""
    tensors = [*trace.inputs, *(own for own, _ in trace.captured)]
    tensors += [given for meeting in trace.meetings for given in meeting.given]
    return {tensor.op for tensor in tensors}


def _find_outputs(
    stages: Sequence[Stage], stage_of: dict[tf.Operation, int], graph: tf.Graph
) -> None:
    """Lists, for each stage, the tensors that its meetings and later stages use."""
    used: list[dict[str, tf.Tensor]] = [{} for _ in stages]

    def use(tensor: tf.Tensor, number: int) -> None:
        made = stage_of.get(tensor.op)
        if made is not None and made < number:
            used[made][tensor.name] = tensor

    for number, stage in enumerate(stages):
        for op in stage.operations:
            for tensor in op.inputs:
                if tensor.op.type != "Const":
                    use(tensor, number)
        for meeting in stage.meetings:
            for tensor in meeting.tensors():
                if getattr(tensor, "graph", None) is graph:
                    use(tensor, len(stages))
    for stage, outputs in zip(stages, used, strict=True):
        stage.outputs = list(outputs.values())


def _needed(
    own: set[tf.Operation],
    outputs: Sequence[tf.Tensor],
    effects: Iterable[tf.Operation],
) -> set[tf.Operation]:
    """Returns a stage's operations that its outputs or effects need, and constants."""
    stack = [*(tensor.op for tensor in outputs), *effects]
    found: set[tf.Operation] = set()
    while stack:
        op = stack.pop()
        if op in found or not (op in own or op.type == "Const"):
            continue
        found.add(op)
        stack += [tensor.op for tensor in op.inputs]
        stack += list(op.control_inputs)
    return found
