"""A batch on the towers' devices, for ``tf.function``."""

from collections.abc import Mapping, Sequence

import tensorflow as tf

from tw_core import Tower
from tw_core.checks import check_flag
from tw_rlload._check_mode import check_eager
from tw_rlload._check_towers import check_distinct, check_towers
from tw_rlload._loading.buffers import Stacks
from tw_rlload._loading.columns import Columns
from tw_rlload._loading.load import LoadOptions
from tw_rlload._loading.plan import Tail, check_options
from tw_rlload._loading.report import LoadReport
from tw_rlload._loading.specs import specs_of_mappings
from tw_rlload._loading.variables import EagerWriter, make_data_variables
from tw_rlload._training.loop import LoopInputs

_NAME = "DeviceBatch"


class DeviceBatch:
    """Holds a batch on the towers' devices, cut into one part a tower.

    An ``EpochFunction`` trains on it.

    Attributes:
      towers: K of them.
      specs: of the variables: columns, states, and weights where pads are.
    """

    def __init__(
        self,
        towers: Sequence[Tower],
        columns: Mapping[str, tf.TensorSpec],
        states: Mapping[str, tf.TensorSpec] | None = None,
        *,
        max_per_device_batch_size: int,
        tail: Tail = "drop",
        check_finite: bool = False,
        stacks: int = 1,
    ) -> None:
        """Makes the variables, with no rows yet.

        Args:
          towers: K towers, no two on one device.
          columns: name -> shape [None, ...] and dtype of what has one row a row.
          states: the same of what has one row a sequence (recurrent models).
          max_per_device_batch_size: rows a device takes in one step, at most.
          tail: what becomes of rows that fill no step; see ``plan_load``.
          check_finite: whether loads refuse NaN and infinity.
          stacks: 2 holds two batches, so that one can load while one trains.

        Raises:
          RuntimeError: inside a graph or a ``tf.function``.
          ValueError, TypeError: no towers, devices repeated or unknown, no column,
            or bad options.
        """
        check_eager("makes variables", caller=_NAME)
        check_towers(towers, caller=_NAME)
        check_options(len(towers), max_per_device_batch_size, tail, caller=_NAME)
        check_distinct(towers, caller=_NAME)
        options = LoadOptions(
            specs=specs_of_mappings(
                columns, {} if states is None else states, caller=_NAME
            ),
            num_devices=len(towers),
            max_per_device_batch_size=max_per_device_batch_size,
            tail=tail,
            check_finite=check_flag(_NAME, check_finite=check_finite),
            stacks=stacks,
        )
        self.towers, self.specs = tuple(towers), options.stored
        self._stacks = Stacks(options, owner=_NAME)
        variables = make_data_variables(self.towers, self.specs, stacks)
        self._writer = EagerWriter(variables)
        self._inputs = LoopInputs(self.towers, self.specs, variables)

    @property
    def report(self) -> LoadReport | None:
        """What the last load did; None where nothing is loaded."""
        loaded = self._stacks.loaded
        return loaded.report if loaded else None

    def load(self, columns: Columns, states: Columns = ()) -> LoadReport:
        """Replaces the batch on the devices.

        Args:
          columns: by name, or in the order of the specs: arrays, tensors, or
            lists of such fragments; [rows, ...].
          states: the same, [sequences, ...].

        Returns:
          What became of the rows.

        Raises:
          ValueError, TypeError: the batch was refused and nothing was touched;
            there is nothing to train on until the next load.
          RuntimeError: another thread loads, or trains on the current batch, which
            stays; or in a graph or a ``tf.function``.
        """
        check_eager("copies rows", caller="load")
        return self._stacks.load(
            columns, states, lambda: self._writer, caller="load"
        ).report

    def load_next(self, columns: Columns, states: Columns = ()) -> None:
        """Loads the next batch in a thread while the current one trains.

        It is checked before this returns; its arrays must not change before
        ``use_next``. Needs ``stacks=2``, twice the batch's memory.

        Args:
          columns: as for ``load``.
          states: as for ``load``.

        Raises:
          RuntimeError: one stack only, a load is under way already, another
            thread still trains on the batch before the current one, or in a graph
            or a ``tf.function``.
          ValueError, TypeError: the batch was refused; the current one stays.
        """
        check_eager("copies rows", caller="load_next")
        self._stacks.load_next(columns, states, self._writer, caller="load_next")

    def use_next(self, timeout_seconds: float = 300.0) -> LoadReport:
        """Waits for ``load_next`` and makes its batch the current one.

        Args:
          timeout_seconds: how long to wait, at most.

        Returns:
          What became of its rows.

        Raises:
          TimeoutError: it takes longer; call again.
          RuntimeError: no load is under way, or it failed.
        """
        return self._stacks.use_next(timeout_seconds, caller="use_next").report
