"""Trains whole epochs of a ``DeviceBatch`` in one call of a ``tf.function``."""

from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import Any, Literal

import numpy as np
import tensorflow as tf

from tw_core.internal import check_flag, check_function
from tw_reduce import Reducer, ReducerState, StatefulReducer
from tw_rlload._function.batch import DeviceBatch, buffers_of, check_eager
from tw_rlload._function.step import FunctionStep
from tw_rlload._loading.buffers import Loaded
from tw_rlload._loading.plan import first_sequence
from tw_rlload._training.gradients import ApplyFn, read_update
from tw_rlload._training.loop import (
    LOOP_SPECS,
    EpochResult,
    LoopFeeds,
    Packed,
    ScalarLayout,
    lay_out,
    loop_feeds,
    loop_over_steps,
    make_picks,
    make_result,
)
from tw_rlload._training.order import (
    EpochOrder,
    Shuffle,
    epoch_order,
    run_with_progress,
)


class EpochFunction:
    """Trains models on a ``DeviceBatch``: a step per call, or whole epochs."""

    def __init__(
        self,
        batch: DeviceBatch,
        loss_fn: Callable[..., Any],
        models: Sequence[Any],
        optimizers: Sequence[Any],
        *,
        reducer: Reducer | StatefulReducer | None = None,
        grad_norm_clipping: float | None = None,
        apply_fn: ApplyFn | None = None,
        sparse_gradients: bool = False,
        trace: Literal["once", "each"] = "once",
        jit_compile: bool = False,
    ) -> None:
        """Checks models and optimizers; traces once, at the first call.

        Args:
          batch: holds the rows.
          loss_fn: ``loss_fn(model, inputs)``, with ``remainder="pad"``
            ``loss_fn(model, inputs, weights)``; ``inputs`` are a tower's rows of
            a step by column name, ``weights`` [rows] float32. Returns a scalar
            loss, or a tuple of that and a dictionary of other scalars. Not converted
            by AutoGraph; decorate it with ``tf.function`` where it needs that.
          models: one per tower, or a single one that all share; anything with
            ``trainable_variables``.
          optimizers: as many as models; Keras or v1 optimizers, or anything
            with ``apply_gradients(pairs)``. With ``apply_fn`` a single one.
          reducer: maps [K][N] gradients to [K][N] sums, as those of ``tw_reduce`` do;
            None for ``tw_reduce.all_reduce`` of the towers' devices. The sums are
            divided by K here, or, with pads, by the number of rows that are not pads.
            The memory of a reducer that has one is in ``reducer_state``.
          grad_norm_clipping: bound of the averaged gradients' global norm; None
            or 0 for no bound.
          apply_fn: ``apply_fn(towers, grads, variables, optimizer)`` applies the
            averaged and clipped [K][N] gradients to the [K][N] variables of K models
            with the one optimizer, such as ``tw_builders.apply_at_owners``; a
            variable without a gradient in any tower has None. By default every
            optimizer applies to its model.
          sparse_gradients: whether gradients of embeddings stay sparse, so that
            momentum, RMSprop and the like may leave rows unchanged that a step does not
            look up. By default they are made dense, as in
            ``LocalSyncParallelOptimizer``, and every row is updated.
          trace: ``"once"``: ``loss_fn`` is traced for tower 0, and called for every
            tower with its own model; ``"each"``: it is traced for every tower, for
            models whose Python code differs. As for ``tw_core.map_towers``.
          jit_compile: whether XLA compiles each tower's loss and gradients, and each
            optimizer's clipping and update, once per number of rows; an ``apply_fn``
            is not compiled. Needs ``trace="once"``.

        Raises:
          ValueError: a ``trace`` that is unknown or does not go with ``jit_compile``, a
            wrong number of models or optimizers, no variables, a reducer that averages,
            or, with ``apply_fn``, a Keras optimizer that has not been built. Variables
            that two models share are refused at the first call.
          TypeError: an argument has the wrong type.
          RuntimeError: in a graph or a ``tf.function``.
        """
        check_eager("EpochFunction makes the optimizers' variables")
        if not isinstance(batch, DeviceBatch):
            raise TypeError(f"batch must be a DeviceBatch; got {type(batch).__name__}.")
        check_function(loss_fn=loss_fn)
        if trace not in ("once", "each"):
            raise ValueError(f"trace must be 'once' or 'each'; got {trace!r}.")
        if check_flag(jit_compile=jit_compile) and trace == "each":
            raise ValueError(
                "jit_compile=True compiles one trace for all towers; use trace='once', "
                "or have loss_fn call tf.function(..., jit_compile=True)."
            )
        update = read_update(
            *(batch.towers, reducer, grad_norm_clipping, apply_fn), sparse_gradients
        )
        self._memory = update.memory
        self._step = FunctionStep(
            *(batch.specs, loss_fn, models, optimizers),
            update,
            trace=trace,
            jit_compile=jit_compile,
        )
        self._buffers = buffers_of(batch)
        variables = self._buffers.variables
        self._picks = make_picks(batch.towers, batch.specs, variables)

    @property
    def reducer_state(self) -> ReducerState | None:
        """The state of a reducer with memory, for ``tf.train.Checkpoint``."""
        return None if self._memory is None else self._memory.state

    def optimize(self, batch_index: int) -> dict[str, Any]:
        """Trains on one minibatch.

        Args:
          batch_index: where the minibatch starts, in rows of a device: one of
            ``report.batch_offsets``.

        Returns:
          ``"loss"``, the mean over towers; the last tower's other scalars under
          their names; and ``"towers"``, a dictionary of all scalars for each tower.

        Raises:
          RuntimeError: nothing is loaded, another call has not returned, or in a
            graph or a ``tf.function``.
          IndexError: ``batch_index`` is not one of those.
        """
        check_eager("EpochFunction returns arrays")
        with self._buffers.training(self, "optimize") as loaded:
            first = first_sequence(loaded.report, batch_index)
            step = first // loaded.report.sequences_per_device_step
            order = EpochOrder(None, None, np.full((1, 1), step, np.int32), None)
            loop, layout = self._traced
            result = make_result(_run(loop, loaded, order), layout, order)
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
          seed: seed of the order; None draws one.
          progress: whether to show a bar, with one call per epoch; needs tqdm.

        Returns:
          The losses and other scalars of each step, and the order.

        Raises:
          RuntimeError: nothing is loaded, another call has not returned, or in a
            graph or a ``tf.function``.
          ValueError, TypeError: an invalid argument.
        """
        check_eager("EpochFunction returns arrays")
        with self._buffers.training(self, "run_epochs") as loaded:
            order = epoch_order(loaded.report, num_epochs, shuffle, seed=seed)
            loop, layout = self._traced
            run = partial(_run, loop, loaded)
            packed = run_with_progress(run, order, progress=progress)
        return make_result(packed, layout, order)

    @cached_property
    def _traced(self) -> tuple[Callable[..., tf.Tensor], ScalarLayout]:
        """The loop over steps and the layout of its scalars, made at the first call."""
        layouts, picks = [], self._picks

        def _train(rows: list[list[tf.Tensor]]) -> list[tf.Tensor]:
            outputs = self._step(rows)
            layout, scalars = lay_out(
                [output.loss for output in outputs],
                [output.weight for output in outputs if output.weight is not None],
                [output.others for output in outputs],
            )
            layouts.append(layout)
            return scalars

        def loop(feeds: LoopFeeds) -> tf.Tensor:
            with tf.device("/cpu:0"):
                # A function, so that several loops share one trace of the step.
                train = tf.function(_train, autograph=False)
                # No operations to wait for: a tf.function orders updates by itself.
                return loop_over_steps(feeds, picks, lambda rows: ([], train(rows)))

        made = tf.function(loop, input_signature=[LOOP_SPECS], autograph=False)
        return made.get_concrete_function(), layouts[0]


def _run(loop: Callable[..., tf.Tensor], loaded: Loaded, order: EpochOrder) -> Packed:
    arrays = loop_feeds(loaded.report, order, loaded.buffer)
    with tf.device("/cpu:0"):
        feeds = LoopFeeds(*(tf.constant(array) for array in arrays))
    packed: Packed = loop(feeds).numpy()
    return packed
