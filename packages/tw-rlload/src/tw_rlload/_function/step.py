"""One step in a ``tf.function``: towers' losses, and averaged gradients applied.

Every tower has its own model and optimizer (replicas, kept equal by equal gradients),
or all share one of each; or every tower has its own model, and the user's function
applies gradients with one optimizer.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import tensorflow as tf

from tw_core import Tower, map_towers
from tw_core.devices import canonical_device
from tw_core.internal import (
    are_alike,
    call_once,
    check_list,
    check_optimizer,
    create_slots,
    is_elementwise,
    is_variable,
    tf_variable,
    tf_variables,
)
from tw_rlload._loading.specs import WEIGHTS, ColumnSpec
from tw_rlload._training.gradients import Pairs, Update


class TowerOutput(NamedTuple):
    """The results of a tower in a step."""

    loss: tf.Tensor
    others: dict[str, tf.Tensor]  # scalars
    weight: tf.Tensor | None  # number of rows that are not pads; None without pads
    pairs: Pairs


class FunctionStep:
    """The models and optimizers of all towers, and a step with them."""

    def __init__(
        self,
        specs: Sequence[ColumnSpec],
        loss_fn: Callable[..., Any],
        models: Sequence[Any],
        optimizers: Sequence[Any],
        update: Update,
        *,
        trace: Literal["once", "each"],
        jit_compile: bool,
    ) -> None:
        """Checks the models, and makes the optimizers' variables."""
        towers, has_apply = update.towers, update.apply_fn is not None
        check_list(models=models, of="models", empty=True)
        check_list(optimizers=optimizers, of="optimizers", empty=True)
        _check_counts(len(towers), models, optimizers, has_apply=has_apply)
        for optimizer in optimizers:
            check_optimizer(optimizer)
        self._update, self._specs, self._loss_fn = update, specs, loss_fn
        self._trace, self._jit_compile = trace, jit_compile
        self._models = list(models) * (len(towers) // len(models))
        self._optimizers = list(optimizers)
        self._variables = [_trainable(model) for model in self._models]
        if update.memory is not None:
            update.memory.make(self._variables)
        if has_apply:
            _check_built(optimizers[0])
            return
        for tower, optimizer in zip(towers, optimizers, strict=False):
            with tf.device(tower.device):
                create_slots(optimizer, self._variables[tower.index])
            if jit_compile:
                _check_home(tower, optimizer, self._variables[tower.index])

    def __call__(self, rows: list[list[tf.Tensor]]) -> list[TowerOutput]:
        """Trains once on [K][C] rows; returns the towers' results."""
        towers = self._update.towers
        compiles_update = self._jit_compile and self._update.apply_fn is None
        optimizers = self._optimizers * (len(towers) // len(self._optimizers))
        outputs = map_towers(
            *(self._tower_output, towers, self._models, self._variables),
            *(optimizers, rows),
            trace=self._trace,
            jit_compile=self._jit_compile,
        )
        weights = [output.weight for output in outputs if output.weight is not None]
        is_scaled = not is_elementwise(self._update.reducer)  # It gets them unscaled.
        pairs = self._update.combine(
            [output.pairs for output in outputs],
            weights or None,
            bound=self._scaled_bound(self._optimizers[0]),
            own_variables=len({id(model) for model in self._models}) > 1,
            loss_scale=self._scale_of(self._optimizers[0]) if is_scaled else None,
            finishes=not compiles_update,
        )
        if compiles_update:
            self._apply_compiled(pairs, outputs)
            return outputs
        if self._update.apply_fn is not None:
            self._update.apply_once(pairs, self._variables, self._optimizers[0])
            return outputs
        owners = len(self._optimizers)
        map_towers(
            _apply_pairs,
            towers[:owners],
            self._optimizers,
            pairs[:owners],
            [output.pairs for output in outputs[:owners]],
            trace=self._trace if are_alike(self._optimizers) else "each",
        )
        return outputs

    def _tower_output(
        self,
        _: Tower,
        model: Any,
        variables: Sequence[Any],
        optimizer: Any,
        rows: Sequence[tf.Tensor],
    ) -> TowerOutput:
        inputs = {s.name: t for s, t in zip(self._specs, rows, strict=True)}
        weights = [inputs.pop(WEIGHTS.name)] if self._specs[-1] is WEIGHTS else []
        plain = tf_variables(variables)
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(plain)
            loss, others = _loss_and_others(self._loss_fn(model, inputs, *weights))
            scaled = _scaled(optimizer, loss)
        if hasattr(optimizer, "compute_gradients"):
            pairs = optimizer.compute_gradients(loss, var_list=plain)
        else:
            pairs = list(zip(tape.gradient(scaled, plain), variables, strict=True))
        weight = tf.reduce_sum(weights[0]) if weights else None
        return TowerOutput(loss, others, weight, pairs)

    def _apply_compiled(
        self, pairs: Sequence[Pairs], outputs: Sequence[TowerOutput]
    ) -> None:
        """Clips and applies in functions that XLA compiles, one per tower."""

        def apply(optimizer: Any, own: Pairs, computed: Pairs) -> None:
            grads, variables = zip(*own, strict=True)
            bound = self._scaled_bound(optimizer)
            done = self._update.finished(grads, variables, bound)
            pairs = list(zip(done, variables, strict=True))
            _apply_pairs(self._update.towers[0], optimizer, pairs, computed)

        computed = [output.pairs for output in outputs]
        items = list(zip(self._optimizers, pairs, computed, strict=False))
        scopes = [tower.scope for tower in self._update.towers]
        once = are_alike(self._optimizers)
        # A trace for a single tower may write variables that only its optimizer has.
        for own in (
            [slice(None)] if once else [slice(k, k + 1) for k in range(len(items))]
        ):
            call_once(
                *(apply, items[own], scopes[: len(items)][own]),
                outside=None if once else "",
                jit_compile=True,
            )

    def _scaled_bound(self, optimizer: Any) -> tf.Tensor | float | None:
        # The gradients are those of scaled losses. All optimizers have the same scale,
        # since all apply the same gradients.
        bound = self._update.bound
        scale = None if bound is None else self._scale_of(optimizer)
        # In float64, as the gradients may be.
        return bound if scale is None else tf.cast(scale, tf.float64) * bound

    @staticmethod
    def _scale_of(optimizer: Any) -> tf.Tensor | None:
        """Returns the scale of gradients; None where it computes and unscales them."""
        if hasattr(optimizer, "compute_gradients"):
            return None
        return _scaled(optimizer, tf.constant(1.0))


def _apply_pairs(_: Tower, optimizer: Any, pairs: Pairs, computed: Pairs) -> None:
    # An optimizer that computes gradients may need every variable, as tw_ampopt's do.
    # Keras's compute none, and warn about None.
    if hasattr(optimizer, "compute_gradients"):
        pairs = [*pairs, *((grad, v) for grad, v in computed if grad is None)]
    optimizer.apply_gradients(pairs)


def _check_counts(
    num_towers: int,
    models: Sequence[Any],
    optimizers: Sequence[Any],
    *,
    has_apply: bool,
) -> None:
    wanted = "one of each per tower, or one of each for all"
    counts = [(1, 1), (num_towers, num_towers)]
    if has_apply:
        wanted = "one model per tower, and a single optimizer for apply_fn"
        counts = [(num_towers, 1)]
    if (len(models), len(optimizers)) not in counts:
        raise ValueError(
            f"models and optimizers must be {wanted}; got {len(models)} models and "
            f"{len(optimizers)} optimizers for {num_towers} towers. tw_core.replicate "
            "makes the copies."
        )
    own = {id(item) for items in (models, optimizers) for item in items}
    if len(own) < len(models) + len(optimizers):
        raise ValueError(
            "A model or an optimizer was passed twice; every tower needs its own, or "
            "pass a single one of each for all towers."
        )


def _check_built(optimizer: Any) -> None:
    # In the loop of epochs a Keras optimizer cannot make its state.
    if not getattr(optimizer, "built", True):
        raise ValueError(
            f"{type(optimizer).__name__} must be built before apply_fn uses it; make "
            "it with tw_builders.make_sharded_optimizer, or call "
            "optimizer.build(variables) with the variables that apply_fn updates."
        )


def _check_home(tower: Tower, optimizer: Any, variables: Sequence[Any]) -> None:
    own = optimizer.variables
    state = tf_variables(own() if callable(own) else own)
    home = canonical_device(tower.device)
    away = sorted(
        f"{v.name} on {v.device}"
        for v in [*tf_variables(variables), *state]
        if canonical_device(v.device) != home
    )
    if away:
        raise ValueError(
            f"jit_compile=True: {tower.name} must write only variables on its device, "
            f"{home}; got {', '.join(away)}. Make optimizers there, as "
            "tw_core.map_towers(lambda tower: keras.optimizers.Adam(), towers) does, "
            "or use jit_compile=False."
        )


def _trainable(model: Any) -> list[Any]:
    if not hasattr(model, "trainable_variables"):
        raise TypeError(
            "models must hold objects with trainable_variables, such as Keras models "
            f"and tf.Modules; got {model!r:.80} ({type(model).__name__})."
        )
    variables = list(model.trainable_variables)
    others = [
        variable
        for variable in variables
        if not is_variable(variable)
        or tf.is_symbolic_tensor(tf_variable(variable).handle)
    ]
    if others:
        raise TypeError(
            f"{type(model).__name__}.trainable_variables must hold variables made "
            f"outside of graphs; got {others!r:.200}."
        )
    if not variables:
        raise ValueError(
            f"{type(model).__name__} has no trainable variables; build it first (a "
            "Keras model: model.build(input_shape))."
        )
    return variables


def _loss_and_others(returned: Any) -> tuple[tf.Tensor, dict[str, tf.Tensor]]:
    loss, others = returned if isinstance(returned, tuple) else (returned, {})
    scalars: Mapping[str, Any] = {"loss": loss, **others}
    shapes = {
        name: str(value.shape) if tf.is_tensor(value) else type(value).__name__
        for name, value in scalars.items()
        if not (tf.is_tensor(value) and value.shape.rank == 0)
    }
    if shapes:
        raise ValueError(
            "loss_fn must return a scalar loss, or (loss, dictionary of scalars); got "
            f"{shapes}. Average over rows, with remainder='pad' by "
            "tw_rlload.weighted_mean."
        )
    return loss, dict(others)


def _scaled(optimizer: Any, loss: tf.Tensor) -> tf.Tensor:
    # Keras optimizers with loss scaling unscale the gradients when they apply them.
    scale = getattr(optimizer, "scale_loss", None)
    return scale(loss) if scale else loss
