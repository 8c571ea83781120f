"""One variable that holds many variables, or their slots."""

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from operator import attrgetter
from typing import Any

import tensorflow as tf

from tw_core._flat_packs import cut_flat, join_flat
from tw_core._modes import builds_session_graph
from tw_core._records.collections import with_outer_graphs
from tw_core._tf_compat import set_initializer, with_gradient
from tw_core.flat_variables._layout import Layout
from tw_core.flat_variables._session.saving import SavedParts


class FlatVariable(tf.Variable):  # type: ignore[misc]
    """A flat variable with the names and shapes of its parts.

    In a session graph it replaces ``variable``, of rank 1, in the collections, so that
    a saver writes each part under its own name and shape. Updates go to ``variable``.
    """

    _save_slice_info = None

    def __init__(self, variable: tf.Variable, layout: Layout) -> None:
        """Wraps ``variable``, whose parts ``layout`` describes."""
        self.variable = variable
        self.layout = layout
        self._steps = threading.local()
        self._asked: weakref.ref[SavedParts] | None = None
        self._initial: list[tf.Tensor] = []

    # Reading and writing parts.

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Serves all parts from one read, whose gradient is one tensor."""
        before, self._steps.parts = self._parts, self._read_parts()
        try:
            yield
        finally:
            self._steps.parts = before

    def _read_parts(self) -> list[tf.Tensor]:
        """Reads all parts; refuses their gradient where some parts have none."""
        names, reached = [part.name for part in self.layout.parts], set[int]()

        def of_whole(upstream: tf.Tensor) -> list[tf.Tensor]:
            # TensorFlow calls this last, with zeros for parts that have no gradient.
            missing = [name for n, name in enumerate(names) if n not in reached]
            reached.clear()
            if missing:
                raise ValueError(
                    f"FlatModel: {', '.join(missing)} has no gradient, and an "
                    f"optimizer updates {self.name} as a whole; leave it out of the "
                    "flat variables with group=lambda name: None if ... else '', or "
                    "compute all that the loss uses in one reading()."
                )
            return [upstream]

        def of_part(n: int, upstream: Any) -> list[tf.Tensor]:
            if isinstance(upstream, tf.IndexedSlices):
                raise ValueError(f"FlatModel: {describe_sparse([names[n]])}")
            reached.add(n)
            return [upstream]

        value = tf.convert_to_tensor(self.variable)
        [whole] = with_gradient([value], [value], of_whole)
        return [
            with_gradient([part], [part], partial(of_part, n))[0]
            for n, part in enumerate(cut_flat(whole, self.layout.shapes))
        ]

    @property
    def _parts(self) -> list[tf.Tensor] | None:
        return getattr(self._steps, "parts", None)

    def read_part(self, number: int) -> tf.Tensor:
        """Returns one part, in its own shape."""
        part, known = self.layout.parts[number], self._parts
        if known is not None and not _is_lifted_out_of(known[number]):
            if not (tf.executing_eagerly() or tf.is_symbolic_tensor(known[number])):
                raise RuntimeError(
                    f"FlatModel: {part.name} is read in a tf.function that an eager "
                    "call of the model calls, and that would keep this value; call the "
                    "FlatModel in a tf.function."
                )
            return known[number]
        with tf.device(self.variable.device):
            flat = self.variable.read_value()
            return tf.reshape(flat[part.start : part.end], part.shape)

    def assign_part(self, number: int, value: tf.Tensor) -> tf.Operation | None:
        """Writes one part; returns the op in a session graph."""
        part = self.layout.parts[number]
        if self._parts is not None:
            raise RuntimeError(
                f"{part.name}: a step that has read its flat variable cannot write "
                "one part of it; assign before, or after the step."
            )
        with tf.device(self.variable.device):
            rows = tf.reshape(value, [part.size])
            if builds_session_graph():
                # Several assignments in one call must not overwrite each other's parts.
                return tf.raw_ops.ResourceStridedSliceAssign(
                    ref=self.variable.handle,
                    begin=[part.start],
                    end=[part.end],
                    strides=[1],
                    value=rows,
                )
            flat = self.variable.read_value()
            # Assigning a slice even once makes TensorFlow copy at every later read.
            self.variable.assign(
                tf.concat([flat[: part.start], rows, flat[part.end :]], axis=0)
            )
        return None

    # The rest of a variable's interface: the flat one's, read and updated as a whole.

    name = property(attrgetter("variable.name"))
    shape = property(attrgetter("variable.shape"))
    dtype = property(attrgetter("variable.dtype"))
    device = property(attrgetter("variable.device"))
    trainable = property(attrgetter("variable.trainable"))
    synchronization = property(attrgetter("variable.synchronization"))
    aggregation = property(attrgetter("variable.aggregation"))
    constraint = None
    graph = property(attrgetter("variable.graph"))
    op = property(attrgetter("variable.op"))
    handle = property(attrgetter("variable.handle"))
    initializer = property(attrgetter("variable.initializer"))
    initial_value = property(attrgetter("variable.initial_value"))
    is_initialized = property(attrgetter("variable.is_initialized"))
    value = property(attrgetter("variable.value"))
    read_value = property(attrgetter("variable.read_value"))
    assign = property(attrgetter("variable.assign"))
    eval = property(attrgetter("variable.eval"))
    to_proto = property(attrgetter("variable.to_proto"))
    _as_graph_element = property(attrgetter("variable._as_graph_element"))
    _in_graph_mode = True

    def __tf_tensor__(self, dtype: Any = None, name: str | None = None) -> tf.Tensor:
        return tf.convert_to_tensor(self.variable, dtype, name)

    def __repr__(self) -> str:
        names = [part.name for part in self.layout.parts]
        return f"<FlatVariable {self.name!r} of {names}>"

    # tf.compat.v1.train.Saver, and init_from_checkpoint.

    def _gather_saveables_for_checkpoint(self) -> dict[str, Callable[..., Any]]:
        return self.gather_parts(range(len(self.layout.parts)))

    def gather_parts(self, numbers: Iterable[int]) -> dict[str, Callable[..., Any]]:
        """Lets a saver save some parts together with others that it requests."""

        def make(name: str = "") -> Any:
            del name  # The parts have names of their own.
            asked = self._asked() if self._asked is not None else None
            if asked is None or asked.is_taken:
                asked = SavedParts(self)
                # Weak: its saver owns it; an abandoned one must leave nothing behind.
                self._asked = weakref.ref(asked)
            asked.numbers.update(numbers)
            return asked

        return {"VARIABLE_VALUE": make}

    def start_part(self, number: int, value: tf.Tensor) -> None:
        """Makes a session graph's initializer give one part another value."""
        with tf.init_scope(), tf.device(None), tf.device(self.variable.device):
            if not self._initial:
                self._initial = cut_flat(
                    self.variable.initial_value, self.layout.shapes
                )
            self._initial[number] = value
            initial = join_flat(self._initial)
            assigned = self.variable.assign(initial, read_value=False)
            set_initializer(self.variable, assigned, initial)


def describe_sparse(names: Sequence[str]) -> str:
    """Returns the advice for variables whose gradients are sparse."""
    return (
        f"{', '.join(names)} has a sparse gradient, which many optimizers apply "
        "differently from a dense one; leave it out of the flat variables with "
        "group=lambda name: None if ... else ''."
    )


def _is_lifted_out_of(tensor: tf.Tensor) -> bool:
    """Returns whether a tensor belongs to a trace that is not being built now."""
    if not tf.is_symbolic_tensor(tensor):
        return False
    here = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
    return tensor.graph not in with_outer_graphs(here)
