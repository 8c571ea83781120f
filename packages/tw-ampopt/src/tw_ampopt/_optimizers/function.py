"""The optimizer for ``tf.function``: the same steps, state made beforehand.

A ``tf.function`` that makes variables is traced twice, and what it made is hard to
save. So this class is given the variables when it is made.
"""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tw_ampopt._checks.arguments import (
    check_counter,
    check_name,
    check_slot,
    check_value,
)
from tw_ampopt._loss_scale.rules import ScaleRule
from tw_ampopt._optimizers.copies_of_state import copy_from_first
from tw_ampopt._optimizers.function_core import TowerCore, check_eager
from tw_ampopt._optimizers.gradients_by_tower import flatten_pairs
from tw_ampopt._optimizers.restart import restart
from tw_ampopt._optimizers.settings import make_settings
from tw_ampopt._optimizers.statistics import names_where, nonfinite, statistics
from tw_ampopt._optimizers.tower_variables import per_tower, towers_of
from tw_ampopt._update.options import Reducer, make_options
from tw_ampopt._wrapped.factory import OptimizerFactory
from tw_ampopt._wrapped.learning_rate import LearningRateLike
from tw_core import Tower, without_autograph
from tw_core.checks import check_flag, check_text


class TowerOptimizer(tf.Module):  # type: ignore[misc] # TensorFlow is untyped
    """Scales, accumulates, averages over towers, and skips what is not finite.

    ``tf.train.Checkpoint`` finds its state: scale, counts, every tower's
    accumulators, and tower 0's slots. By the optimizer protocol it also serves where
    a v1 optimizer does; the caller then reduces.
    """

    def __init__(
        self,
        variables: Sequence[Any],
        *,
        tf_optimizer: str | OptimizerFactory = "tf.train.AdamOptimizer",
        learning_rate: LearningRateLike = 0.001,
        name: str = "Train",
        towers: Sequence[Tower] | None = None,
        minibatch_multiplier: int | tf.Tensor | tf.Variable | None = None,
        share: "TowerOptimizer | None" = None,
        loss_scale: ScaleRule | None = None,
        on_nonfinite: str = "skip_group",
        clip_by_global_norm: float | None = None,
        master_copies: bool = False,
        reducer: Reducer | None = None,
        report_mem_usage: bool = False,
        **kwargs: Any,
    ) -> None:
        """Makes all state.

        A reducer and a schedule run as they are written: AutoGraph is off in them.

        Args:
          variables: [K][N] trainable variables, K towers' copies; or [N], which
            all towers share. Keras variables are taken too.
          tf_optimizer: class, factory or dotted name of the wrapped optimizer;
            called with ``name``, ``learning_rate`` and ``kwargs``, once a copy.
          learning_rate: number, scalar tensor or variable, or a schedule (a
            function of the number of updates made).
          name: scope of the state.
          towers: K towers; by default one for each list of variables, on its
            device. Needed where towers share their variables.
          minibatch_multiplier: micro-batches whose gradients make one update.
          share: an optimizer of the same settings; both use its slots and scale.
          loss_scale: a rule such as ``DoublingScale()``; None does not scale.
          on_nonfinite: ``"skip_group"`` or ``"drop_micro_batch"``.
          clip_by_global_norm: largest norm of the mean gradient, or None.
          master_copies: whether float16 and bfloat16 variables get float32 copies
            for the optimizer to update.
          reducer: sums [K][N] tensors over towers; by default
            ``tw_reduce.sum_balanced`` over the towers' devices.
          report_mem_usage: whether ``StatisticsWriter`` writes the memory in use.
          **kwargs: further arguments of ``tf_optimizer``.

        Raises:
          RuntimeError: inside a ``tf.function`` or a session graph.
          ValueError: an argument out of its range, or variables that do not fit.
          TypeError: an argument of the wrong kind.
        """
        caller = f"tw_ampopt.TowerOptimizer {name!r}"
        check_eager(caller)
        check_name(name, caller=caller)
        check_flag(caller, report_mem_usage=report_mem_usage)
        super().__init__(name=None)
        self.id = name.replace("/", ".")
        self.learning_rate = learning_rate
        self.report_mem_usage = report_mem_usage
        lists = per_tower(variables, caller=caller)
        chosen = towers_of(lists, towers, caller=caller)
        settings = make_settings(
            caller=caller,
            prefix=self.id,
            tf_optimizer=tf_optimizer,
            learning_rate=learning_rate,
            rule=loss_scale,
            master_copies=master_copies,
            kwargs=kwargs,
        )
        options = make_options(
            caller=caller,
            minibatch_multiplier=minibatch_multiplier,
            on_nonfinite=on_nonfinite,
            clip_by_global_norm=clip_by_global_norm,
            reducer=reducer,
        )
        shared = None if share is None else _core_of(share, caller)
        with tf.name_scope(f"{self.id}/"):
            self._core = TowerCore(settings, options, shared, chosen, lists)
        self._saved = self._core.saved()

    @property
    def devices(self) -> list[str]:
        """The K towers' devices."""
        return self._core.devices

    @without_autograph
    def apply_loss_scaling(self, value: tf.Tensor) -> tf.Tensor:
        """Multiplies a tensor by the scale; returns it as it is without scaling."""
        caller = self._core.enter("apply_loss_scaling")
        return self._core.shared.scaled(check_value(value, caller=caller))

    @without_autograph
    def undo_loss_scaling(self, value: tf.Tensor) -> tf.Tensor:
        """Multiplies a tensor by 1 / scale; returns it as it is without scaling."""
        caller = self._core.enter("undo_loss_scaling")
        return self._core.shared.unscaled(check_value(value, caller=caller))

    def get_loss_scaling_var(self, device: str = "") -> tf.Variable | None:
        """Returns the variable that holds the log2 of the scale, or None.

        It is one for all devices; ``device`` is there as ``Optimizer`` has it.
        """
        caller = f"{self._core.settings.caller}.get_loss_scaling_var"
        check_text(caller, empty=True, device=device)
        return self._core.shared.scalars.scale.log2

    @without_autograph
    def apply(self, grads: Sequence[Any]) -> tf.Tensor:
        """Takes in the towers' gradients of the scaled loss, and updates.

        Args:
          grads: [K][N] gradients, or [N] for one tower; None counts as zero.

        Returns:
          bool scalar, whether variables changed.

        A gradient whose shape is not known before raises
        ``tf.errors.InvalidArgumentError`` when it is not its variable's.

        Raises:
          RuntimeError: in a session graph.
          TypeError: something that is no gradient.
          ValueError: other numbers of towers or gradients, no gradient at all,
            shapes that are not the variables', or several devices under XLA.
        """
        raw = self._core.raw(grads, "apply")
        return self._core.updater.step(raw, are_scaled=True)

    @without_autograph
    def nonfinite_gradients(self, grads: Sequence[Any]) -> tf.Tensor:
        """Returns [K, N] bool: which gradients of a micro-batch are not finite.

        Args:
          grads: as for ``apply``. Call it only where the answer is wanted.
        """
        raw = self._core.raw(grads, "nonfinite_gradients")
        return nonfinite(raw, self._core.devices)

    def nonfinite_names(self, flags: Any) -> list[list[str]]:
        """Returns a list a tower: the variables' names where [K, N] ``flags`` are."""
        flags = flags.numpy() if hasattr(flags, "numpy") else flags
        caller = f"{self._core.settings.caller}.nonfinite_names"
        return names_where(flags, self._core.variables, caller=caller)

    @without_autograph
    def statistics(self) -> dict[str, tf.Tensor]:
        """Returns scalar tensors that tell of the state."""
        self._core.enter("statistics")
        core = self._core
        return statistics(core.shared, core.updater, core.settings)

    def reset_optimizer_state(self) -> None:
        """Puts slots, accumulators and counts back to the start; the scale stays."""
        if not tf.executing_eagerly():
            raise RuntimeError(
                f"{self._core.settings.caller}.reset_optimizer_state: makes fresh "
                "slots to copy from, and so must be called outside of a tf.function."
            )
        restart(self._core)

    @without_autograph
    def copy_to_replicas(self) -> tf.Operation | None:
        """Gives all towers tower 0's variables and slots, e.g. after a restore."""
        self._core.enter("copy_to_replicas")
        return copy_from_first(self._core.updater)

    @without_autograph
    def compute_gradients(
        self, loss: tf.Tensor, var_list: Sequence[Any] | None = None, **options: Any
    ) -> list[tuple[Any, Any]]:
        """Returns [N] pairs of an unscaled float32 gradient, or None, and a variable.

        Args:
          loss: scalar tensor of a ``tf.function``, unscaled.
          var_list: by default tower 0's variables.
          **options: as ``tf.gradients`` takes them.

        Raises:
          RuntimeError: outside of a ``tf.function``.
          TypeError: no loss, variables or options.
          ValueError: no variables, or a loss that is no scalar.
        """
        return self._core.unscaled_pairs(loss, var_list, **options)

    @without_autograph
    def apply_gradients(
        self,
        grads_and_vars: Sequence[Any],
        global_step: tf.Variable | None = None,
        name: str | None = None,
    ) -> tf.Tensor:
        """Takes in unscaled gradients as pairs, as a caller has reduced them.

        Args:
          grads_and_vars: [N] pairs for one tower, or [K][N] pairs.
          global_step: grows by 1 with every update, and with nothing else.
          name: of the scope.

        Returns:
          bool scalar, whether variables changed.

        Raises:
          RuntimeError: in a session graph.
          TypeError: something that is no pair, gradient, variable or counter.
          ValueError: other variables than this optimizer was made for, no gradient
            at all, or shapes that are not the variables'.
        """
        core = self._core
        caller = core.enter("apply_gradients")
        check_counter(global_step, caller=caller)
        if name is not None:
            check_name(name, caller=caller)
        grads = flatten_pairs(
            grads_and_vars, core.variables, len(core.towers), caller=caller
        )
        with tf.name_scope(name or f"{self.id}_update"):
            raw = core.raw(grads, "apply_gradients")
            return core.updater.step(raw, are_scaled=False, global_step=global_step)

    def get_slot(self, var: Any, name: str) -> tf.Variable | None:
        """Returns the slot ``name`` of ``var`` in the wrapped optimizer, or None."""
        check_slot(var, name, caller=f"{self._core.settings.caller}.get_slot")
        return self._core.shared.get_slot(var, name)

    def get_slot_names(self) -> list[str]:
        """Lists the names of the wrapped optimizer's slots."""
        return self._core.shared.get_slot_names()

    def variables(self) -> list[tf.Variable]:
        """Lists scale, counts, slots and accumulators, as v1 optimizers do."""
        return self._core.variables_of_state()

    def __dir__(self) -> list[str]:
        """Lists the attributes, but for one that checkpoints would take as a sign.

        Whatever lists ``get_slot_names`` is taken for an optimizer that saves its
        slots in a way of its own; this one's are saved as what they are, variables.
        """
        return [name for name in super().__dir__() if name != "get_slot_names"]


def _core_of(share: object, caller: str) -> TowerCore:
    if not isinstance(share, TowerOptimizer):
        raise TypeError(
            f"{caller}: share takes a tw_ampopt.TowerOptimizer; got {share!r}."
        )
    return share._core
