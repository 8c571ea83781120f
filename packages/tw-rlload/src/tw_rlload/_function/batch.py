"""A batch on the towers' devices, for ``tf.function``."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf

from tw_core import Tower
from tw_core.internal import check_towers
from tw_rlload._loading.buffers import Buffers
from tw_rlload._loading.columns import Columns
from tw_rlload._loading.plan import LoadReport, Remainder
from tw_rlload._loading.specs import Array, DataVariables, specs_of_mappings
from tw_rlload._loading.staging import Writer, no_rows


class DeviceBatch:
    """Holds a batch on the towers' devices, cut into one part per tower.

    An ``EpochFunction`` trains on it.

    Attributes:
      towers: K towers.
      specs: specs of the columns, the states, and row weights if batches are padded.
    """

    def __init__(
        self,
        towers: Sequence[Tower],
        columns: Mapping[str, tf.TensorSpec],
        states: Mapping[str, tf.TensorSpec] | None = None,
        *,
        max_per_device_batch_size: int,
        remainder: Remainder = "drop",
        check_finite: bool = False,
        num_buffers: int = 1,
    ) -> None:
        """Makes the variables, with no rows yet.

        Args:
          towers: K towers, no two on one device.
          columns: name -> shape [None, ...] and dtype of data with one entry per
            row.
          states: the same for data with one entry per sequence (recurrent models).
          max_per_device_batch_size: maximum number of rows per device and step.
          remainder: how to treat rows that do not fill a step; see ``plan_load``.
          check_finite: whether loads refuse NaN and infinity.
          num_buffers: 2 holds two batches, so that one can load while one trains.

        Raises:
          RuntimeError: inside a graph or a ``tf.function``.
          ValueError, TypeError: no towers, repeated or unknown devices, no columns,
            or invalid options.
        """
        check_eager("DeviceBatch makes variables")
        check_towers(towers)
        specs = specs_of_mappings(columns, {} if states is None else states)
        self._buffers = Buffers(
            *("DeviceBatch", towers, specs),
            max_per_device_batch_size=max_per_device_batch_size,
            remainder=remainder,
            check_finite=check_finite,
            num_buffers=num_buffers,
        )
        self.towers, self.specs = tuple(towers), self._buffers.specs
        self._writer = _eager_writer(self._buffers.variables)

    @property
    def report(self) -> LoadReport | Any:
        """The report of the last load; None where nothing is loaded."""
        return self._buffers.report

    def load(
        self,
        columns: Columns,
        states: Columns = (),
        *,
        timeout_s: float | None = 300.0,
    ) -> LoadReport:
        """Replaces the batch on the devices.

        Args:
          columns: by name, or in the order of the specs: arrays, tensors, or
            lists of such fragments; [rows, ...].
          states: the same, [sequences, ...].
          timeout_s: longest load, in seconds; None for no bound.

        Returns:
          The plan of the batch and its size in bytes.

        Raises:
          DeadlineError: a TimeoutError; the load takes longer, and continues in a
            thread: ``use_next`` waits for it. The error and its ``report`` name the
            tower and column being written.
          ValueError, TypeError: the batch was refused and nothing was written;
            there is nothing to train on until the next load.
          RuntimeError: another thread is loading, or trains on the current batch, which
            stays; or in a graph or a ``tf.function``.
        """
        check_eager("DeviceBatch.load copies rows")
        return self._buffers.load(
            *("load", columns, states, lambda: self._writer), timeout_s=timeout_s
        )

    def load_next(self, columns: Columns, states: Columns = ()) -> None:
        """Loads the next batch in a thread while the current one trains.

        The batch is checked before this returns; its arrays must not change before
        ``use_next``. Needs ``num_buffers=2``, twice the batch's memory.

        Args:
          columns: as for ``load``.
          states: as for ``load``.

        Raises:
          RuntimeError: there is only one buffer, a load is already under way, another
            thread still trains on the previous batch, or in a graph or a
            ``tf.function``.
          ValueError, TypeError: the batch was refused; the current one stays.
        """
        check_eager("DeviceBatch.load_next copies rows")
        self._buffers.load_next(columns, states, self._writer)

    def use_next(self, timeout_s: float | None = 300.0) -> LoadReport:
        """Waits for ``load_next`` and makes its batch the current one.

        Args:
          timeout_s: longest wait, in seconds; None for no bound.

        Returns:
          The plan of the batch and its size in bytes.

        Raises:
          DeadlineError: a TimeoutError; the load takes longer: call again.
          RuntimeError: no load is under way, or it failed.
        """
        return self._buffers.use_next(timeout_s)


def buffers_of(batch: DeviceBatch) -> Buffers:
    """Returns the buffers with a batch's rows, which guard them during training."""
    return batch._buffers


def check_eager(why: str) -> None:
    """Refuses graphs and ``tf.function`` bodies, for the reason ``why``."""
    if not tf.executing_eagerly():
        raise RuntimeError(
            f"{why}; use it outside of graphs and tf.function. In a session graph use "
            "tw_rlload.LocalSyncParallelOptimizer."
        )


def _eager_writer(variables: DataVariables) -> Writer:
    def assign(variable: tf.Variable, value: Callable[[], tf.Tensor]) -> None:
        with tf.device(variable.device):
            variable.assign(value(), read_value=False)

    def empty(buffer: int) -> None:
        for column in variables[buffer]:
            for variable in column:
                assign(variable, partial(no_rows, variable))

    def write(buffer: int, tower: int, column: int, rows: Array) -> None:
        assign(variables[buffer][tower][column], partial(_adopt, rows))

    return Writer(empty, write)


def _adopt(rows: Any) -> tf.Tensor:
    # tf.convert_to_tensor copies, into newly allocated memory each time. DLPack does
    # not copy, but supports neither bools nor the floats of ml_dtypes.
    if rows.dtype.kind in "iuf" and rows.size:
        with tf.device("/cpu:0"):
            return tf.experimental.dlpack.from_dlpack(rows.__dlpack__())
    return tf.convert_to_tensor(np.asarray(rows))
