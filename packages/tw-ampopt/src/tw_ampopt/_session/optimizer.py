"""The optimizer for session graphs, under StyleGAN2's names.

It takes the calls of StyleGAN2's ``dnnlib/tflib/optimizer.py``. State is made when the
devices and variables become known, that is, when a step is built.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal

import tensorflow as tf

from tw_ampopt._base import BaseOptimizer
from tw_ampopt._checks.arguments import (
    check_differentiation,
    check_name,
    check_value,
)
from tw_ampopt._checks.gradients import check_application, check_gradients
from tw_ampopt._loss_scale import LossScale
from tw_ampopt._session.steps import GraphSteps, Registered, check_in_graph
from tw_ampopt._settings import Reducer, choose_rule, read_settings
from tw_ampopt._update.state import SharedState
from tw_ampopt._update.update import Updater
from tw_ampopt._variables import common_device
from tw_ampopt._wrapped.factory import LearningRateLike, OptimizerFactory
from tw_core.devices import canonical_device
from tw_core.internal import check_flag, check_text
from tw_reduce import StatefulReducer


class Optimizer(BaseOptimizer):
    """Scales, accumulates, averages over devices, and skips non-finite updates.

    Through the optimizer protocol (``compute_gradients``, ``apply_gradients``) it also
    works wherever a v1 optimizer does; the caller then reduces.

    >>> import tensorflow as tf
    >>> from tw_ampopt import DynamicLossScale
    >>> v1 = tf.compat.v1
    >>> with tf.Graph().as_default(), v1.Session() as session:
    ...     optimizer = Optimizer(
    ...         tf_optimizer=v1.train.GradientDescentOptimizer,
    ...         learning_rate=0.25,
    ...         loss_scale=DynamicLossScale(),
    ...     )
    ...     for device in ["/cpu:0", "/cpu:0"]:
    ...         with tf.device(device):
    ...             w = tf.Variable([4.0, 8.0])
    ...             optimizer.register_gradients(tf.reduce_sum(w**2), [w])
    ...     train_op = optimizer.apply_updates()
    ...     _ = session.run(v1.global_variables_initializer())
    ...     _ = session.run(train_op)
    ...     print(session.run(w))
    [2. 4.]
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
        loss_scale: LossScale | None = None,
        on_nonfinite: Literal["skip_group", "drop_micro_batch"] = "skip_group",
        clip_by_global_norm: float | None = None,
        master_copies: bool = False,
        reducer: Reducer | StatefulReducer | None = None,
        **kwargs: Any,
    ) -> None:
        """Stores the settings; state is made as devices become known.

        Args:
          name: scope of ops and variables.
          tf_optimizer: class, factory or dotted name of the wrapped optimizer;
            called with ``name``, ``learning_rate`` and ``kwargs``, once per device.
          learning_rate: number, scalar tensor or variable, or a schedule (a
            function of the number of updates made).
          minibatch_multiplier: micro-batches per update; a whole number of 1 or
            more, or a numeric scalar tensor that holds one. It is read for every
            micro-batch, which is divided by it; a group ends when it has that many.
          share: an optimizer of the same settings; both use its slots and scale.
          use_loss_scaling: whether to scale by ``GradualLossScale`` with the next
            three values.
          loss_scaling_init: log2 of the scale at the start.
          loss_scaling_inc: added to the log2 after a good update.
          loss_scaling_dec: subtracted from the log2 after a bad update.
          report_mem_usage: whether ``StatisticsHook`` writes the memory in use.
          loss_scale: a rule to use instead of ``use_loss_scaling``.
          on_nonfinite: ``"skip_group"`` skips an update if any of its micro-batches has
            a non-finite gradient; ``"drop_micro_batch"`` drops only that micro-batch.
          clip_by_global_norm: largest norm of the mean gradient, or None.
          master_copies: whether float16 and bfloat16 variables get float32 copies
            for the optimizer to update.
          reducer: sums [K][N] tensors over towers, e.g. from ``tw_reduce``; called
            for one tower too, since it may add over processes. None for
            ``tw_reduce.all_reduce`` of the towers' devices; a single tower needs none.
          **kwargs: further arguments of ``tf_optimizer``.

        Raises:
          RuntimeError: outside of a graph.
          ValueError: an argument is out of range, or there are two kinds of scaling.
          TypeError: an argument has the wrong type.
        """
        check_in_graph()
        check_name(name)
        check_flag(use_loss_scaling=use_loss_scaling)
        check_flag(report_mem_usage=report_mem_usage)
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
        settings = read_settings(
            self.scope.rpartition("/")[2],
            tf_optimizer=tf_optimizer,
            learning_rate=learning_rate,
            loss_scale=choose_rule(loss_scale, gradual if use_loss_scaling else None),
            master_copies=master_copies,
            on_nonfinite=on_nonfinite,
            clip_by_global_norm=clip_by_global_norm,
            reducer=reducer,
            kwargs=kwargs,
            minibatch_multiplier=minibatch_multiplier,
        )
        self.optimizer_class = settings.factory
        self.optimizer_kwargs = dict(kwargs)
        self._set_up(settings, share, Optimizer)
        self._steps = GraphSteps(self.scope, settings, self._shared)
        self._registered = Registered()

    def register_gradients(
        self,
        loss: tf.Tensor,
        trainable_vars: Sequence[Any] | dict[Any, Any],
        *,
        weight: Any = None,
    ) -> None:
        """Registers the gradients of a loss; call it at least once per device.

        A variable's gradients of several calls on a device are averaged over the calls
        that list it, as in StyleGAN2; a loss that does not depend on it counts as 0.

        Args:
          loss: scalar tensor; its device identifies the tower.
          trainable_vars: variables on that device, as a list or as a dict's values.
          weight: weight of this loss in the mean over all losses, such as its rows,
            tokens or sum of sample weights: a number or scalar tensor, 0 or more. With
            accumulation the mean is over the towers of all micro-batches. A loss of
            weight 0 does not count, and its gradients may be NaN; if all weights are
            0, the means are 0. Either all registrations pass a weight, or none does,
            for equal weights.

        Raises:
          RuntimeError: after ``apply_updates``.
          TypeError: a loss, variables or a weight of the wrong type.
          ValueError: a loss that is not a scalar; no variable, a repeated one, or one
            on another device; anything of another graph; a weight below 0, or weights
            in some registrations only.
        """
        variables = self._registered.check(loss, trainable_vars, weight)
        grads = self._steps.scaled_gradients(loss, variables)
        [grads] = check_gradients([grads], [variables])
        self._registered.add(loss.device, variables, grads, weight)

    def apply_updates(self, allow_no_op: bool = False) -> tf.Operation:
        """Builds the op that processes a micro-batch and updates all towers.

        Args:
          allow_no_op: whether to return an op that does nothing if no gradient exists.

        Raises:
          RuntimeError: on a second call.
          TypeError: ``allow_no_op`` is not a bool.
          ValueError: no gradients, devices with different variables, or
            gradients of a branch or loop that is finished.
        """
        check_flag(allow_no_op=allow_no_op)
        towers = self._registered.take(allow_none=allow_no_op)
        updated = [self._steps.build_registered(towers)] if towers else []
        with self._scope():
            return tf.group(*updated, name="TrainingOp")

    def compute_gradients(
        self, loss: tf.Tensor, var_list: Sequence[Any] | None = None, **options: Any
    ) -> list[tuple[Any, Any]]:
        """Returns [N] (gradient, variable) pairs, unscaled, in float32 or float64.

        Args:
          loss: scalar tensor, unscaled.
          var_list: by default the graph's trainable variables.
          **options: options of ``tf.compat.v1.gradients``, and
            ``gate_gradients`` as in v1 optimizers.

        Raises:
          TypeError: an invalid loss, variable or option.
          ValueError: no variables, a non-scalar loss, or anything of another graph.
        """
        variables = check_differentiation(
            *(loss, var_list, options),
            default=tf.compat.v1.trainable_variables(),
            gradients=tf.compat.v1.gradients,
        )
        grads = self._steps.scaled_gradients(loss, variables, **options)
        with tf.name_scope(f"{self._settings.prefix}_grad"):
            unscaled = self._shared.unscaled_gradients(grads)
        return list(zip(unscaled, variables, strict=True))

    def apply_gradients(
        self,
        grads_and_vars: Sequence[tuple[Any, Any]],
        global_step: tf.Variable | None = None,
        name: str | None = None,
    ) -> tf.Operation:
        """Builds the op that processes a micro-batch, reduced by the caller.

        The optimizer's own ``reducer``, if any, is called too.

        Args:
          grads_and_vars: [N] unscaled pairs; None counts as zero.
          global_step: incremented by 1 with every update, and only then.
          name: name of the op.

        Raises:
          TypeError: an invalid pair, gradient, variable or counter.
          ValueError: no gradient at all, a repeated variable, a gradient
            whose shape is not its variable's, or anything of another graph.
        """
        grads, variables = check_application(grads_and_vars, global_step, name)
        device = common_device(variables)
        updated = self._steps.build(
            [(canonical_device(device), device)],
            [variables],
            [[[grad] for grad in grads]],
            are_scaled=False,
            global_step=global_step,
        )
        return tf.group(updated, name=name or f"{self._settings.prefix}_update")

    def get_loss_scaling_var(self, device: str) -> tf.Variable | None:
        """Returns the variable of the scale's log2, or None without scaling.

        All devices share it; it is on the host of the ``device`` of the first call. It
        is float32 for the gradual rule and int64 for integer exponents.

        Raises:
          TypeError: ``device`` is not a string.
          ValueError: ``device`` is not a device.
        """
        check_text(empty=True, device=device)
        canonical_device(device)
        return self._steps.start(device).scalars.log2

    @property
    def reset_op(self) -> tf.Operation:
        """The op that resets slots, accumulators and counts, but not the scale.

        It covers the steps built so far, including those of optimizers that share.
        """
        if self._steps.reset_op is None:
            raise self._nothing_built("There is no state yet")
        return self._steps.reset_op

    def reset_optimizer_state(self) -> None:
        """Runs ``reset_op`` in the default session.

        Raises:
          RuntimeError: no default session, or no op yet.
        """
        session = tf.compat.v1.get_default_session()
        if session is None:
            raise RuntimeError(
                "There is no default session; call reset_optimizer_state inside `with "
                "session.as_default():`, or run reset_op."
            )
        session.run(self.reset_op)

    @property
    def devices(self) -> list[str]:
        """The towers' devices, in the order of registration."""
        updater = self._steps.updater
        return [] if updater is None else list(updater.devices)

    def variables(self) -> list[tf.Variable]:
        """Lists scale, counts, slots and accumulators."""
        scalars = self._shared.scalars.variables()
        return [*scalars, *self._shared.slots(), *self._steps.own_state()]

    def nonfinite_gradients(self) -> tf.Tensor:
        """Returns [K, N] bool: which gradients of the micro-batch are not finite.

        Fetch it with the training op; ``nonfinite_names`` turns it into names.

        Raises:
          RuntimeError: no step has been built.
          ValueError: the step was built in a branch or loop that is finished.
        """
        updater = self._built()
        return self._steps.nonfinite_flags(updater)

    def copy_to_replicas(self) -> tf.Operation:
        """Returns the op that copies tower 0's state to all towers, after a restore."""
        copied = super().copy_to_replicas()
        with self._scope():
            return tf.no_op() if copied is None else copied

    def _scope(self) -> AbstractContextManager[None]:
        return self._steps.scope()

    def _built(self) -> Updater:
        if self._steps.updater is None:
            raise self._nothing_built("Nothing updates yet")
        return self._steps.updater

    def _nothing_built(self, problem: str) -> RuntimeError:
        return RuntimeError(f"{problem}; call apply_updates or apply_gradients first.")

    def _started(self, value: Any) -> SharedState:
        check_value(value)
        return self._steps.start(getattr(value, "device", ""))
