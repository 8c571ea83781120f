"""A loop over the steps of whole epochs, the same in both modes.

Each iteration picks the towers' rows, by slicing or (if rows are shuffled) gathering,
and passes them to a step. Iterations are strictly sequential, as each trains on the
variables that the last one left. A step's scalars leave the loop as one row of float64,
in which every float up to 64 bits, and every integer below 2**53, is preserved exactly.

Variables are always read whole. TensorFlow returns the value without copying, and
a slice along axis 0 shares its memory where possible; a sparse read instead
(``tf.gather`` of the variable itself) would make every later read a copy.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from tw_core import Tower, map_towers
from tw_rlload._loading.plan import LoadPlan
from tw_rlload._loading.specs import ColumnSpec, DataVariables
from tw_rlload._training.order import EpochOrder

# [K][C] rows -> operations to run, and M scalars to return from the loop.
Step: TypeAlias = Callable[
    [list[list[tf.Tensor]]], "tuple[Sequence[tf.Operation], Sequence[tf.Tensor]]"
]
Packed: TypeAlias = npt.NDArray[np.float64]
"""[steps, M]: the scalars of each step."""


@dataclass(frozen=True, eq=False)
class EpochResult:
    """The losses of E epochs of S steps on K towers.

    Attributes:
      losses: [E, S], the mean over towers, weighted by their rows that are not pads.
      tower_losses: [E, S, K].
      fetches: the last tower's other scalars, [E, S] each, by name.
      towers: the same for every tower; K dictionaries.
      order: the order of the steps; holds the seed.
    """

    losses: npt.NDArray[Any]
    tower_losses: npt.NDArray[Any]
    fetches: dict[str, npt.NDArray[Any]]
    towers: list[dict[str, npt.NDArray[Any]]]
    order: EpochOrder


@dataclass(frozen=True)
class ScalarLayout:
    """The layout of a row: losses, weights if any, others; towers in order."""

    loss_dtype: np.dtype[Any]
    has_weights: bool
    others: tuple[dict[str, np.dtype[Any]], ...]


class LoopFeeds(NamedTuple):
    """The inputs of a loop of T iterations; int32 tensors, or arrays to be fed."""

    steps: Any  # [T], the minibatch of each iteration
    sequences: Any  # [T, K, B], sequences to gather; B is 0 where rows are sliced
    shape: Any  # [2], sequences per device and step, and rows per sequence
    source: Any  # scalar, 2 * buffer, plus 1 to gather


LOOP_SPECS = LoopFeeds(
    steps=tf.TensorSpec([None], tf.int32),
    sequences=tf.TensorSpec([None, None, None], tf.int32),
    shape=tf.TensorSpec([2], tf.int32),
    source=tf.TensorSpec([], tf.int32),
)

# (feeds, iteration) -> [K][C] rows on the towers' devices.
Pick: TypeAlias = Callable[[LoopFeeds, tf.Tensor], list[list[tf.Tensor]]]


def lay_out(
    losses: Sequence[tf.Tensor],
    weights: Sequence[tf.Tensor] | None,
    others: Sequence[Mapping[str, tf.Tensor]],
) -> tuple[ScalarLayout, list[tf.Tensor]]:
    """Lays out the scalars of K towers as a row of M."""
    layout = ScalarLayout(
        loss_dtype=np.dtype(losses[0].dtype.as_numpy_dtype),
        has_weights=bool(weights),
        others=tuple(
            {name: np.dtype(t.dtype.as_numpy_dtype) for name, t in tower.items()}
            for tower in others
        ),
    )
    rest = [tensor for tower in others for tensor in tower.values()]
    return layout, [*losses, *(weights or ()), *rest]


def make_result(packed: Packed, layout: ScalarLayout, order: EpochOrder) -> EpochResult:
    """Unpacks the scalars of all steps, [E * S, M]."""
    rows = packed.reshape(*order.steps.shape, -1)
    num_towers = len(layout.others)
    losses, rest = rows[..., :num_towers], rows[..., num_towers:]
    weights: Any = None
    if layout.has_weights:
        weights, rest = rest[..., :num_towers], rest[..., num_towers:]
    # The loss of a tower with only pads may be NaN.
    counted = losses if weights is None else np.where(weights > 0, losses, 0)
    towers: list[dict[str, npt.NDArray[Any]]] = []
    for others in layout.others:
        columns = np.moveaxis(rest[..., : len(others)], -1, 0)
        rest = rest[..., len(others) :]
        pairs = zip(others.items(), columns, strict=True)
        towers.append({name: column.astype(dtype) for (name, dtype), column in pairs})
    return EpochResult(
        losses=np.average(counted, axis=-1, weights=weights).astype(layout.loss_dtype),
        tower_losses=losses.astype(layout.loss_dtype),
        fetches=towers[-1],
        towers=towers,
        order=order,
    )


def loop_feeds(plan: LoadPlan, order: EpochOrder, buffer: int) -> LoopFeeds:
    """Returns the arrays to feed to a loop over these epochs."""
    steps = order.steps.reshape(-1)
    sequences = np.zeros((len(steps), plan.num_devices, 0), np.int32)
    if order.sequences is not None:
        sequences = order.sequences.reshape(len(steps), plan.num_devices, -1)
    shape = np.array([plan.sequences_per_device_step, plan.sequence_length], np.int32)
    source = np.int32(2 * buffer + (order.sequences is not None))
    return LoopFeeds(steps, sequences, shape, source)


def slice_rows(
    variables: Sequence[tf.Variable],
    specs: Sequence[ColumnSpec],
    first: tf.Tensor,
    count: tf.Tensor,
    length: tf.Tensor,
) -> list[tf.Tensor]:
    """Slices ``count`` sequences of ``length`` rows out of each column of one tower."""

    def consecutive(variable: tf.Variable, spec: ColumnSpec) -> tf.Tensor:
        start, rows = first, count
        if not spec.is_state:
            start, rows = first * length, count * length
        others = len(spec.inner_shape)
        begin = tf.stack([start, *[0] * others])
        size = tf.stack([rows, *[-1] * others])
        return tf.slice(variable.read_value(), begin, size)

    return _of_each(consecutive, variables, specs)


def make_picks(
    towers: Sequence[Tower], specs: Sequence[ColumnSpec], variables: DataVariables
) -> list[Pick]:
    """Makes functions, one per ``source``, that pick the rows of an iteration."""

    def sliced(
        columns: list[list[tf.Variable]], feeds: LoopFeeds, turn: tf.Tensor
    ) -> list[list[tf.Tensor]]:
        count, length = tf.unstack(feeds.shape, num=2)
        cut = (feeds.steps[turn] * count, count, length)
        return map_towers(
            lambda _, mine: slice_rows(mine, specs, *cut), towers, columns
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

    Each way of picking rows has its own loop, and only one runs: branching in every
    iteration took a tenth of a small model's step.
    """
    loops = [partial(_loop, feeds, pick, step) for pick in picks]
    packed: tf.Tensor = tf.switch_case(feeds.source, loops)
    return packed


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


def _of_each(
    take: Callable[[tf.Variable, ColumnSpec], tf.Tensor],
    variables: Sequence[tf.Variable],
    specs: Sequence[ColumnSpec],
) -> list[tf.Tensor]:
    rows = [take(v, spec) for v, spec in zip(variables, specs, strict=True)]
    for tensor, spec in zip(rows, specs, strict=True):
        tensor.set_shape([None, *spec.inner_shape])
    return rows
