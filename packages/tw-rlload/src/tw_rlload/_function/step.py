"""One step in a ``tf.function``: every tower's loss, averaged gradients, applied.

Every tower has a model and an optimizer of its own (replicas, kept equal by
equal gradients), or all share one of each.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tw_core import Tower, map_towers
from tw_core.checks import check_list
from tw_reduce import Reducer
from tw_rlload._check_towers import check_optimizer
from tw_rlload._loading.load import WEIGHTS
from tw_rlload._loading.specs import ColumnSpec
from tw_rlload._training.gradients import Pairs, combine_gradients

_NAME = "EpochFunction"

# (model, inputs) or, with pads, (model, inputs, weights) -> loss, or a pair of the
# loss and a dictionary of other scalars.
LossFn = Callable[..., Any]


class TowerOutput(NamedTuple):
    """What a tower gives in a step.

    Attributes:
      loss: scalar.
      others: other scalars, by name.
      weight: float32 scalar, rows that count; None without pads.
      pairs: [N] (gradient or None, variable).
    """

    loss: tf.Tensor
    others: dict[str, tf.Tensor]
    weight: tf.Tensor | None
    pairs: Pairs


class FunctionStep:
    """The models and optimizers of all towers, and a step with them."""

    def __init__(
        self,
        towers: Sequence[Tower],
        specs: Sequence[ColumnSpec],
        loss_fn: LossFn,
        models: Sequence[Any],
        optimizers: Sequence[Any],
    ) -> None:
        """Checks the models, and makes the optimizers' variables.

        Args:
          towers: K towers.
          specs: C columns.
          loss_fn: see ``LossFn``.
          models: K of them, or one for all towers; with ``trainable_variables``.
          optimizers: as many, with ``apply_gradients``.

        Raises:
          ValueError: another number of models or optimizers, no variables, or
            variables that two models share.
          TypeError: no lists, or something in them that is no model or optimizer.
        """
        check_list(_NAME, models=models, of="models", empty=True)
        check_list(_NAME, optimizers=optimizers, of="optimizers", empty=True)
        _check_counts(len(towers), models, optimizers)
        for optimizer in optimizers:
            check_optimizer(optimizer, caller=_NAME)
        self._towers, self._specs, self._loss_fn = towers, specs, loss_fn
        self._models = list(models) * (len(towers) // len(models))
        self._optimizers = list(optimizers)
        self._owners = list(towers)[: len(optimizers)]
        self._variables = [_trainable(model) for model in self._models]
        if len(optimizers) > 1:
            _check_own(self._variables)
        map_towers(self._make_state, self._owners, self._optimizers)

    def losses(self, rows: list[list[tf.Tensor]]) -> list[TowerOutput]:
        """Computes each tower's loss and gradients on its device.

        Args:
          rows: [K][C].
        """
        return map_towers(self._tower_output, self._towers, self._models, rows)

    def apply(
        self,
        outputs: Sequence[TowerOutput],
        *,
        reducer: Reducer,
        grad_norm_clipping: float | None,
    ) -> None:
        """Averages the gradients and applies them with every optimizer.

        Args:
          outputs: K of them.
          reducer: gives every tower the mean.
          grad_norm_clipping: bound of the global norm, or None.
        """
        weights = [output.weight for output in outputs if output.weight is not None]
        pairs = combine_gradients(
            [output.pairs for output in outputs],
            reducer=reducer,
            tower_weights=weights or None,
            grad_norm_clipping=self._scaled_bound(grad_norm_clipping),
            caller=_NAME,
        )
        owners = len(self._owners)
        map_towers(
            _apply_pairs,
            self._owners,
            self._optimizers,
            pairs[:owners],
            [output.pairs for output in outputs[:owners]],
        )

    def _tower_output(
        self, tower: Tower, model: Any, rows: Sequence[tf.Tensor]
    ) -> TowerOutput:
        inputs = {s.name: t for s, t in zip(self._specs, rows, strict=True)}
        weights = [inputs.pop(WEIGHTS.name)] if self._specs[-1] is WEIGHTS else []
        variables = self._variables[tower.index]
        optimizer = self._optimizers[tower.index % len(self._optimizers)]
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch([_raw(variable) for variable in variables])
            loss, others = _loss_and_others(self._loss_fn(model, inputs, *weights))
            scaled = _scaled(optimizer, loss)
        if hasattr(optimizer, "compute_gradients"):
            raw = [_raw(variable) for variable in variables]
            pairs = optimizer.compute_gradients(loss, var_list=raw)
        else:
            grads = tape.gradient(scaled, [_raw(variable) for variable in variables])
            pairs = list(zip(grads, variables, strict=True))
        weight = tf.reduce_sum(weights[0]) if weights else None
        return TowerOutput(loss, others, weight, pairs)

    def _scaled_bound(self, bound: float | None) -> tf.Tensor | float | None:
        # The gradients are those of scaled losses. All optimizers have one scale, as
        # all see the same gradients.
        if bound is None or hasattr(self._optimizers[0], "compute_gradients"):
            return bound
        return _scaled(self._optimizers[0], tf.constant(bound))

    def _make_state(self, tower: Tower, optimizer: Any) -> None:
        variables = self._variables[tower.index]
        if hasattr(optimizer, "build"):
            optimizer.build(variables)
            return

        def apply_nothing() -> None:
            zeros = [(tf.zeros_like(_raw(v)), _raw(v)) for v in variables]
            optimizer.apply_gradients(zeros)

        # A v1 optimizer makes its slots when it first applies. Tracing alone, with
        # nothing run, makes them outside of the loop's body, where they could not be.
        tf.function(apply_nothing, autograph=False).get_concrete_function()


def _apply_pairs(tower: Tower, optimizer: Any, pairs: Pairs, computed: Pairs) -> None:
    del tower  # Its scope is in force already.
    # Who computes gradients may want to hear of every variable. Keras optimizers
    # compute none, and warn of None.
    if hasattr(optimizer, "compute_gradients"):
        pairs = [*pairs, *((grad, v) for grad, v in computed if grad is None)]
    optimizer.apply_gradients(pairs)


def _check_counts(
    num_towers: int, models: Sequence[Any], optimizers: Sequence[Any]
) -> None:
    if len(models) != len(optimizers) or len(models) not in (1, num_towers):
        raise ValueError(
            f"{_NAME}: wants one model and one optimizer a tower ({num_towers} of "
            f"each), or one of each for all; got {len(models)} models and "
            f"{len(optimizers)} optimizers. tw_core.replicate makes the copies."
        )
    own = {id(item) for items in (models, optimizers) for item in items}
    if len(own) < 2 * len(models):
        raise ValueError(
            f"{_NAME}: a model or an optimizer is given twice; every tower needs its "
            "own, or pass a single one of each for all towers."
        )


def _check_own(variables: Sequence[Sequence[Any]]) -> None:
    """Refuses a variable in two towers' models: each would update it."""
    owners: dict[int, tuple[str, list[int]]] = {}
    for k, own in enumerate(variables):
        for variable in own:
            owners.setdefault(id(_raw(variable)), (variable.name, []))[1].append(k)
    shared = [
        f"{name!r} is in the models of towers {', '.join(map(str, towers))}"
        for name, towers in owners.values()
        if len(towers) > 1
    ]
    if shared:
        raise ValueError(
            f"{_NAME}: every tower's optimizer would update a variable that models "
            f"share: {'; '.join(shared)}. Make each model's own, as tw_core.replicate "
            "does, or pass a single model and optimizer for all towers."
        )


def _trainable(model: Any) -> list[Any]:
    if not hasattr(model, "trainable_variables"):
        raise TypeError(
            f"{_NAME}: models must hold objects with trainable_variables, as Keras's "
            f"and tf.Module's are; got {model!r:.80} ({type(model).__name__})."
        )
    variables = list(model.trainable_variables)
    strangers = [v for v in variables if not _is_eager(v)]
    if strangers:
        raise TypeError(
            f"{_NAME}: {type(model).__name__}.trainable_variables must hold variables "
            f"made outside of graphs; got {strangers!r:.200}."
        )
    if not variables:
        raise ValueError(
            f"{_NAME}: {type(model).__name__} has no trainable variables; build it "
            "first (a Keras model: model.build(input_shape))."
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
            f"{_NAME}: loss_fn must return a scalar loss, or (loss, dictionary of "
            f"scalars); got {shapes}. Average over rows, with tail='pad' by "
            "tw_rlload.weighted_mean."
        )
    return loss, dict(others)


def _raw(variable: Any) -> tf.Variable:
    return variable if isinstance(variable, tf.Variable) else variable.value


def _is_eager(variable: Any) -> bool:
    held = getattr(variable, "value", None)  # of Keras's
    held = variable if isinstance(variable, tf.Variable) else held
    return isinstance(held, tf.Variable) and not tf.is_symbolic_tensor(held.handle)


def _scaled(optimizer: Any, loss: tf.Tensor) -> tf.Tensor:
    # Keras optimizers with loss scaling undo it when they apply.
    scale = getattr(optimizer, "scale_loss", None)
    return scale(loss) if scale else loss
