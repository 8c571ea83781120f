"""RLlib's ``LocalSyncParallelOptimizer``, for session graphs.

The class puts the parts together: variables and their loading, a step that
slices them, and a loop over steps.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import tensorflow as tf

from tw_core import towers
from tw_core.internal import (
    check_function,
    check_list,
    check_optimizer,
    check_session_graph,
)
from tw_reduce import Reducer, StatefulReducer
from tw_rlload._loading.buffers import Buffers
from tw_rlload._loading.columns import Columns
from tw_rlload._loading.plan import LoadReport, Remainder, first_sequence
from tw_rlload._loading.specs import specs_of_placeholders
from tw_rlload._session.epochs import SessionCalls, build_epochs, session_writer
from tw_rlload._session.step import SessionStep
from tw_rlload._training.gradients import ApplyFn, read_update
from tw_rlload._training.loop import EpochResult, Packed, make_picks, make_result
from tw_rlload._training.order import (
    EpochOrder,
    Shuffle,
    epoch_order,
    run_with_progress,
)

_INSTEAD = (
    "Make it inside `with tf.Graph().as_default():`, outside of tf.cond, "
    "tf.while_loop and tf.function, and choose in Python which step to run. In "
    "TensorFlow 2 use tw_rlload.DeviceBatch and tw_rlload.EpochFunction."
)


class LocalSyncParallelOptimizer:
    """Loads a batch onto the devices once and trains on slices of it there.

    Attributes:
      optimizer: as given.
      devices: as given.
      max_per_device_batch_size: as given.
      loss_inputs: all placeholders, states last.
      build_graph: as given.

    >>> import numpy as np
    >>> import tensorflow as tf
    >>> v1 = tf.compat.v1
    >>> class Policy:
    ...     def __init__(self, inputs):
    ...         w = v1.get_variable("w", initializer=tf.zeros([2]))
    ...         self.loss = tf.reduce_mean(tf.square(inputs[0] - w))
    ...
    ...     def gradients(self, optimizer):
    ...         return optimizer.compute_gradients(self.loss)
    >>> with tf.Graph().as_default(), v1.Session() as sess:
    ...     x = v1.placeholder(tf.float32, [None, 2], "x")
    ...     descent = v1.train.GradientDescentOptimizer(1.0)
    ...     trainer = LocalSyncParallelOptimizer(
    ...         descent, ["/cpu:0"], [x], [], 4, Policy
    ...     )
    ...     sess.run(v1.global_variables_initializer())
    ...     rows = trainer.load_data(sess, [np.ones([8, 2], np.float32)], [])
    ...     print(trainer.run_epochs(sess, 2).losses)
    [[1. 0.]
     [0. 0.]]
    """

    def __init__(
        self,
        optimizer: Any,
        devices: Sequence[int | str],
        input_placeholders: Sequence[tf.Tensor],
        rnn_inputs: Sequence[tf.Tensor],
        max_per_device_batch_size: int,
        build_graph: Callable[..., Any],
        grad_norm_clipping: float | None = None,
        *,
        reducer: Reducer | StatefulReducer | None = None,
        remainder: Remainder = "drop",
        check_finite: bool = False,
        num_buffers: int = 1,
        apply_fn: ApplyFn | None = None,
        sparse_gradients: bool = False,
    ) -> None:
        """Builds the towers in the default graph.

        Args:
          optimizer: a v1 optimizer, or an object with its ``apply_gradients``.
          devices: K different device strings; an int k means ``/gpu:k``.
          input_placeholders: one per column, [rows, ...].
          rnn_inputs: one per state, [sequences, ...]; may be empty.
          max_per_device_batch_size: maximum number of rows per device and step.
          build_graph: takes the list of inputs (with ``remainder="pad"`` also the
            [rows] float32 weights) and returns an object with
            ``gradients(optimizer)``, which may also have, like RLlib's policies,
            ``loss`` or ``_loss``, a scalar that ``run_epochs`` reports;
            ``extra_compute_grad_feed_dict()``; and
            ``_get_grad_and_stats_fetches()`` or ``extra_compute_grad_fetches()``.
            Called for the placeholders themselves first, then once per tower.
          grad_norm_clipping: bound of the averaged gradients' global norm; None
            or 0 for no bound.
          reducer: maps [K][N] gradients to [K][N] sums, as those of ``tw_reduce`` do;
            None for ``tw_reduce.all_reduce`` of the towers' devices. The sums are
            divided by K here, or, with pads, by the number of rows that are not pads.
          remainder: how to treat rows that do not fill a step; see ``plan_load``.
          check_finite: whether loads refuse NaN and infinity.
          num_buffers: 2 holds two batches, so that one can load while one trains.
          apply_fn: if None, the optimizer updates variables that the towers share.
            Otherwise every tower has its own, those of tower k >= 1 local and under
            ``tower<k>/``, and ``apply_fn(towers, grads, variables, optimizer)``
            returns the op that applies the averaged and clipped [K][N] gradients to
            the [K][N] variables, such as ``tw_builders.apply_at_owners``; a variable
            without a gradient in any tower has None. After the initialisers, copy
            tower 0's values to the other towers.
          sparse_gradients: whether gradients of embeddings stay sparse, so that
            momentum, RMSprop and the like may leave rows unchanged that a step does not
            look up. By default they are made dense, as in RLlib, and every row is
            updated.

        Raises:
          RuntimeError: outside a session graph.
          ValueError, TypeError: repeated or unknown devices, placeholders of
            unknown rank, a Keras optimizer, a reducer that averages, invalid
            options, or towers that do not match.
        """
        check_session_graph(
            "LocalSyncParallelOptimizer", instead=_INSTEAD, in_bodies=False
        )
        check_list(devices=devices, of="ints and device strings")
        made = towers(devices)
        check_optimizer(optimizer)
        check_function(build_graph=build_graph)
        update = read_update(
            *(made, reducer, grad_norm_clipping, apply_fn, sparse_gradients)
        )
        specs = specs_of_placeholders(input_placeholders, rnn_inputs)
        self._buffers = Buffers(
            *("LocalSyncParallelOptimizer", made, specs),
            max_per_device_batch_size=max_per_device_batch_size,
            remainder=remainder,
            check_finite=check_finite,
            num_buffers=num_buffers,
        )
        self.optimizer, self.devices = optimizer, devices
        self.max_per_device_batch_size = max_per_device_batch_size
        self.loss_inputs = [*input_placeholders, *rnn_inputs]
        self.build_graph = build_graph
        self._calls = SessionCalls(tf.compat.v1.get_default_graph())
        rows = (made, self._buffers.specs, self._buffers.variables)
        self._bind_writer = session_writer(made, self._buffers.variables, self._calls)
        self._step = SessionStep(
            *(*rows, self.loss_inputs, build_graph, optimizer, update)
        )
        self._epochs = build_epochs(self._step, make_picks(*rows))

    @property
    def report(self) -> LoadReport | Any:
        """The report of the last load; None where nothing is loaded."""
        return self._buffers.report

    @property
    def num_tuples_loaded(self) -> int:
        """Rows on all devices together; 0 where nothing is loaded."""
        report = self.report
        return report.rows_per_device * report.num_devices if report else 0

    def load_data(
        self,
        sess: Any,
        inputs: Columns,
        state_inputs: Columns,
        *,
        timeout_s: float | None = 300.0,
    ) -> int:
        """Replaces the batch on the devices.

        Args:
          sess: session.
          inputs: a column per placeholder, [rows, ...]: arrays, eager tensors,
            or lists of such fragments; or a dictionary by placeholder name.
          state_inputs: the same for the states, [sequences, ...].
          timeout_s: longest load, in seconds; None for no bound.

        Returns:
          Rows on each device: the original's tuples per device.

        Raises:
          DeadlineError: a TimeoutError; the load takes longer, and continues in a
            thread: ``use_next`` waits for it. The error and its ``report`` name the
            tower and column being written.
          ValueError, TypeError: the batch or the session was refused and nothing
            was written; there is nothing to train on until the next load.
          RuntimeError: another thread is loading, or trains on the current batch, which
            stays.
        """
        bind = partial(self._bind_writer, sess)
        report = self._buffers.load(
            *("load_data", inputs, state_inputs, bind), timeout_s=timeout_s
        )
        return report.rows_per_device

    def load_next(self, sess: Any, inputs: Columns, state_inputs: Columns) -> None:
        """Loads the next batch in a thread while the current one trains.

        The batch is checked before this returns; its arrays must not change before
        ``use_next``. Needs ``num_buffers=2``, twice the batch's memory.

        Args:
          sess: session.
          inputs: as for ``load_data``.
          state_inputs: as for ``load_data``.

        Raises:
          RuntimeError: there is only one buffer, a load is already under way, or
            another thread still trains on the previous batch.
          ValueError, TypeError: the batch was refused; the current one stays.
        """
        writer = self._bind_writer(sess)
        self._buffers.load_next(inputs, state_inputs, writer)

    def use_next(self, timeout_s: float | None = 300.0) -> int:
        """Waits for ``load_next`` and makes its batch the current one.

        Args:
          timeout_s: longest wait, in seconds; None for no bound.

        Returns:
          Rows on each device.

        Raises:
          DeadlineError: a TimeoutError; the load takes longer: call again.
          RuntimeError: no load is under way, or it failed.
        """
        return self._buffers.use_next(timeout_s).rows_per_device

    def optimize(self, sess: Any, batch_index: int) -> dict[str, Any]:
        """Trains on one minibatch.

        Args:
          sess: session.
          batch_index: where the minibatch starts, in rows of a device: one of
            ``report.batch_offsets``.

        Returns:
          ``{"train": None}``, the last tower's fetches under their own keys, and
          ``"towers"``, the fetches of each tower.

        Raises:
          RuntimeError: nothing is loaded, or another call has not returned.
          IndexError: ``batch_index`` is not one of those.
          TypeError, ValueError: ``batch_index`` is not a whole number, or ``sess``
            is not a session of the graph.
        """
        with self._buffers.training(self, "optimize") as loaded:
            first = first_sequence(loaded.report, batch_index)
            request = self._step.request(loaded.report, loaded.buffer, first)
            fetched: dict[str, Any] = self._calls.run(sess, "step", *request)
        return fetched

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
          seed: seed of the order; None draws one.
          progress: whether to show a bar, with one session call per epoch; needs tqdm.

        Returns:
          The losses and other scalars of each step, and the order.

        Raises:
          RuntimeError: nothing is loaded, the towers have no scalar losses, or another
            call has not returned.
          ValueError, TypeError: an invalid argument.
        """
        with self._buffers.training(self, "run_epochs") as loaded:
            plan, epochs = loaded.report, self._epochs
            order = epoch_order(plan, num_epochs, shuffle, seed=seed)
            if epochs is None:
                raise RuntimeError(
                    "The objects that build_graph returns must have a scalar tensor "
                    "`loss` (or `_loss`), which run_epochs reports; they have none."
                )

            def run(part: EpochOrder) -> Packed:
                request = epochs.request(plan, loaded.buffer, part)
                packed: Packed = self._calls.run(sess, "epochs", *request)
                return packed

            packed = run_with_progress(run, order, progress=progress)
        return make_result(packed, epochs.layout, order)

    def get_common_loss(self) -> Any:
        """Returns the result of ``build_graph`` for the placeholders themselves."""
        return self._step.common_loss

    def get_device_losses(self) -> list[Any]:
        """Returns the result of ``build_graph`` for each tower."""
        return list(self._step.losses)
