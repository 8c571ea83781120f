"""Whether the order of effects in a ``tf.function`` lets towers wait for each other.

A function runs its effects in the order in which they were built, one tower's after
another's, by dependencies that TensorFlow adds when the trace ends. An effect of tower
0 that waits for a sum, and one of tower 1 that the sum waits for, cannot both keep
that order if they use one variable or call Python: TensorFlow would fail the call with
"nodes in a cycle".
"""

from collections import defaultdict
from collections.abc import Sequence

import tensorflow as tf

from tw_core._modes import orders_effects
from tw_core._variable_kinds import READS, WRITES

# Python functions are ordered among themselves, whatever they use.
_CALLS = {"PyFunc", "EagerPyFunc"}

_Pair = tuple[tf.Operation, tf.Operation]


def check_order_of_effects(operations: Sequence[tf.Operation]) -> None:
    """Refuses operations, listed in build order, whose effects cannot keep it.

    Effects not recognised here, such as a call of a function that assigns variables,
    are refused by TensorFlow when it runs the step.
    """
    if not orders_effects() or any(op.type == "NextIteration" for op in operations):
        return  # the loops of TensorFlow 1 are cycles
    pairs = _ordered_pairs(operations)
    stuck = _stuck(operations, pairs) if pairs else set()
    for first, second in pairs:
        if {first, second} <= stuck and _leads_to(second, first):
            raise ValueError(
                "sum_over_towers: a tf.function runs effects in the order of building, "
                f"{first.name!r} before {second.name!r}; but the first waits for a sum "
                "over towers that needs the second. Have towers change variables, or "
                "call Python functions, after all of them are built."
            )


def _ordered_pairs(operations: Sequence[tf.Operation]) -> list[_Pair]:
    """Lists the pairs of effects whose first must run before the second."""
    pairs: list[_Pair] = []
    last_write: dict[object, tf.Operation] = {}
    reads: dict[object, list[tf.Operation]] = defaultdict(list)
    for op in operations:
        if op.type not in READS | WRITES | _CALLS:
            continue
        thing = "python" if op.type in _CALLS else op.inputs[0].ref()
        if thing in last_write:
            pairs.append((last_write[thing], op))
        if op.type in READS:
            reads[thing].append(op)
            continue
        pairs += [(read, op) for read in reads.pop(thing, [])]
        last_write[thing] = op
    return pairs


def _stuck(
    operations: Sequence[tf.Operation], pairs: Sequence[_Pair]
) -> set[tf.Operation]:
    """Returns the operations that can never run: on a cycle, or waiting for one."""
    known = set(operations)
    needs = {
        op: {*(tensor.op for tensor in op.inputs), *op.control_inputs} & known
        for op in operations
    }
    for first, second in pairs:
        needs[second].add(first)
    followers: dict[tf.Operation, list[tf.Operation]] = defaultdict(list)
    for op, needed in needs.items():
        for other in needed:
            followers[other].append(op)
    ready = [op for op, needed in needs.items() if not needed]
    while ready:
        done = ready.pop()
        for op in followers[done]:
            needs[op].discard(done)
            if not needs[op]:
                ready.append(op)
    return {op for op, needed in needs.items() if needed}


def _leads_to(source: tf.Operation, target: tf.Operation) -> bool:
    """Returns whether ``target`` needs ``source``."""
    seen, waiting = {source}, [source]
    while waiting:
        op = waiting.pop()
        for use in (use for output in op.outputs for use in output.consumers()):
            if use is target:
                return True
            if use not in seen:
                seen.add(use)
                waiting.append(use)
    return False
