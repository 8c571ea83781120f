"""The older system's optimizer, under its old names, for session graphs.

It takes the calls of StyleGAN2's ``dnnlib/tflib/optimizer.py``, and collects the
gradients; ``GraphCore`` does the work.
"""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tw_ampopt._checks.arguments import (
    check_device,
    check_name,
    check_slot,
    check_value,
)
from tw_ampopt._checks.gradients import check_gradients
from tw_ampopt._loss_scale.rules import ScaleRule
from tw_ampopt._optimizers.graph_core import GraphCore, check_in_graph
from tw_ampopt._optimizers.graph_gradients import scaled_gradients, unscaled_pairs
from tw_ampopt._optimizers.graph_steps import step_of_pairs, step_of_towers
from tw_ampopt._optimizers.registration import Registered
from tw_ampopt._optimizers.settings import choose_rule, make_settings
from tw_ampopt._optimizers.statistics import names_where
from tw_ampopt._update.options import Reducer, make_options
from tw_ampopt._wrapped.factory import OptimizerFactory
from tw_ampopt._wrapped.learning_rate import LearningRateLike
from tw_core.checks import check_flag, check_text


class Optimizer:
    """Scales, accumulates, averages over devices, and skips what is not finite.

    By the optimizer protocol (``compute_gradients``, ``apply_gradients``) it also
    serves wherever a v1 optimizer does; the caller then reduces.
    """

    def __init__(
        self,
        name: str = "Train",
        tf_optimizer: str | OptimizerFactory = "tf.train.AdamOptimizer",
        learning_rate: LearningRateLike = 0.001,
        minibatch_multiplier: int | tf.Tensor | None = None,
        share: "Optimizer | None" = None,
        use_loss_scaling: bool = False,
        loss_scaling_init: float = 64.0,
        loss_scaling_inc: float = 0.0005,
        loss_scaling_dec: float = 1.0,
        report_mem_usage: bool = False,
        *,
        loss_scale: ScaleRule | None = None,
        on_nonfinite: str = "skip_group",
        clip_by_global_norm: float | None = None,
        master_copies: bool = False,
        reducer: Reducer | None = None,
        **kwargs: Any,
    ) -> None:
        """Keeps the settings; state is made as devices become known.

        Args:
          name: scope of ops and variables.
          tf_optimizer: class, factory or dotted name of the wrapped optimizer;
            called with ``name``, ``learning_rate`` and ``kwargs``, once a device.
          learning_rate: number, scalar tensor or variable, or a schedule (a
            function of the number of updates made).
          minibatch_multiplier: micro-batches whose gradients make one update; a
            whole number of 1 or more, or a numeric scalar tensor of such.
          share: an optimizer of the same settings; both use its slots and scale.
          use_loss_scaling: scales by ``GradualScale`` with the three next values.
          loss_scaling_init: log2 of the scale at the start.
          loss_scaling_inc: added to the log2 after a good update.
          loss_scaling_dec: taken from the log2 after a bad update.
          report_mem_usage: whether ``StatisticsHook`` writes the memory in use.
          loss_scale: a rule to use in place of ``use_loss_scaling``.
          on_nonfinite: ``"skip_group"`` leaves out the update of a group in which
            a gradient is not finite; ``"drop_micro_batch"`` the micro-batch only.
          clip_by_global_norm: largest norm of the mean gradient, or None.
          master_copies: whether float16 and bfloat16 variables get float32 copies
            for the optimizer to update.
          reducer: sums [K][N] tensors over towers, e.g. from ``tw_reduce``; by
            default ``tw_reduce.sum_balanced`` over the towers' devices.
          **kwargs: further arguments of ``tf_optimizer``.

        Raises:
          RuntimeError: outside of a graph.
          ValueError: an argument out of its range, or two kinds of scaling.
          TypeError: an argument of the wrong kind.
        """
        caller = f"tw_ampopt.Optimizer {name!r}"
        check_in_graph(caller)
        check_name(name, caller=caller)
        check_flag(caller, use_loss_scaling=use_loss_scaling)
        check_flag(caller, report_mem_usage=report_mem_usage)
        self.name, self.id = name, name.replace("/", ".")
        self.scope = tf.compat.v1.get_default_graph().unique_name(self.id)
        self.learning_rate = learning_rate
        self.minibatch_multiplier = minibatch_multiplier
        self.use_loss_scaling = use_loss_scaling
        self.loss_scaling_init = loss_scaling_init
        self.loss_scaling_inc = loss_scaling_inc
        self.loss_scaling_dec = loss_scaling_dec
        self.report_mem_usage = report_mem_usage
        gradual = (loss_scaling_init, loss_scaling_inc, loss_scaling_dec)
        settings = make_settings(
            caller=caller,
            # Without the scopes around: copies of a tower's slots keep one name.
            prefix=self.scope.rpartition("/")[2],
            tf_optimizer=tf_optimizer,
            learning_rate=learning_rate,
            rule=choose_rule(
                loss_scale, gradual if use_loss_scaling else None, caller=caller
            ),
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
        self.optimizer_class = settings.factory
        self.optimizer_kwargs = dict(kwargs)
        shared = None if share is None else _core_of(share, caller)
        self._core = GraphCore(self.scope, settings, options, shared)
        self._registered = Registered(caller)

    def register_gradients(
        self, loss: tf.Tensor, trainable_vars: Sequence[Any] | dict[Any, Any]
    ) -> None:
        """Registers the gradients of a loss; call it once or more a device.

        Gradients of several calls on a device are averaged over the calls whose
        loss reaches the variable.

        Args:
          loss: scalar tensor; its device says which tower it belongs to.
          trainable_vars: variables on that device, as a list or as a dict's values.

        Raises:
          RuntimeError: after ``apply_updates``.
          TypeError: no tensor, or no list or dict of floating variables.
          ValueError: a loss that is no scalar; no variable, one twice, or one on
            another device; another graph's.
        """
        variables = self._registered.check(loss, trainable_vars)
        grads = scaled_gradients(self._core, loss, variables)
        caller = f"{self._core.settings.caller}.register_gradients"
        [grads] = check_gradients([grads], [variables], caller=caller)
        self._registered.add(loss.device, variables, grads)

    def apply_updates(self, allow_no_op: bool = False) -> tf.Operation:
        """Builds the op that takes in a micro-batch and updates all towers.

        Args:
          allow_no_op: whether no gradient at all gives an op that does nothing.

        Raises:
          RuntimeError: at the second call.
          TypeError: ``allow_no_op`` that is no bool.
          ValueError: no gradients, devices that differ in their variables, or
            gradients of a branch or loop that is finished.
        """
        caller = f"{self._core.settings.caller}.apply_updates"
        check_flag(caller, allow_no_op=allow_no_op)
        towers = self._registered.take(allow_none=allow_no_op)
        return step_of_towers(self._core, towers)

    def get_loss_scaling_var(self, device: str) -> tf.Variable | None:
        """Returns the variable of the scale's log2, or None without scaling.

        All devices share it; the first ``device`` that asks has it on its host. It
        is float32 for the gradual rule and int64 for a whole exponent.

        Raises:
          TypeError: no string.
          ValueError: no device.
        """
        caller = f"{self._core.settings.caller}.get_loss_scaling_var"
        check_device(check_text(caller, empty=True, device=device), caller=caller)
        return self._core.log2(device)

    @property
    def reset_op(self) -> tf.Operation:
        """The op that puts back slots, accumulators and counts; not the scale.

        It knows the steps built so far, those of optimizers that share included.
        """
        return self._core.reset_op()

    def reset_optimizer_state(self) -> None:
        """Runs ``reset_op`` in the default session."""
        self._core.reset()

    @property
    def devices(self) -> list[str]:
        """The towers' devices, in the order of registration."""
        return [] if self._core.step is None else list(self._core.step.devices)

    def apply_loss_scaling(self, value: tf.Tensor) -> tf.Tensor:
        """Multiplies a tensor by the scale; returns it as it is without scaling."""
        self._start_beside(value, "apply_loss_scaling")
        return self._core.shared.scaled(value)

    def undo_loss_scaling(self, value: tf.Tensor) -> tf.Tensor:
        """Multiplies a tensor by 1 / scale; returns it as it is without scaling."""
        self._start_beside(value, "undo_loss_scaling")
        return self._core.shared.unscaled(value)

    def compute_gradients(
        self, loss: tf.Tensor, var_list: Sequence[Any] | None = None, **options: Any
    ) -> list[tuple[Any, Any]]:
        """Returns [N] (gradient, variable) pairs, unscaled and in float32.

        Args:
          loss: scalar tensor, unscaled.
          var_list: by default the graph's trainable variables.
          **options: as ``tf.compat.v1.gradients`` takes them, and
            ``gate_gradients`` as v1 optimizers do.

        Raises:
          TypeError: no loss, variables or options.
          ValueError: no variables, a loss that is no scalar, or another graph's.
        """
        return unscaled_pairs(self._core, loss, var_list, **options)

    def apply_gradients(
        self,
        grads_and_vars: Sequence[tuple[Any, Any]],
        global_step: tf.Variable | None = None,
        name: str | None = None,
    ) -> tf.Operation:
        """Builds the op that takes in a micro-batch, reduced by the caller.

        Args:
          grads_and_vars: [N] unscaled pairs; None counts as zero.
          global_step: grows by 1 with every update, and with nothing else.
          name: of the op.

        Raises:
          TypeError: something that is no pair, gradient, variable or counter.
          ValueError: no gradient at all, a variable that comes twice, a gradient
            whose shape is not its variable's, or another graph's.
        """
        return step_of_pairs(self._core, grads_and_vars, global_step, name)

    def get_slot(self, var: Any, name: str) -> tf.Variable | None:
        """Returns the slot ``name`` of ``var`` in the wrapped optimizer, or None."""
        check_slot(var, name, caller=f"{self._core.settings.caller}.get_slot")
        return self._core.shared.get_slot(var, name)

    def get_slot_names(self) -> list[str]:
        """Lists the names of the wrapped optimizer's slots."""
        return self._core.shared.get_slot_names()

    def variables(self) -> list[tf.Variable]:
        """Lists scale, counts, slots and accumulators."""
        return self._core.variables()

    def statistics(self) -> dict[str, tf.Tensor]:
        """Returns scalar tensors that tell of the state; fetch them between steps."""
        return self._core.statistics()

    def nonfinite_gradients(self) -> tf.Tensor:
        """Returns [K, N] bool: which gradients of the micro-batch are not finite.

        Fetch it with the training op; ``nonfinite_names`` turns it into names.
        """
        return self._core.nonfinite_gradients()

    def nonfinite_names(self, flags: Any) -> list[list[str]]:
        """Returns a list a tower: the variables' names where [K, N] ``flags`` are."""
        caller = f"{self._core.settings.caller}.nonfinite_names"
        variables = self._core.built("nonfinite_names").variables
        return names_where(flags, variables, caller=caller)

    def copy_to_replicas(self) -> tf.Operation:
        """Returns the op that gives all towers what tower 0 has, after a restore."""
        return self._core.copy_to_replicas()

    def _start_beside(self, value: Any, method: str) -> None:
        check_value(value, caller=f"{self._core.settings.caller}.{method}")
        self._core.log2(getattr(value, "device", ""))


def _core_of(share: object, caller: str) -> GraphCore:
    if not isinstance(share, Optimizer):
        raise TypeError(f"{caller}: share takes a tw_ampopt.Optimizer; got {share!r}.")
    return share._core
