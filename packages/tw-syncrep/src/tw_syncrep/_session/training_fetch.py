"""Tells whether a session call runs the training op.

A hook may fetch what the training op returned with, but only where it runs
anyway: fetching it in a call for evaluation would make that call a step.
"""

from typing import Any

import tensorflow as tf


class TrainingFetch:
    """Answers for one op, and remembers answers by what was fetched."""

    def __init__(self, op: tf.Operation) -> None:
        self._op = op
        self._answers: dict[tuple[str, ...], bool] = {}

    def is_in(self, fetches: Any) -> bool:
        """Returns whether fetching ``fetches`` runs the op."""
        leaves = tf.nest.flatten(fetches, expand_composites=True)
        key = tuple(leaf if isinstance(leaf, str) else leaf.name for leaf in leaves)
        if key not in self._answers:
            self._answers[key] = self._is_below(leaves)
        return self._answers[key]

    def _is_below(self, leaves: list[Any]) -> bool:
        todo = [self._as_op(leaf) for leaf in leaves]
        seen = set(todo)
        while todo:
            op = todo.pop()
            if op is self._op:
                return True
            before = {tensor.op for tensor in op.inputs} | set(op.control_inputs)
            todo += before - seen
            seen |= before
        return False

    def _as_op(self, leaf: Any) -> tf.Operation:
        element = self._op.graph.as_graph_element(leaf)
        return element.op if isinstance(element, tf.Tensor) else element
