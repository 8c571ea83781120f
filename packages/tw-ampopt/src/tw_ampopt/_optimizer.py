"""The older system's optimizer, under its old names, for session graphs.

StyleGAN2's ``dnnlib/tflib/optimizer.py`` wraps an optimizer a device, scales the
loss, accumulates, averages over devices and skips updates that are not finite. This
class takes the same calls. It collects the gradients; ``Updater`` does the work.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import tensorflow as tf

from tw_ampopt._copies_of_state import copy_from_first
from tw_ampopt._inner import as_tf_variable
from tw_ampopt._learning_rate import LearningRateLike
from tw_ampopt._optimizer_factory import OptimizerFactory
from tw_ampopt._pairs import check_pairs, common_device
from tw_ampopt._registration import DeviceGradients, check_call, check_towers
from tw_ampopt._scale_rules import GradualScale, ScaleRule
from tw_ampopt._settings import check_share, make_options, make_settings, make_shared
from tw_ampopt._shared_state import SharedState
from tw_ampopt._state_variable import are_local
from tw_ampopt._statistics import names_where, nonfinite, statistics
from tw_ampopt._updater import Reducer, Updater
from tw_core import canonical_device


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
          share: an optimizer of the same settings, whose slots, scale and counts
            of updates this one uses too.
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
        self._caller = f"tw_ampopt.Optimizer {name!r}"
        self._check_in_graph()
        self.name = name
        self.id = name.replace("/", ".")
        self.scope = tf.compat.v1.get_default_graph().unique_name(self.id)
        self.learning_rate = learning_rate
        self.minibatch_multiplier = minibatch_multiplier
        self.use_loss_scaling = use_loss_scaling
        self.loss_scaling_init = loss_scaling_init
        self.loss_scaling_inc = loss_scaling_inc
        self.loss_scaling_dec = loss_scaling_dec
        self.report_mem_usage = report_mem_usage
        self._settings = make_settings(
            caller=self._caller,
            prefix=self.scope.replace("/", "_"),
            tf_optimizer=tf_optimizer,
            learning_rate=learning_rate,
            rule=self._choose_rule(loss_scale),
            master_copies=master_copies,
            kwargs=kwargs,
        )
        self.optimizer_class = self._settings.factory
        self.optimizer_kwargs = dict(kwargs)
        self._options = make_options(
            caller=self._caller,
            minibatch_multiplier=minibatch_multiplier,
            on_nonfinite=on_nonfinite,
            clip_by_global_norm=clip_by_global_norm,
            reducer=reducer,
        )
        self._shared = self._share_with(share)
        self._towers: dict[str, DeviceGradients] = {}
        self._updaters: dict[tuple[int, ...], Updater] = {}
        self._last: tuple[Any, Sequence[str], Sequence[Sequence[Any]]] | None = None
        self._applied = False
        self._flags: tf.Tensor | None = None
        self._reset_op: tf.Operation | None = None
        self._graph = tf.compat.v1.get_default_graph()

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
          ValueError: no variable, one twice, or one on another device.
          TypeError: no tensor, or no variables.
        """
        caller = f"{self._caller}.register_gradients"
        if self._applied:
            raise RuntimeError(
                f"{caller}: comes after apply_updates, whose op would not see these "
                "gradients; register all of them first."
            )
        variables = check_call(loss, trainable_vars, caller=caller)
        grads = self._gradients(loss, variables)
        key = canonical_device(loss.device)
        tower = self._towers.setdefault(key, DeviceGradients(loss.device))
        tower.add(variables, grads)

    def apply_updates(self, allow_no_op: bool = False) -> tf.Operation:
        """Builds the op that takes in a micro-batch and updates all towers.

        Args:
          allow_no_op: whether no gradient at all gives an op that does nothing.

        Raises:
          RuntimeError: at the second call.
          ValueError: no gradients, or devices that differ in their variables.
        """
        caller = f"{self._caller}.apply_updates"
        if self._applied:
            raise RuntimeError(
                f"{caller}: was called before; keep the op that it returned."
            )
        towers = list(self._towers.values())
        if allow_no_op and not any(_has_gradient(tower) for tower in towers):
            self._applied = True
            return self._training_op([])
        if not towers:
            raise ValueError(
                f"{caller}: no gradients were registered; call register_gradients, or "
                "pass allow_no_op=True."
            )
        check_towers(towers, caller=caller)
        updated = self._step(
            [(key, tower.device) for key, tower in self._towers.items()],
            [tower.variables for tower in towers],
            [tower.in_order() for tower in towers],
            are_scaled=True,
        )
        self._applied = True
        return self._training_op([updated])

    def get_loss_scaling_var(self, device: str) -> tf.Variable | None:
        """Returns the variable that holds the log2 of the scale.

        All devices share it. The first that asks has it made, on its host.

        Args:
          device: where it is asked for.

        Returns:
          A float32 variable for the gradual rule, an int64 one for those that
          hold a whole exponent, None without scaling.
        """
        with self._scope():
            return self._shared.start(device).scale.log2

    def apply_loss_scaling(self, value: tf.Tensor) -> tf.Tensor:
        """Multiplies a tensor by the scale; returns it as it is without scaling."""
        self.get_loss_scaling_var(value.device)
        return self._shared.scaled(value)

    def undo_loss_scaling(self, value: tf.Tensor) -> tf.Tensor:
        """Multiplies a tensor by 1 / scale; returns it as it is without scaling."""
        self.get_loss_scaling_var(value.device)
        return self._shared.unscaled(value)

    @property
    def devices(self) -> list[str]:
        """The towers' devices, in the order of registration."""
        return [] if self._last is None else list(self._last[1])

    @property
    def reset_op(self) -> tf.Operation:
        """The op that ``reset_optimizer_state`` runs.

        Raises:
          RuntimeError: before ``apply_updates`` or ``apply_gradients``.
        """
        if self._reset_op is None:
            raise RuntimeError(
                f"{self._caller}.reset_op: there is no state yet; call apply_updates "
                "or apply_gradients first."
            )
        return self._reset_op

    def reset_optimizer_state(self) -> None:
        """Runs ``reset_op`` in the default session.

        Slots, accumulators and counts go back to the start; the scale stays.

        Raises:
          RuntimeError: no default session, or nothing to reset yet.
        """
        session = tf.compat.v1.get_default_session()
        if session is None:
            raise RuntimeError(
                f"{self._caller}.reset_optimizer_state: there is no default session; "
                "call it inside `with session.as_default():`, or run reset_op."
            )
        session.run(self.reset_op)

    def statistics(self) -> dict[str, tf.Tensor]:
        """Returns scalar tensors that tell of the state; fetch them between steps.

        Fetched together with a step they may be those before or after it.

        Raises:
          RuntimeError: before ``apply_updates`` or ``apply_gradients``.
        """
        self._check_built("statistics")
        updater = next(reversed(self._updaters.values()))
        with self._scope():
            return statistics(self._shared, updater, self.learning_rate)

    def nonfinite_gradients(self) -> tf.Tensor:
        """Returns [K, N] bool: which gradients of the micro-batch are not finite.

        Fetch it together with the training op; it costs nothing where it is not
        fetched. ``nonfinite_names`` turns its value into names.

        Raises:
          RuntimeError: before ``apply_updates`` or ``apply_gradients``.
        """
        grads, devices, _ = self._check_built("nonfinite_gradients")
        if self._flags is None:
            with self._scope():
                self._flags = nonfinite(grads, devices)
        return self._flags

    def nonfinite_names(self, flags: Any) -> list[list[str]]:
        """Names the variables that a value of ``nonfinite_gradients`` points at.

        Args:
          flags: [K, N] bool array.

        Returns:
          A list of names a tower.
        """
        _, _, variables = self._check_built("nonfinite_names")
        return names_where(flags, variables)

    def copy_to_replicas(self) -> tf.Operation:
        """Returns the op that gives all towers tower 0's variables and slots.

        Run it after restoring a checkpoint that holds one tower's only.

        Raises:
          RuntimeError: before ``apply_updates`` or ``apply_gradients``.
        """
        self._check_built("copy_to_replicas")
        updater = next(reversed(self._updaters.values()))
        with self._scope():
            return copy_from_first(updater) or tf.no_op()

    def compute_gradients(
        self,
        loss: tf.Tensor,
        var_list: Sequence[Any] | None = None,
        **options: Any,
    ) -> list[tuple[Any, Any]]:
        """Returns unscaled float32 gradients, for a caller that reduces them.

        Args:
          loss: scalar tensor, unscaled.
          var_list: by default the graph's trainable variables.
          **options: as ``tf.compat.v1.gradients`` takes them, and
            ``gate_gradients`` as v1 optimizers do.

        Returns:
          [N] (gradient or None, variable) pairs.

        Raises:
          ValueError: no variables.
        """
        variables = list(var_list or tf.compat.v1.trainable_variables())
        if not variables:
            raise ValueError(
                f"{self._caller}.compute_gradients: no variables; pass var_list, or "
                "make trainable variables first."
            )
        grads = self._gradients(loss, variables, **options)
        with tf.name_scope(f"{self.id}_grad"):
            return [
                (self._shared.unscaled_gradient(grad), variable)
                for grad, variable in zip(grads, variables, strict=True)
            ]

    def apply_gradients(
        self,
        grads_and_vars: Sequence[tuple[Any, Any]],
        global_step: tf.Variable | None = None,
        name: str | None = None,
    ) -> tf.Operation:
        """Builds the op that takes in a micro-batch which the caller has reduced.

        Args:
          grads_and_vars: [N] pairs as from ``compute_gradients``, perhaps averaged,
            clipped or cast since; None counts as zero.
          global_step: grows by 1 with every update, and with nothing else.
          name: of the op.

        Raises:
          ValueError: no gradient at all, or a variable that comes twice.
        """
        caller = f"{self._caller}.apply_gradients"
        pairs = check_pairs(grads_and_vars, caller=caller)
        variables = [variable for _, variable in pairs]
        device = common_device([as_tf_variable(variable) for variable in variables])
        updated = self._step(
            [(canonical_device(device), device)],
            [variables],
            [[[grad] for grad, _ in pairs]],
            are_scaled=False,
            after_update=_counts(global_step),
        )
        return tf.group(updated, name=name or f"{self.id}_update")

    def get_slot(self, var: Any, name: str) -> tf.Variable | None:
        """Returns the slot ``name`` of ``var`` in the wrapped optimizer, or None."""
        slots = [i.get_slot(var, name) for i in self._shared.inners.values()]
        return next((slot for slot in slots if slot is not None), None)

    def get_slot_names(self) -> list[str]:
        """Lists the names of the wrapped optimizer's slots."""
        inner = next(iter(self._shared.inners.values()), None)
        return [] if inner is None else inner.get_slot_names()

    def variables(self) -> list[tf.Variable]:
        """Lists scale, counts, slots and accumulators."""
        return [
            *self._shared.scalars.variables(),
            *self._shared.slots(),
            *(v for updater in self._updaters.values() for v in updater.state()),
        ]

    def _step(
        self,
        towers: Sequence[tuple[str, str]],
        variables: Sequence[Sequence[Any]],
        grads: Sequence[Any],
        *,
        are_scaled: bool,
        after_update: Callable[[], Any] | None = None,
    ) -> tf.Tensor:
        key = tuple(id(variable) for tower in variables for variable in tower)
        with self._scope():
            if key not in self._updaters:
                self._updaters[key] = Updater(
                    self._shared, self._options, towers, variables
                )
            updated = self._updaters[key].step(
                grads, are_scaled=are_scaled, after_update=after_update
            )
        self._last = grads, [device for _, device in towers], variables
        self._flags = None
        # Made now, as the graph may be finalised when it is wanted.
        self._reset_op = self._make_reset_op()
        return updated

    def _make_reset_op(self) -> tf.Operation:
        variables = self._shared.slots() + self._shared.scalars.counts()
        variables += [v for updater in self._updaters.values() for v in updater.state()]
        with self._scope():
            return tf.group(*(v.initializer for v in variables), name="Reset")

    def _gradients(
        self, loss: tf.Tensor, variables: Sequence[Any], **options: Any
    ) -> list[Any]:
        self._check_in_graph()
        tf_variables = [as_tf_variable(variable) for variable in variables]
        with self._scope():
            local = are_local(tf_variables)
            self._shared.start(tf_variables[0].device, local=local)
        gate = options.pop("gate_gradients", 0) == 1  # v1's GATE_OP
        with tf.name_scope(f"{self.id}_grad"), tf.device(loss.device or None):
            scaled = self._shared.scaled(tf.cast(loss, tf.float32))
            return list(
                tf.compat.v1.gradients(
                    scaled, tf_variables, gate_gradients=gate, **options
                )
            )

    def _choose_rule(self, loss_scale: ScaleRule | None) -> ScaleRule | None:
        if not self.use_loss_scaling:
            return loss_scale
        if loss_scale is not None:
            raise ValueError(
                f"{self._caller}: use_loss_scaling=True and loss_scale={loss_scale} "
                "are two rules for one scale; keep one of them."
            )
        return GradualScale(
            init=self.loss_scaling_init,
            increment=self.loss_scaling_inc,
            decrement=self.loss_scaling_dec,
        )

    def _share_with(self, share: "Optimizer | None") -> SharedState:
        if share is None:
            return make_shared(self._settings)
        if not isinstance(share, Optimizer):
            raise TypeError(
                f"{self._caller}: share takes a tw_ampopt.Optimizer; got {share!r}."
            )
        check_share(self._settings, share._settings)
        return share._shared

    @contextmanager
    def _scope(self) -> Iterator[None]:
        with ExitStack() as stack:
            if tf.executing_eagerly():  # the graph was left since
                stack.enter_context(self._graph.as_default())
            stack.enter_context(tf.name_scope(f"{self.scope}/"))
            yield

    def _training_op(self, deps: Sequence[tf.Tensor]) -> tf.Operation:
        with self._scope():
            return tf.group(*deps, name="TrainingOp")

    def _check_in_graph(self) -> None:
        if tf.executing_eagerly():
            raise RuntimeError(
                f"{self._caller}: builds a session graph; got eager mode. Use it "
                "inside tf.Graph().as_default(), or tw_ampopt.TowerOptimizer with "
                "tf.function."
            )

    def _check_built(
        self, method: str
    ) -> tuple[Any, Sequence[str], Sequence[Sequence[Any]]]:
        if self._last is None:
            raise RuntimeError(
                f"{self._caller}.{method}: nothing updates yet; call apply_updates or "
                "apply_gradients first."
            )
        return self._last


def _has_gradient(tower: DeviceGradients) -> bool:
    return any(grad is not None for calls in tower.in_order() for grad in calls)


def _counts(global_step: tf.Variable | None) -> Callable[[], Any] | None:
    if global_step is None:
        return None
    return lambda: global_step.assign_add(1, read_value=False)
