"""RLlib's ``LocalSyncParallelOptimizer``, for session graphs.

The class puts the parts together: variables and their loading, a step that
slices them, and a loop over steps.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import tensorflow as tf

from tw_core import Tower, towers
from tw_core.checks import check_flag, check_function, check_list
from tw_reduce import Reducer
from tw_rlload._check_mode import check_session_graph
from tw_rlload._check_towers import (
    check_clipping,
    check_distinct,
    check_reducer,
    check_session_optimizer,
)
from tw_rlload._loading.buffers import Stacks, step_start
from tw_rlload._loading.columns import Columns
from tw_rlload._loading.load import LoadOptions
from tw_rlload._loading.plan import Tail, check_options
from tw_rlload._loading.report import LoadReport
from tw_rlload._loading.specs import specs_of_placeholders
from tw_rlload._loading.variables import SessionWriter, make_data_variables
from tw_rlload._session.calls import SessionCalls
from tw_rlload._session.epochs import build_epochs
from tw_rlload._session.inputs import StepInputs
from tw_rlload._session.step import SessionStep, Update
from tw_rlload._training.gradients import default_reducer
from tw_rlload._training.loop import LoopInputs
from tw_rlload._training.order import Shuffle, epoch_order
from tw_rlload._training.progress import run_with_progress
from tw_rlload._training.result import EpochResult, make_result

_NAME = "LocalSyncParallelOptimizer"


class LocalSyncParallelOptimizer:
    """Loads a batch onto the devices once and trains on slices of it there.

    Attributes:
      optimizer: as given.
      devices: as given.
      max_per_device_batch_size: as given.
      loss_inputs: all placeholders, states last.
      build_graph: as given.
    """

    def __init__(
        self,
        optimizer: Any,
        devices: Sequence[str],
        input_placeholders: Sequence[tf.Tensor],
        rnn_inputs: Sequence[tf.Tensor],
        max_per_device_batch_size: int,
        build_graph: Callable[..., Any],
        grad_norm_clipping: float | None = None,
        *,
        reducer: Reducer | None = None,
        tail: Tail = "drop",
        check_finite: bool = False,
        stacks: int = 1,
    ) -> None:
        """Builds the towers in the default graph.

        Args:
          optimizer: a v1 optimizer, or what has its ``apply_gradients``.
          devices: K device strings, none twice; an int k means ``/gpu:k``.
          input_placeholders: one a column, [rows, ...].
          rnn_inputs: one a state, [sequences, ...]; may be empty.
          max_per_device_batch_size: rows a device takes in one step, at most.
          build_graph: takes the list of inputs (with ``tail="pad"`` also the
            [rows] float32 weights) and returns an object with
            ``gradients(optimizer)``; see ``TowerLoss``. Called for the whole
            placeholders first, then once a tower.
          grad_norm_clipping: bound of the averaged gradients' global norm; None
            or 0 for none.
          reducer: [K][N] gradients to [K][N] means, as ``tw_reduce`` makes them.
          tail: what becomes of rows that fill no step; see ``plan_load``.
          check_finite: whether loads refuse NaN and infinity.
          stacks: 2 holds two batches, so that one can load while one trains.

        Raises:
          RuntimeError: outside of a session graph.
          ValueError, TypeError: devices repeated or unknown, placeholders of
            unknown rank, an optimizer of Keras, bad options, or towers that do not
            match.
        """
        check_session_graph(caller=_NAME)
        self._towers = _towers(devices, max_per_device_batch_size, tail)
        check_session_optimizer(optimizer, caller=_NAME)
        check_function(_NAME, build_graph=build_graph)
        check_reducer(reducer, caller=_NAME)
        clip = check_clipping(grad_norm_clipping, caller=_NAME)
        options = LoadOptions(
            specs=specs_of_placeholders(input_placeholders, rnn_inputs, caller=_NAME),
            num_devices=len(self._towers),
            max_per_device_batch_size=max_per_device_batch_size,
            tail=tail,
            check_finite=check_flag(_NAME, check_finite=check_finite),
            stacks=stacks,
        )
        self.optimizer, self.devices = optimizer, devices
        self.max_per_device_batch_size = max_per_device_batch_size
        self.loss_inputs = [*input_placeholders, *rnn_inputs]
        self.build_graph = build_graph
        reducer = reducer or default_reducer([t.device for t in self._towers])
        self._build(options, Update(optimizer, reducer, clip))

    @property
    def report(self) -> LoadReport | None:
        """What the last load did; None where nothing is loaded."""
        loaded = self._stacks.loaded
        return loaded.report if loaded else None

    @property
    def num_tuples_loaded(self) -> int:
        """Rows on all devices together; 0 where nothing is loaded."""
        report = self.report
        return report.rows_per_device * report.num_devices if report else 0

    def load_data(self, sess: Any, inputs: Columns, state_inputs: Columns) -> int:
        """Replaces the batch on the devices.

        Args:
          sess: session.
          inputs: a column a placeholder, [rows, ...]: arrays, eager tensors,
            or lists of such fragments; or a dictionary by placeholder name.
          state_inputs: the same for the states, [sequences, ...].

        Returns:
          Rows on each device: the original's tuples per device.

        Raises:
          ValueError, TypeError: the batch or the session was refused and nothing
            was touched; there is nothing to train on until the next load.
          RuntimeError: another thread loads, or trains on the current batch, which
            stays.
        """
        bind = partial(self._writer.bind, sess, self._calls, caller="load_data")
        loaded = self._stacks.load(inputs, state_inputs, bind, caller="load_data")
        return loaded.report.rows_per_device

    def load_next(self, sess: Any, inputs: Columns, state_inputs: Columns) -> None:
        """Loads the next batch in a thread while the current one trains.

        It is checked before this returns; its arrays must not change before
        ``use_next``. Needs ``stacks=2``, twice the batch's memory.

        Args:
          sess: session.
          inputs: as for ``load_data``.
          state_inputs: as for ``load_data``.

        Raises:
          RuntimeError: one stack only, a load is under way already, or another
            thread still trains on the batch before the current one.
          ValueError, TypeError: the batch was refused; the current one stays.
        """
        writer = self._writer.bind(sess, self._calls, caller="load_next")
        self._stacks.load_next(inputs, state_inputs, writer, caller="load_next")

    def use_next(self, timeout_seconds: float = 300.0) -> int:
        """Waits for ``load_next`` and makes its batch the current one.

        Args:
          timeout_seconds: how long to wait, at most.

        Returns:
          Rows on each device.

        Raises:
          TimeoutError: it takes longer; call again.
          RuntimeError: no load is under way, or it failed.
        """
        loaded = self._stacks.use_next(timeout_seconds, caller="use_next")
        return loaded.report.rows_per_device

    def optimize(self, sess: Any, batch_index: int) -> dict[str, Any]:
        """Trains on one minibatch.

        Args:
          sess: session.
          batch_index: where it starts, in rows of a device: one of
            ``report.batch_offsets``.

        Returns:
          ``{"train": None}``, the last tower's fetches under their own keys, and
          ``"towers"``, the fetches of each.

        Raises:
          RuntimeError: nothing is loaded, or another call has not returned.
          IndexError: another index than those.
          TypeError, ValueError: ``batch_index`` is no whole number, or ``sess`` no
            session of the graph.
        """
        self._calls.check_session(sess, caller="optimize")
        with self._stacks.training(self, caller="optimize") as loaded:
            first = step_start(loaded, batch_index)
            return self._step.run(self._calls, sess, loaded, first)

    def run_epochs(
        self,
        sess: Any,
        num_epochs: int,
        shuffle: Shuffle | None = None,
        *,
        seed: int | None = None,
        progress: bool = False,
    ) -> EpochResult:
        """Trains on the whole batch several times, in one session call.

        Args:
          sess: session.
          num_epochs: passes over the batch, at least 1.
          shuffle: None for the order of loading; ``"minibatches"`` permutes
            whole steps; ``"rows"`` permutes rows (sequences, with states) within
            each device.
          seed: of the order; None draws one.
          progress: shows a bar, at one session call an epoch; needs tqdm.

        Returns:
          The losses and other scalars of each step, and the order.

        Raises:
          RuntimeError: nothing is loaded, the losses are unknown, or another
            call has not returned.
          ValueError, TypeError: a bad argument.
        """
        self._calls.check_session(sess, caller="run_epochs")
        with self._stacks.training(self, caller="run_epochs") as loaded:
            order = epoch_order(
                loaded.plan, num_epochs, shuffle, seed=seed, caller="run_epochs"
            )
            if self._epochs is None:
                raise RuntimeError(
                    "run_epochs: the objects that build_graph returns must have a "
                    "scalar tensor `loss` (or `_loss`), to report; they have none."
                )
            run = partial(self._epochs.run, self._calls, sess, loaded)
            packed = run_with_progress(run, order, progress=progress)
        return make_result(packed, self._epochs.layout, order)

    def get_common_loss(self) -> Any:
        """Returns what ``build_graph`` made of the whole placeholders."""
        return self._step.common_loss

    def get_device_losses(self) -> list[Any]:
        """Returns what ``build_graph`` made for each tower."""
        return list(self._step.losses)

    def _build(self, options: LoadOptions, update: Update) -> None:
        made, specs = self._towers, options.stored
        self._stacks = Stacks(options, owner=_NAME)
        self._calls = SessionCalls(tf.compat.v1.get_default_graph())
        variables = make_data_variables(made, specs, options.stacks)
        self._writer = SessionWriter(made, variables)
        inputs = StepInputs(made, specs, variables)
        self._step = SessionStep(
            made, inputs, self.loss_inputs, self.build_graph, update
        )
        self._epochs = build_epochs(self._step, LoopInputs(made, specs, variables))


def _towers(devices: Sequence[str], maximum: int, tail: Tail) -> tuple[Tower, ...]:
    check_list(_NAME, devices=devices, of="ints and device strings", empty=True)
    check_options(len(devices), maximum, tail, caller=_NAME)
    try:
        made = towers(devices)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{_NAME}: devices: {error}") from error
    check_distinct(made, caller=_NAME)
    return made
