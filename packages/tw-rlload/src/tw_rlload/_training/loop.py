"""A loop over the steps of whole epochs, the same in both modes.

Each turn picks the towers' rows, by slicing or (where rows are shuffled) gathering,
and hands them to a step. Turns are strictly sequential, as each trains on the
variables that the last one left.

Variables are always read whole. TensorFlow returns the value without copying, and
a slice along axis 0 shares its memory where possible; a sparse read instead
(``tf.gather`` of the variable itself) would make every later read a copy.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import tensorflow as tf

from tw_core import Tower, map_towers
from tw_rlload._loading.plan import LoadPlan
from tw_rlload._loading.specs import ColumnSpec, DataVariables
from tw_rlload._training.order import EpochOrder

# [K][C] rows -> operations to run, and M scalars to return from the loop.
Step: TypeAlias = Callable[
    [list[list[tf.Tensor]]], "tuple[Sequence[tf.Operation], Sequence[tf.Tensor]]"
]


class MinibatchSlice(NamedTuple):
    """The sequences of a step on each device; int32 scalars."""

    first: tf.Tensor
    count: tf.Tensor
    length: tf.Tensor  # rows per sequence


class LoopFeeds(NamedTuple):
    """The inputs of a loop of T turns; int32 tensors, or arrays to be fed."""

    steps: Any  # [T], the minibatch of each turn
    sequences: Any  # [T, K, B], sequences to gather; B is 0 where rows are sliced
    shape: Any  # [2], sequences per device and step, and rows per sequence
    source: Any  # scalar, 2 * buffer, plus 1 to gather


LOOP_SPECS = LoopFeeds(
    steps=tf.TensorSpec([None], tf.int32),
    sequences=tf.TensorSpec([None, None, None], tf.int32),
    shape=tf.TensorSpec([2], tf.int32),
    source=tf.TensorSpec([], tf.int32),
)

# (feeds, turn) -> [K][C] rows on the towers' devices.
Pick: TypeAlias = Callable[[LoopFeeds, tf.Tensor], list[list[tf.Tensor]]]


def slice_rows(
    variables: Sequence[tf.Variable], specs: Sequence[ColumnSpec], which: MinibatchSlice
) -> list[tf.Tensor]:
    """Slices consecutive sequences out of each column of one tower."""

    def consecutive(variable: tf.Variable, spec: ColumnSpec) -> tf.Tensor:
        first, count, length = which
        if not spec.is_state:
            first, count = first * length, count * length
        others = len(spec.inner_shape)
        begin = tf.stack([first, *[0] * others])
        size = tf.stack([count, *[-1] * others])
        return tf.slice(variable.read_value(), begin, size)

    return _of_each(consecutive, variables, specs)


def _gather_rows(
    variables: Sequence[tf.Variable],
    specs: Sequence[ColumnSpec],
    sequences: tf.Tensor,
    length: tf.Tensor,
) -> list[tf.Tensor]:
    """Gathers [B] sequences from anywhere in each column of one tower."""

    def scattered(variable: tf.Variable, spec: ColumnSpec) -> tf.Tensor:
        value = variable.read_value()
        if spec.is_state:
            return tf.gather(value, sequences)
        shape = tf.shape(value)
        whole = tf.concat([[shape[0] // length, length], shape[1:]], 0)
        picked = tf.gather(tf.reshape(value, whole), sequences)
        flat = tf.concat([[tf.size(sequences) * length], shape[1:]], 0)
        return tf.reshape(picked, flat)

    return _of_each(scattered, variables, specs)


def loop_feeds(plan: LoadPlan, order: EpochOrder, buffer: int) -> LoopFeeds:
    """Returns the arrays with which a loop runs these epochs."""
    steps = order.steps.reshape(-1)
    sequences = np.zeros((len(steps), plan.num_devices, 0), np.int32)
    if order.sequences is not None:
        sequences = order.sequences.reshape(len(steps), plan.num_devices, -1)
    shape = np.array([plan.sequences_per_device_step, plan.sequence_length], np.int32)
    source = np.int32(2 * buffer + (order.sequences is not None))
    return LoopFeeds(steps, sequences, shape, source)


def make_picks(
    towers: Sequence[Tower], specs: Sequence[ColumnSpec], variables: DataVariables
) -> list[Pick]:
    """Makes functions, one per ``source``, that pick all towers' rows of a turn."""

    def sliced(
        columns: list[list[tf.Variable]], feeds: LoopFeeds, turn: tf.Tensor
    ) -> list[list[tf.Tensor]]:
        count, length = tf.unstack(feeds.shape, num=2)
        which = MinibatchSlice(feeds.steps[turn] * count, count, length)
        return map_towers(
            lambda _, mine: slice_rows(mine, specs, which), towers, columns
        )

    def gathered(
        columns: list[list[tf.Variable]], feeds: LoopFeeds, turn: tf.Tensor
    ) -> list[list[tf.Tensor]]:
        length, sequences = feeds.shape[1], feeds.sequences[turn]
        return map_towers(
            lambda tower, mine: _gather_rows(
                mine, specs, sequences[tower.index], length
            ),
            *(towers, columns),
        )

    return [partial(way, buffer) for buffer in variables for way in (sliced, gathered)]


def loop_over_steps(feeds: LoopFeeds, picks: Sequence[Pick], step: Step) -> tf.Tensor:
    """Runs a step on T minibatches in sequence; returns [T, M] scalars, on the CPU.

    Each way of picking rows has a loop of its own, of which one runs: branching in
    every turn took a tenth of a small model's step.
    """
    loops = [partial(_loop, feeds, pick, step) for pick in picks]
    packed: tf.Tensor = tf.switch_case(feeds.source, loops)
    return packed


def _of_each(
    take: Callable[[tf.Variable, ColumnSpec], tf.Tensor],
    variables: Sequence[tf.Variable],
    specs: Sequence[ColumnSpec],
) -> list[tf.Tensor]:
    rows = [take(v, spec) for v, spec in zip(variables, specs, strict=True)]
    for tensor, spec in zip(rows, specs, strict=True):
        tensor.set_shape([None, *spec.inner_shape])
    return rows


def _loop(feeds: LoopFeeds, pick: Pick, step: Step) -> tf.Tensor:
    total = tf.size(feeds.steps)

    def turn(i: tf.Tensor, rows: tf.TensorArray) -> tuple[tf.Tensor, tf.TensorArray]:
        operations, scalars = step(pick(feeds, i))
        with tf.device("/cpu:0"):
            packed = tf.stack([tf.cast(scalar, tf.float64) for scalar in scalars])
        rows = rows.write(i, packed)
        with tf.control_dependencies(operations):
            return i + 1, rows

    rows = tf.TensorArray(tf.float64, total, element_shape=[None])
    _, rows = tf.while_loop(
        lambda i, rows: i < total, turn, (tf.constant(0), rows), parallel_iterations=1
    )
    return rows.stack()
