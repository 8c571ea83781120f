"""Cutting a dataset's batches into the towers' parts, on their devices ahead of use.

The cut is a map of the dataset, which runs in tf.data's own thread. The reader makes
the copies: it requests each batch before it hands out the preceding one. Outside
functions it does so between two steps; in a loop in a ``tf.function``, concurrently
with the step, and neither waits for the other.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import tensorflow as tf

from tw_builders._parts import check_batch, cut, on_devices, part_sizes
from tw_core import Tower
from tw_core.internal import (
    builds_session_graph,
    check_function,
    check_towers,
    check_whole_number,
    without_autograph,
)

_T = TypeVar("_T")


@without_autograph
def per_tower(
    dataset: tf.data.Dataset, towers: Sequence[Tower], *, prefetch: int = 2
) -> tf.distribute.DistributedDataset:
    """Gives every tower its part of each batch, on its device before it is used.

    For loops outside functions, which may pass the parts to a ``tf.function``, and
    for ``for`` loops in a ``tf.function`` with AutoGraph, without ``break``. In a
    session graph use ``tw_builders.tensorpack.StagingInput``.

    Args:
      dataset: of batches: nests of dense, ragged and sparse tensors of any dtype, all
        with the same number of rows, which may change from batch to batch; None stays
        None.
      towers: K towers.
      prefetch: batches that are ready ahead of the one in use, at least 1: the next one
        on the devices, the rest in host memory. One more may have been read.

    Returns:
      An iterable that starts each time from the dataset's beginning. An item is a list
      of K nests like a batch of ``dataset``; tower k's has its rows and is on its
      device. The first towers have one row more where K does not divide the rows, and
      the last ones have none where there are fewer than K. ``reduce(state, function)``
      calls ``function(state, item)`` for each item and returns the last state: the loop
      for functions without AutoGraph. ``element_spec`` describes an item.

    Raises:
      ValueError: batches with a scalar, or with different numbers of rows, as far as
        these are known; no towers; or ``prefetch`` below 1.
      TypeError: an argument of another type, or batches of other values.
      tf.errors.InvalidArgumentError: while looping, tensors with different numbers of
        rows.

    In a session graph, and in a ``tf.function`` without AutoGraph, ``for`` raises a
    RuntimeError. Errors of the dataset are raised after the batches before them.
    """
    check_towers(towers)
    ahead = check_whole_number(prefetch=prefetch, at_least=1)
    return TowerInput(cut_batches(dataset, len(towers), ahead - 1), towers)


def cut_batches(
    dataset: tf.data.Dataset, num_towers: int, buffer_size: int
) -> tf.data.Dataset:
    """Cuts each batch into a tuple of parts; prefetches ``buffer_size`` on the host."""
    if not isinstance(dataset, tf.data.Dataset):
        raise TypeError(f"dataset must be a tf.data.Dataset; got {dataset!r}.")
    check_batch(dataset.element_spec)
    is_tuple = type(dataset.element_spec) is tuple

    def parts(*batch: Any) -> tuple[Any, ...]:
        data = batch if is_tuple else batch[0]
        return tuple(cut(data, part_sizes(data, num_towers)))

    # Left to itself, tf.data chooses the parallelism of a map, and appends a prefetch
    # of its own choice to a dataset without one. This map reads one batch ahead.
    made = dataset.map(
        tf.autograph.experimental.do_not_convert(parts), num_parallel_calls=1
    )
    if buffer_size:
        made = made.prefetch(buffer_size)
    options = tf.data.Options()
    options.experimental_optimization.inject_prefetch = False
    return made.with_options(options)


class TowerInput(tf.distribute.DistributedDataset):  # type: ignore[misc]
    """A dataset of K parts, copied to the towers' devices one batch ahead.

    The base class makes AutoGraph turn a ``for`` loop into a call of ``reduce``.
    """

    def __init__(self, parts: tf.data.Dataset, towers: Sequence[Tower]) -> None:
        self._parts = parts
        self._towers = tuple(towers)

    @property
    def element_spec(self) -> list[Any]:
        """[K] nests of ``TypeSpec``s."""
        return list(self._parts.element_spec)

    @without_autograph
    def __iter__(self) -> Iterator[list[Any]]:
        if not tf.executing_eagerly():
            raise RuntimeError(
                "per_tower: outside of eager mode, loop in a tf.function with "
                "AutoGraph, or call reduce(state, function) in one without; in a "
                "session graph use tw_builders.tensorpack.StagingInput."
            )
        return self._read()

    def _read(self) -> Iterator[list[Any]]:
        source = iter(self._parts)

        def following() -> list[Any] | Exception:
            try:
                return on_devices(next(source), self._towers)
            except Exception as error:  # raised after the batches before it
                return error

        item = following()
        while not isinstance(item, Exception):
            ready, item = item, following()
            yield ready
        if not isinstance(item, StopIteration):
            raise item

    def reduce(self, initial_state: _T, reduce_func: Callable[[_T, Any], _T]) -> _T:
        """Calls ``reduce_func(state, item)`` for each item."""
        # Not marked without_autograph: reduce_func may need it.
        check_function(reduce_func=reduce_func)
        if not tf.executing_eagerly() and not builds_session_graph():
            return self._reduce_in_function(initial_state, reduce_func)
        state = initial_state
        for item in self:
            state = reduce_func(state, item)
        return state

    def _reduce_in_function(
        self, state: _T, reduce_func: Callable[[_T, Any], _T]
    ) -> _T:
        source = iter(self._parts)

        def following() -> tuple[tf.Tensor, list[tf.Tensor]]:
            with tf.device("/cpu:0"):
                item = source.get_next_as_optional()
                there = item.has_value()
                flat = tf.cond(
                    there,
                    lambda: flat_parts(item.get_value()),
                    lambda: no_rows(self._parts),
                )
            parts = on_devices(packed_parts(self._parts, flat), self._towers)
            return there, flat_parts(parts)

        # The next item is a loop variable, so that it is read and copied in the same
        # iteration as the step, and neither waits for the other: an iteration with
        # effects starts only when the preceding one has ended.
        def step(_: Any, item: Any, state: _T) -> tuple[Any, Any, _T]:
            there, next_item = following()
            return there, next_item, reduce_func(state, packed_parts(self._parts, item))

        start = (*following(), state)
        last: tuple[Any, Any, _T] = tf.while_loop(
            lambda there, *_: there, step, start, parallel_iterations=1
        )
        return last[2]


def flat_parts(parts: Any) -> list[tf.Tensor]:
    """Lists the dense tensors that the parts are made of."""
    flat = tf.nest.flatten(parts, expand_composites=True)
    return [tensor for tensor in flat if tensor is not None]


def packed_parts(dataset: tf.data.Dataset, flat: Sequence[tf.Tensor]) -> list[Any]:
    """Packs the tensors of ``flat_parts`` into K parts again."""
    spec = dataset.element_spec
    return list(tf.nest.pack_sequence_as(spec, flat, expand_composites=True))


def no_rows(dataset: tf.data.Dataset) -> list[tf.Tensor]:
    """Stands in for ``flat_parts``: zeros, as small as the specs allow."""
    specs = tf.nest.flatten(dataset.element_spec, expand_composites=True)
    shapes = [spec.shape if spec.shape.rank is not None else [] for spec in specs]
    return [
        tf.zeros([size or 0 for size in shape], spec.dtype)
        for shape, spec in zip(shapes, specs, strict=True)
    ]
