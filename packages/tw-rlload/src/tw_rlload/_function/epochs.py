"""Trains whole epochs of a ``DeviceBatch`` in one call of a ``tf.function``."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf

from tw_core.checks import check_function
from tw_reduce import Reducer
from tw_rlload._check_mode import check_eager
from tw_rlload._check_towers import check_clipping, check_reducer
from tw_rlload._function.batch import DeviceBatch
from tw_rlload._function.step import FunctionStep, LossFn
from tw_rlload._loading.buffers import Loaded, step_start
from tw_rlload._training.gradients import default_reducer
from tw_rlload._training.loop import LoopFeeds, loop_feeds, loop_over_steps
from tw_rlload._training.order import EpochOrder, Shuffle, epoch_order
from tw_rlload._training.progress import Packed, run_with_progress
from tw_rlload._training.result import EpochResult, make_result
from tw_rlload._training.scalars import ScalarLayout, lay_out

_NAME = "EpochFunction"
_SIGNATURE = LoopFeeds(
    steps=tf.TensorSpec([None], tf.int32),
    sequences=tf.TensorSpec([None, None, None], tf.int32),
    shape=tf.TensorSpec([2], tf.int32),
    source=tf.TensorSpec([], tf.int32),
)


class EpochFunction:
    """Trains models on a ``DeviceBatch``: a step a call, or whole epochs."""

    def __init__(
        self,
        batch: DeviceBatch,
        loss_fn: LossFn,
        models: Sequence[Any],
        optimizers: Sequence[Any],
        *,
        reducer: Reducer | None = None,
        grad_norm_clipping: float | None = None,
    ) -> None:
        """Takes what to train; traces when first called, once.

        Args:
          batch: where the rows are.
          loss_fn: ``loss_fn(model, inputs)``, with ``tail="pad"``
            ``loss_fn(model, inputs, weights)``; ``inputs`` are a tower's rows of
            a step by column name, ``weights`` [rows] float32. Returns a scalar
            loss, or it and a dictionary of other scalars. Not converted by
            AutoGraph; decorate it with ``tf.function`` where it needs that.
          models: one a tower, or a single one that all share; anything with
            ``trainable_variables``.
          optimizers: as many as models; Keras or v1 optimizers, or anything
            with ``apply_gradients(pairs)``.
          reducer: [K][N] gradients to [K][N] means.
          grad_norm_clipping: bound of the averaged gradients' global norm; None
            or 0 for none.

        Raises:
          ValueError: another number of models or optimizers, no variables, or
            variables that two models share.
          TypeError: something of another kind than said above.
          RuntimeError: in a graph or a ``tf.function``.
        """
        check_eager("makes the optimizers' variables", caller=_NAME)
        if not isinstance(batch, DeviceBatch):
            raise TypeError(
                f"{_NAME}: batch must be a DeviceBatch; got {type(batch).__name__}."
            )
        check_function(_NAME, loss_fn=loss_fn)
        check_reducer(reducer, caller=_NAME)
        self._batch = batch
        self._clip = check_clipping(grad_norm_clipping, caller=_NAME)
        self._reducer = reducer or default_reducer([t.device for t in batch.towers])
        self._step = FunctionStep(
            batch.towers, batch.specs, loss_fn, models, optimizers
        )
        self._layout: ScalarLayout | None = None
        self._loop = tf.function(
            self._trace, input_signature=[_SIGNATURE], autograph=False
        )

    def optimize(self, batch_index: int) -> dict[str, Any]:
        """Trains on one minibatch.

        Args:
          batch_index: where it starts, in rows of a device: one of
            ``report.batch_offsets``.

        Returns:
          ``"loss"``, the mean over towers; the last tower's other scalars under
          their names; and ``"towers"``, a dictionary of all for each tower.

        Raises:
          RuntimeError: nothing is loaded, another call has not returned, or in a
            graph or a ``tf.function``.
          IndexError: another index than those.
        """
        check_eager("gives arrays", caller="optimize")
        with self._batch._stacks.training(self, caller="optimize") as loaded:
            first = step_start(loaded, batch_index)
            step = first // loaded.plan.sequences_per_device_step
            order = EpochOrder(None, None, np.full((1, 1), step, np.int32), None)
            packed = self._run(loaded, order)
        result = self._result(packed, order)
        towers = [
            {"loss": loss, **{name: value[0, 0] for name, value in others.items()}}
            for loss, others in zip(
                result.tower_losses[0, 0], result.towers, strict=True
            )
        ]
        return {**towers[-1], "loss": result.losses[0, 0], "towers": towers}

    def run_epochs(
        self,
        num_epochs: int,
        shuffle: Shuffle | None = None,
        *,
        seed: int | None = None,
        progress: bool = False,
    ) -> EpochResult:
        """Trains on the whole batch several times, in one call.

        Args:
          num_epochs: passes over the batch, at least 1.
          shuffle: None for the order of loading; ``"minibatches"`` permutes
            whole steps; ``"rows"`` permutes rows (sequences, with states) within
            each device.
          seed: of the order; None draws one.
          progress: shows a bar, at one call an epoch; needs tqdm.

        Returns:
          The losses and other scalars of each step, and the order.

        Raises:
          RuntimeError: nothing is loaded, another call has not returned, or in a
            graph or a ``tf.function``.
          ValueError: a bad argument.
        """
        check_eager("gives arrays", caller="run_epochs")
        with self._batch._stacks.training(self, caller="run_epochs") as loaded:
            order = epoch_order(
                loaded.plan, num_epochs, shuffle, seed=seed, caller="run_epochs"
            )
            run = partial(self._run, loaded)
            packed = run_with_progress(run, order, progress=progress)
        return self._result(packed, order)

    def _run(self, loaded: Loaded, order: EpochOrder) -> Packed:
        arrays = loop_feeds(loaded.plan, order, loaded.stack)
        with tf.device("/cpu:0"):
            feeds = LoopFeeds(*(tf.constant(array) for array in arrays))
        packed: Packed = self._loop(feeds).numpy()
        return packed

    def _trace(self, feeds: LoopFeeds) -> tf.Tensor:
        with tf.device("/cpu:0"):
            # A function, so that several loops take one trace of the step.
            train = tf.function(self._train, autograph=False)
            # A tf.function orders what changes variables by itself.
            return loop_over_steps(
                feeds, self._batch._inputs, lambda rows: ([], train(rows))
            )

    def _train(self, rows: list[list[tf.Tensor]]) -> list[tf.Tensor]:
        outputs = self._step.losses(rows)
        self._step.apply(outputs, reducer=self._reducer, grad_norm_clipping=self._clip)
        weights = [output.weight for output in outputs if output.weight is not None]
        self._layout, scalars = lay_out(
            [output.loss for output in outputs],
            weights or None,
            [output.others for output in outputs],
        )
        return scalars

    def _result(self, packed: Packed, order: EpochOrder) -> EpochResult:
        layout = self._layout
        if layout is None:
            raise RuntimeError("EpochFunction: the step was not traced.")
        return make_result(packed, layout, order)
