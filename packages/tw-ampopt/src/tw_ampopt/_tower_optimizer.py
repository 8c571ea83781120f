"""The optimizer for ``tf.function``: the same steps, with all state made beforehand.

A ``tf.function`` that makes variables is traced twice, and its variables are hard to
save. So this class takes the variables when it is made.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Literal

import tensorflow as tf

from tw_ampopt._base import BaseOptimizer
from tw_ampopt._checks.arguments import (
    check_differentiation,
    check_name,
    check_value,
    variables_by_tower,
)
from tw_ampopt._checks.gradients import (
    check_step_and_name,
    gradients_by_tower,
    gradients_of_pairs,
)
from tw_ampopt._loss_scale import LossScale
from tw_ampopt._settings import Reducer, read_settings
from tw_ampopt._update.buffers import RawGradients, nonfinite_flags, to_wide
from tw_ampopt._update.state import SharedState
from tw_ampopt._update.update import Updater
from tw_ampopt._variables import common_device
from tw_ampopt._wrapped.factory import LearningRateLike, OptimizerFactory
from tw_core import Tower, towers
from tw_core.devices import canonical_device
from tw_core.internal import (
    builds_session_graph,
    check_flag,
    check_kind,
    check_text,
    check_towers,
    compiles_with_xla,
    orders_effects,
    tf_variables,
    traces_function,
    traces_tower,
    without_autograph,
)
from tw_core.ranks import RankGroup
from tw_reduce import StatefulReducer
from tw_reduce.reducers import check_weights


class TowerOptimizer(
    BaseOptimizer,
    tf.Module,  # type: ignore[misc] # TensorFlow is untyped
):
    """Scales, accumulates, averages over towers, and skips non-finite updates.

    ``tf.train.Checkpoint`` finds its state: scale, counts, every tower's
    accumulators, and tower 0's slots. Through the optimizer protocol it also works
    wherever a v1 optimizer does; the caller then reduces.

    >>> import tensorflow as tf
    >>> copies = [tf.Variable([4.0]), tf.Variable([4.0])]
    >>> optimizer = TowerOptimizer(
    ...     [[copy] for copy in copies],
    ...     tf_optimizer=tf.compat.v1.train.GradientDescentOptimizer,
    ...     learning_rate=0.25,
    ... )
    >>> bool(optimizer.apply([[tf.constant([8.0])], [tf.constant([4.0])]]))  # applied?
    True
    >>> copies[1].numpy().tolist()
    [2.5]
    """

    def __init__(
        self,
        variables: Sequence[Any],
        *,
        tf_optimizer: str | OptimizerFactory = "tf.train.AdamOptimizer",
        learning_rate: LearningRateLike = 0.001,
        name: str = "Train",
        towers: Sequence[Tower] | None = None,
        accumulation_steps: int | tf.Tensor | tf.Variable | None = None,
        share: "TowerOptimizer | None" = None,
        loss_scale: LossScale | None = None,
        on_nonfinite: Literal["skip_group", "drop_micro_batch"] = "skip_group",
        clip_by_global_norm: float | None = None,
        master_copies: bool = False,
        reducer: Reducer | StatefulReducer | None = None,
        report_mem_usage: bool = False,
        **kwargs: Any,
    ) -> None:
        """Makes all state.

        AutoGraph is off in reducers and schedules.

        Args:
          variables: [K][N] trainable variables, K towers' copies; or [N], which
            all towers share. Keras variables are accepted.
          tf_optimizer: class, factory or dotted name of the wrapped optimizer;
            called with ``name``, ``learning_rate`` and ``kwargs``, once per copy.
          learning_rate: number, scalar tensor or variable, or a schedule (a
            function of the number of updates made).
          name: scope of the state.
          towers: K towers; by default one for each list of variables, on its
            device. Required if towers share their variables.
          accumulation_steps: micro-batches per update; a whole number of 1 or more,
            or a numeric scalar tensor that holds one, read when a group begins.
          share: an optimizer of the same settings; both use its slots and scale.
          loss_scale: a rule such as ``DynamicLossScale()``; None does not scale.
          on_nonfinite: ``"skip_group"`` or ``"drop_micro_batch"``.
          clip_by_global_norm: largest norm of the mean gradient, or None.
          master_copies: whether float16 and bfloat16 variables get float32 copies
            for the optimizer to update.
          reducer: sums [K][N] tensors over towers; called for one tower too, since it
            may add over processes. Unless it is ``tw_reduce.reducers.elementwise``, it
            gets unscaled gradients in their variables' shapes. The memory of a reducer
            such as those of ``tw_reduce.compression`` changes when an update is made,
            and is saved with this optimizer. None for ``tw_reduce.all_reduce`` of the
            towers' devices; a single tower needs none.
          report_mem_usage: whether ``StatisticsWriter`` writes the memory in use.
          **kwargs: further arguments of ``tf_optimizer``.

        Raises:
          RuntimeError: inside a ``tf.function`` or a session graph.
          ValueError: an argument is out of range, or variables do not fit.
          TypeError: an argument has the wrong type.
        """
        if not tf.executing_eagerly():
            raise RuntimeError(
                "TowerOptimizer makes variables, so it must be made outside of the "
                "tf.function that uses it. In a session graph use tw_ampopt.Optimizer."
            )
        check_name(name)
        check_flag(report_mem_usage=report_mem_usage)
        super().__init__(name=None)
        self.id = name.replace("/", ".")
        self.learning_rate = learning_rate
        self.report_mem_usage = report_mem_usage
        lists = variables_by_tower(variables, knows_towers=towers is not None)
        settings = read_settings(
            self.id,
            tf_optimizer=tf_optimizer,
            learning_rate=learning_rate,
            loss_scale=loss_scale,
            master_copies=master_copies,
            on_nonfinite=on_nonfinite,
            clip_by_global_norm=clip_by_global_norm,
            reducer=reducer,
            kwargs=kwargs,
            accumulation_steps=accumulation_steps,
        )
        keyed = [(tower.name, tower.device) for tower in _towers_of(lists, towers)]
        self._set_up(settings, share, TowerOptimizer)
        with tf.name_scope(f"{self.id}/"):
            self._updater = Updater(self._shared, settings, keyed, lists, weighs=True)
        # A module saves the variables that it can reach through its attributes; it
        # does not look into the shared state and the updater.
        self._saved = {
            "shared": self._shared.scalars.variables(),
            "slots": self._updater.wrapped[0].variables(),
            "own": self._updater.state(),
        }
        self._memory = self._updater.memory

    @property
    def devices(self) -> list[str]:
        """The K towers' devices."""
        return list(self._updater.devices)

    def get_loss_scaling_var(self, device: str = "") -> tf.Variable | None:
        """Returns the variable that holds the log2 of the scale, or None.

        All devices share it; ``device`` is accepted because ``Optimizer`` takes it.
        """
        check_text(empty=True, device=device)
        return self._shared.scalars.log2

    @without_autograph
    def apply(
        self,
        grads: Sequence[Any],
        *,
        weights: Sequence[Any] | None = None,
        jit_compile: bool = False,
        group: Any = None,
    ) -> tf.Tensor:
        """Processes the towers' gradients of the scaled loss, and updates.

        Args:
          grads: [K][N] gradients, or [N] for one tower; None counts as zero.
          weights: [K] weights of the towers in the mean, such as their rows, tokens or
            sums of sample weights: numbers or scalar tensors, 0 or more. With
            accumulation the mean is over the towers of all micro-batches. A tower of
            weight 0 does not count, and its gradients may be NaN; if all weights are
            0, the means are 0. None for 1 each.
          jit_compile: in a ``tf.function``, whether XLA compiles, as one function per
            device, the work after the towers' sums (unscaling, the test, clipping and
            the update) and, with accumulation, the work before them.
          group: ranks (``tw_core.ranks.RankGroup``) that all call this with the same
            weights, and update by the mean of their means, which they exchange only if
            an update is due. None for this process alone.

        Returns:
          bool scalar, whether variables changed.

        A gradient whose shape is known only at run time raises
        ``tf.errors.InvalidArgumentError`` if it is not its variable's.

        Raises:
          RuntimeError: in a session graph; ``jit_compile`` outside of ``tf.function``.
          TypeError: something that is not a gradient, a weight or a group.
          ValueError: wrong numbers of towers, gradients or weights, a weight below 0,
            no gradient at all, shapes that are not the variables', several devices
            or a GPU in a function that XLA compiles, or, with ``jit_compile``, a tower
            whose variables are on several devices.
        """
        raw = self._raw(grads)
        check_weights(weights, num_towers=len(raw))
        if group is not None:
            check_kind(RankGroup, "a tw_core.ranks.RankGroup", group=group)
        if check_flag(jit_compile=jit_compile):
            self._check_compiled()
        with tf.name_scope("apply_gradients"):  # for timelines
            return self._updater.step(
                raw,
                are_scaled=True,
                weights=weights,
                jit_compile=jit_compile and not compiles_with_xla(),
                group=group,
            )

    @property
    def progress(self) -> tuple[int, int] | None:
        """Numbers of micro-batches accumulated, and per update, between two steps."""
        own = self._updater.accumulator
        return None if own is None else (int(own.count), int(own.steps))

    @without_autograph
    def average_accumulated(self, group: Any) -> None:
        """Gives each rank of a group the mean of all ranks' accumulated gradients.

        A checkpoint of any rank then holds the gradients of all.

        Args:
          group: as for ``apply``; all ranks call this.

        Raises:
          TypeError: ``group`` is not a group.
        """
        check_kind(RankGroup, "a tw_core.ranks.RankGroup", group=group)
        own = self._updater.accumulator
        if own is not None:
            tf.cond(own.count > 0, partial(own.average, group), lambda: False)

    def copy_to_ranks(self, group: Any) -> None:
        """Gives all ranks rank 0's scale, counts and slots, but not its accumulators.

        Args:
          group: as for ``apply``; all ranks call this.

        Raises:
          TypeError: ``group`` is not a group.
        """
        check_kind(RankGroup, "a tw_core.ranks.RankGroup", group=group)
        state = [*self._saved["shared"], *self._saved["slots"]]
        # A broadcast would compare names, in which Keras counts models per process.
        own = [v.read_value() if group.rank == 0 else tf.zeros_like(v) for v in state]
        for variable, value in zip(state, group.sum(own), strict=True):
            variable.assign(value)
        self.copy_to_replicas()

    @without_autograph
    def nonfinite_gradients(self, grads: Sequence[Any]) -> tf.Tensor:
        """Returns [K, N] bool: which gradients of a micro-batch are not finite.

        Costs a pass over the gradients: call it only if the answer is needed.

        Args:
          grads: as for ``apply``.
        """
        return nonfinite_flags(self._raw(grads), self._updater.devices)

    def reset_optimizer_state(self) -> None:
        """Resets slots, accumulators, counts and reducer memory, but not the scale."""
        if not tf.executing_eagerly():
            raise RuntimeError(
                "reset_optimizer_state makes fresh slots to copy from, so it must be "
                "called outside of a tf.function."
            )
        # A variable does not know its initial value. Counts and accumulators start at
        # known values; the slots' values are taken from a fresh optimizer.
        fresh = self._shared.fresh_copy()
        for variable in self._updater.state():
            variable.assign(tf.zeros(variable.shape, variable.dtype))
        self._shared.scalars.reset_counts()
        if self._memory is not None:
            self._memory.reset()
        for old, start in zip(self._shared.slots(), fresh.slots(), strict=True):
            old.assign(start)

    @without_autograph
    def compute_gradients(
        self, loss: tf.Tensor, var_list: Sequence[Any] | None = None, **options: Any
    ) -> list[tuple[Any, Any]]:
        """Returns [N] pairs of an unscaled gradient, or None, and a variable.

        Gradients are float32, or float64 where that is their dtype.

        Args:
          loss: scalar tensor of a ``tf.function``, unscaled.
          var_list: by default tower 0's variables.
          **options: options of ``tf.gradients``.

        Raises:
          RuntimeError: outside of a ``tf.function``.
          TypeError: an invalid loss, variable or option.
          ValueError: no variables, or a loss that is not a scalar.
        """
        self._enter()
        variables = check_differentiation(
            *(loss, var_list, options),
            default=self._updater.variables[0],
            gradients=tf.gradients,
        )
        if tf.executing_eagerly():
            raise RuntimeError(
                "compute_gradients needs a graph; call it inside a tf.function, or use "
                "a GradientTape and apply."
            )
        scaled = self._shared.scaled(to_wide(loss))
        grads = tf.gradients(scaled, tf_variables(variables), **options)
        unscaled = self._shared.unscaled_gradients(grads)
        return list(zip(unscaled, variables, strict=True))

    @without_autograph
    def apply_gradients(
        self,
        grads_and_vars: Sequence[Any],
        global_step: tf.Variable | None = None,
        name: str | None = None,
    ) -> tf.Tensor:
        """Processes unscaled gradients as pairs, already reduced by the caller.

        The optimizer's own ``reducer``, if any, is called too.

        Args:
          grads_and_vars: [N] pairs for one tower, or [K][N] pairs.
          global_step: incremented by 1 with every update, and only then.
          name: name of the scope.

        Returns:
          bool scalar, whether variables changed.

        Raises:
          RuntimeError: in a session graph.
          TypeError: an invalid pair, gradient, variable or counter.
          ValueError: variables other than those that this optimizer was made for, no
            gradient at all, or shapes that are not the variables'.
        """
        self._enter()
        check_step_and_name(global_step, name)
        self._check_xla()
        scope = tf.name_scope("apply_gradients")  # for timelines
        with tf.name_scope(name or f"{self.id}_update"), scope:
            raw = gradients_of_pairs(grads_and_vars, self._updater.variables)
            return self._updater.step(raw, are_scaled=False, global_step=global_step)

    def variables(self) -> list[tf.Variable]:
        """Lists scale, counts, slots and accumulators, as v1 optimizers do."""
        slots = [v for own in self._updater.wrapped for v in own.variables()]
        memory = [] if self._memory is None else self._memory.variables
        return [*self._saved["shared"], *slots, *self._saved["own"], *memory]

    def __dir__(self) -> list[str]:
        """Lists the attributes, except one that checkpoints would misinterpret.

        Checkpoints treat an object that lists ``get_slot_names`` as an optimizer that
        saves its slots in its own way; here they are saved as plain variables.
        """
        return [name for name in super().__dir__() if name != "get_slot_names"]

    def _enter(self) -> None:
        if builds_session_graph():
            raise RuntimeError(
                "TowerOptimizer works in a tf.function and eagerly; got a session "
                "graph, whose sessions do not have this optimizer's state. Use "
                "tw_ampopt.Optimizer there."
            )
        if not compiles_with_xla() or traces_tower():
            return  # A traced tower's scalars have been read before.
        if any("GPU" in own for own in self._devices()):
            raise ValueError(
                "TowerOptimizer was called in a function that XLA compiles for a GPU, "
                "which cannot read the optimizer's scalars on "
                f"{self._shared.scalars.host}. Compute gradients in "
                "tw_core.map_towers(..., trace='once', jit_compile=True), and call "
                "apply(..., jit_compile=True) outside of it (docs/howto/ampopt.md)."
            )

    def _scope(self) -> AbstractContextManager[None]:
        return nullcontext()

    def _built(self) -> Updater:
        self._enter()
        return self._updater

    def _started(self, value: Any) -> SharedState:
        self._enter()
        check_value(value)
        return self._shared

    def _raw(self, grads: Sequence[Any]) -> RawGradients:
        self._enter()
        self._check_xla()
        return gradients_by_tower(grads, self._updater.variables)

    def _devices(self) -> set[str]:
        """The devices of all variables."""
        variables = tf_variables(v for own in self._updater.variables for v in own)
        return {canonical_device(v.device) for v in variables}

    def _check_xla(self) -> None:
        if not compiles_with_xla():
            return
        devices = sorted(self._devices())
        if len(devices) > 1:
            raise ValueError(
                "XLA compiles functions for one device; got towers on "
                f"{devices}. Call apply(..., jit_compile=True) in a function that is "
                "not compiled."
            )

    def _check_compiled(self) -> None:
        if not (traces_function() and orders_effects()):
            raise RuntimeError(
                "jit_compile=True compiles an update that is part of a tf.function; "
                "call apply inside a tf.function."
            )
        for k, (own, _) in enumerate(self._updater.replicas()):
            devices = sorted({v.device for v in tf_variables(own)})
            if len(devices) > 1:
                raise ValueError(
                    f"jit_compile=True: the variables of tower {k} are on {devices}, "
                    "and XLA compiles for one device; use jit_compile=False."
                )


def _towers_of(
    lists: Sequence[Sequence[Any]], given: Sequence[Tower] | None
) -> tuple[Tower, ...]:
    """Returns the given towers, or one for each list of variables, on its device."""
    if given is None:
        return tuple(towers([common_device(tower) for tower in lists]))
    check_towers(given)
    if len(lists) not in (1, len(given)):
        raise ValueError(
            "variables must be one list per tower, or one list for all; got "
            f"{len(lists)} lists for {len(given)} towers."
        )
    return tuple(given)
