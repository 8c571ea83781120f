"""Where the steps of all towers meet: when optimizers apply and metrics are updated.

While a step is traced, and only then, the ``apply`` of the towers' optimizers and the
``update_state`` and ``result`` of their metrics are replaced. Tower 0's metrics are
updated once, with the arguments of all towers joined, and every tower gets tower 0's
results: so any metric has the same value as on one device.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import keras
import tensorflow as tf

from tw_builders.tower_model._batches import join
from tw_builders.tower_model._lockstep import meet, tower_index
from tw_builders.tower_model._updates import Brought, Update, apply_wrapped
from tw_builders.tower_model._wrapped import WrappedOptimizer
from tw_core import Tower
from tw_core.gradients import weigh
from tw_core.optimizers import keep_repeated_rows
from tw_reduce import Reducer, mean, sum_on_device

Apply = Callable[[Update, Sequence[Brought]], None]


class Meetings:
    """The calls for which the towers' steps meet, and how they are combined."""

    def __init__(
        self,
        towers: Sequence[Tower],
        models: Sequence[Any],
        apply: Apply,
        *,
        weights: Sequence[Any] | None,
        average: bool,
        reducer: Reducer,
        synchronized: Sequence[str] = (),
        appliers: Sequence[Any] = (),
    ) -> None:
        """Finds the optimizers and metrics of the models, which may all be one model.

        ``weights`` are [K], for gradients and losses. ``synchronized`` names layers
        through which one tower's loss reaches the others. ``appliers`` replace the
        models' optimizers: one per tower, or one for all.
        """
        self._appliers = appliers
        self._synchronized, self._weighed = synchronized, set[int]()
        self._towers, self._apply = towers, apply
        self._weights, self._average, self._reducer = weights, average, reducer
        self._optimizers = [optimizers_of(model) for model in models]
        self._metrics = [list(model.metrics) for model in models]
        self._shared = _state_of(models[0]) if models[0] is models[-1] else []

    @contextmanager
    def held(self) -> Iterator[None]:
        """Makes optimizers and metrics meet, in the towers' threads, while open."""
        replaced: dict[int, tuple[Any, str]] = {}

        def replace(owner: Any, method: str, new: Callable[..., Any]) -> None:
            # Set on the object, which keeps its class and so is saved as usual.
            key = hash((id(owner), method))
            if key not in replaced:
                replaced[key] = owner, method
                original = getattr(owner, method)
                setattr(owner, method, new(original))

        try:
            for own in self._optimizers:
                for n, optimizer in enumerate(own):
                    replace(optimizer, "apply", partial(_meeting, ("optimizer", n)))
                    if self._synchronized and self._weights is not None:
                        replace(optimizer, "scale_loss", partial(_weighing, n))
            for own in self._metrics:
                for n, metric in enumerate(own):
                    replace(metric, "update_state", partial(_meeting, ("metric", n)))
                    replace(metric, "result", partial(_meeting, ("result", n)))
            for variable in self._shared:
                replace(variable, "assign", _by_tower_0)
            yield
        finally:
            for owner, method in replaced.values():
                delattr(owner, method)

    def combine(self, place: tuple[str, int], brought: list[Any]) -> Sequence[Any]:
        """Performs once the call that all towers have reached; returns [K] answers."""
        kind, n = place
        if kind == "loss":
            self._weighed.add(n)
            return self._loss_factors()
        if kind == "optimizer":
            self._update(n, [_brought(*call) for call in brought])
        elif kind == "metric":
            self._update_metric(self._metrics[0][n], brought)
        else:
            return [self._metrics[0][n].result()] * len(brought)
        return [None] * len(brought)

    def logs(self, of_towers: Sequence[Any]) -> Any:
        """Merges the logs of the towers' steps: metrics once, other losses averaged."""
        if not isinstance(of_towers[0], dict):
            return of_towers[0]
        return {
            name: self._log([own[name] for own in of_towers]) for name in of_towers[0]
        }

    def _loss_factors(self) -> list[tf.Tensor]:
        """Returns [K] factors for losses before they are differentiated.

        They make the plain mean over the towers with rows the weighted one. Gradients
        through synchronised layers are already added over towers: too late for weights.
        """
        weights = [tf.cast(weight, tf.float64) for weight in self._weights or ()]
        some = tf.add_n([tf.cast(weight > 0, tf.float64) for weight in weights])
        unit = tf.math.divide_no_nan(some, tf.add_n(weights))
        return [weight * unit for weight in weights]

    def _update(self, n: int, brought: Sequence[Brought]) -> None:
        optimizers = self._appliers or [own[n] for own in self._optimizers]
        weights = self._weights
        if weights is not None and self._synchronized:
            if n not in self._weighed:
                raise ValueError(
                    f"TowerModel: {', '.join(self._synchronized)} are synchronised "
                    "over towers, whose losses must be weighed by their rows; have "
                    "your train_step differentiate self.optimizer.scale_loss(loss)."
                )
            weights = [tf.cast(weight > 0, tf.float32) for weight in weights]
        update = Update(self._towers, optimizers, weights, self._average, self._reducer)
        apply = self._apply
        if isinstance(optimizers[0], WrappedOptimizer):
            apply = apply_wrapped
        with keep_repeated_rows():
            apply(update, brought)

    def _update_metric(self, metric: Any, calls: Sequence[Any]) -> None:
        positional = [call[0] for call in calls]
        named = [dict(call[1]) for call in calls]
        weights = [own.pop("sample_weight", None) for own in named]
        adds = isinstance(metric, keras.metrics.Sum)
        with tf.device(self._towers[0].device):
            merge = partial(self._merged, adds=adds)
            values = tf.nest.map_structure(merge, *positional)
            options = tf.nest.map_structure(merge, *named)
            if weights[0] is not None:
                options["sample_weight"] = tf.nest.map_structure(
                    partial(self._merged, adds=True), *weights
                )
            metric.update_state(*values, **options)

    def _merged(self, *values: Any, adds: bool) -> Any:
        if values[0] is None or not tf.is_tensor(values[0]):
            return values[0]
        if values[0].shape.rank != 0:
            return join(values)
        if adds or not values[0].dtype.is_floating:
            return tf.add_n(list(values))
        return self._mean(values)

    def _mean(self, values: Sequence[Any]) -> Any:
        reducer: Reducer = partial(sum_on_device, device=self._towers[0].device)
        if self._average:
            reducer = mean(reducer, weights=self._weights)
        return reducer([[value] for value in values])[0][0]

    def _log(self, values: Sequence[Any]) -> Any:
        first = values[0]
        if all(value is first for value in values) or not tf.is_tensor(first):
            return first
        if first.shape.rank == 0 and first.dtype.is_floating:
            return self._mean(values)
        return first


def optimizers_of(model: Any) -> list[Any]:
    """Lists the Keras optimizers among a model's attributes, ordered by name."""
    held = [value for _, value in sorted(vars(model).items(), key=lambda item: item[0])]
    found = [own for own in held if isinstance(own, keras.optimizers.Optimizer)]
    return list({id(own): own for own in found}.values())


def _state_of(model: Any) -> list[Any]:
    """Lists untrained state that one tower updates, such as moving averages.

    Not random generators: towers advance these in turn, so that their numbers differ.
    """
    others = model.non_trainable_variables
    return [v for v in others if not is_seed(v)]


def is_seed(variable: Any) -> bool:
    """Returns whether a Keras variable is the state of a random generator."""
    return str(variable.path).endswith("seed_generator_state")


def _by_tower_0(assign: Callable[..., Any]) -> Callable[..., Any]:
    def method(value: Any, *arguments: Any, **named: Any) -> Any:
        return value if tower_index() else assign(value, *arguments, **named)

    return method


def _weighing(n: int, scale_loss: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def method(loss: Any) -> Any:
        scaled = scale_loss(loss)
        if tower_index() is None:
            return scaled
        factor = meet(("loss", n), None)
        # The mean loss over no rows is NaN.
        return weigh(scaled, factor)

    return method


def _meeting(
    place: tuple[str, int], original: Callable[..., Any]
) -> Callable[..., Any]:
    def method(*arguments: Any, **named: Any) -> Any:
        if tower_index() is None:
            return original(*arguments, **named)
        return meet(place, (arguments, named))

    return method


def _brought(arguments: tuple[Any, ...], named: dict[str, Any]) -> Brought:
    grads, variables = _apply_arguments(*arguments, **named)
    if variables is None:
        raise ValueError(
            "TowerModel: optimizer.apply needs the variables of the tower, as in "
            "optimizer.apply(gradients, self.trainable_variables)."
        )
    return Brought(list(grads), list(variables))


def _apply_arguments(grads: Any, trainable_variables: Any = None) -> tuple[Any, Any]:
    return grads, trainable_variables
