"""A loop over the steps of whole epochs, the same in both modes.

Each turn picks the towers' rows, slices or (where rows are shuffled) gathers,
and hands them to a step. Turns follow each other strictly, as each trains on the
variables that the last one left.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import tensorflow as tf

from tw_core import Tower, map_towers
from tw_rlload._loading.plan import LoadPlan
from tw_rlload._loading.specs import ColumnSpec
from tw_rlload._loading.variables import DataVariables
from tw_rlload._training.order import EpochOrder
from tw_rlload._training.scalars import pack_scalars
from tw_rlload._training.slices import Cut, gather_rows, slice_rows

# [K][C] rows -> operations to run, and M scalars to bring out.
Step: TypeAlias = Callable[
    [list[list[tf.Tensor]]], "tuple[Sequence[tf.Operation], Sequence[tf.Tensor]]"
]


class LoopFeeds(NamedTuple):
    """What a loop runs over; tensors, or arrays to be fed.

    Attributes:
      steps: [T] int32, the minibatch of each turn.
      sequences: [T, K, B] int32, the sequences that each tower gathers; B is 0
        where rows are sliced.
      shape: [2] int32, sequences a device and step, and rows a sequence.
      source: int32 scalar, twice the stack's number, plus 1 to gather.
    """

    steps: Any
    sequences: Any
    shape: Any
    source: Any


# (feeds, turn) -> [K][C] rows on the towers' devices.
Pick: TypeAlias = Callable[[LoopFeeds, tf.Tensor], list[list[tf.Tensor]]]


def loop_feeds(plan: LoadPlan, order: EpochOrder, stack: int) -> LoopFeeds:
    """Returns the arrays that make a loop run these epochs.

    Args:
      plan: of the loaded batch.
      order: E epochs of S steps.
      stack: where the batch lies.
    """
    steps = order.steps.reshape(-1)
    sequences = np.zeros((len(steps), plan.num_devices, 0), np.int32)
    if order.sequences is not None:
        sequences = order.sequences.reshape(len(steps), plan.num_devices, -1)
    shape = np.array([plan.sequences_per_device_step, plan.sequence_length], np.int32)
    source = np.int32(2 * stack + (order.sequences is not None))
    return LoopFeeds(steps, sequences, shape, source)


class LoopInputs:
    """Picks all towers' rows of one turn, in one of several ways."""

    def __init__(
        self,
        towers: Sequence[Tower],
        specs: Sequence[ColumnSpec],
        variables: DataVariables,
    ) -> None:
        """Takes K towers, C specs and [stacks][K][C] variables."""
        self._towers, self._specs, self._variables = towers, specs, variables

    def ways(self) -> list[Pick]:
        """Returns what picks the rows, a function for each number of a source."""
        return [
            partial(way, stack)
            for stack in self._variables
            for way in (self._sliced, self._gathered)
        ]

    def _sliced(
        self, stack: list[list[tf.Variable]], feeds: LoopFeeds, turn: tf.Tensor
    ) -> list[list[tf.Tensor]]:
        count, length = tf.unstack(feeds.shape, num=2)
        cut = Cut(feeds.steps[turn] * count, count, length)
        return map_towers(
            lambda tower, columns: slice_rows(columns, self._specs, cut),
            *(self._towers, stack),
        )

    def _gathered(
        self, stack: list[list[tf.Variable]], feeds: LoopFeeds, turn: tf.Tensor
    ) -> list[list[tf.Tensor]]:
        length, sequences = feeds.shape[1], feeds.sequences[turn]
        return map_towers(
            lambda tower, columns: gather_rows(
                columns, self._specs, sequences[tower.index], length
            ),
            *(self._towers, stack),
        )


def loop_over_steps(feeds: LoopFeeds, inputs: LoopInputs, step: Step) -> tf.Tensor:
    """Runs a step on T minibatches, one after the other.

    Each way of picking rows has a loop of its own, and one of them runs: to branch
    in every turn took a tenth of a small model's step.

    Args:
      feeds: tensors.
      inputs: picks the rows.
      step: called once a way, for the loop's body.

    Returns:
      [T, M] float64, the step's scalars, on the CPU.
    """
    loops = [partial(_loop, feeds, pick, step) for pick in inputs.ways()]
    packed: tf.Tensor = tf.switch_case(feeds.source, loops)
    return packed


def _loop(feeds: LoopFeeds, pick: Pick, step: Step) -> tf.Tensor:
    total = tf.size(feeds.steps)

    def turn(i: tf.Tensor, rows: tf.TensorArray) -> tuple[tf.Tensor, tf.TensorArray]:
        operations, scalars = step(pick(feeds, i))
        rows = rows.write(i, pack_scalars(scalars))
        with tf.control_dependencies(operations):
            return i + 1, rows

    rows = tf.TensorArray(tf.float64, total, element_shape=[None])
    _, rows = tf.while_loop(
        lambda i, rows: i < total, turn, (tf.constant(0), rows), parallel_iterations=1
    )
    return rows.stack()
