"""Where the steps of all towers meet: when optimizers apply and metrics are updated.

While a step is traced, and only then, the ``apply`` of tower 0's optimizers and the
``update_state`` and ``result`` of its metrics are replaced. The metrics are updated
once, with the arguments of all towers joined, and every tower gets their results: so
any metric has the same value as on one device. The optimizers are the ones that update,
too: the other towers have their state alone. Of a step that runs eagerly, on a whole
batch, only what other towers or ranks have a part in is replaced.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import keras
import tensorflow as tf

from tw_builders.internal import owned
from tw_core import Tower
from tw_core.gradients import join_rows, split_rows, values_of, weigh
from tw_core.optimizers import create_slots, keep_repeated_rows
from tw_core.tracing import is_same_in_towers, may_meet, meet
from tw_core.variables import is_variable
from tw_keras._accumulation import Accumulation, Told, accumulates, keeps_dtype
from tw_keras._batches import join
from tw_keras._checks import optimizers_of
from tw_keras._over_ranks.exchanges import (
    AccumulatedExchange,
    for_towers,
    make_parts,
    to_travel,
)
from tw_keras._over_ranks.ranks import Ranks
from tw_keras._updates import (
    Brought,
    Update,
    apply_replicated,
    apply_sharded,
    apply_wrapped,
    build_for_owners,
    with_rows_added,
)
from tw_keras._wrapped import WrappedOptimizer
from tw_reduce import Reducer, mean, sum_on_device

Apply = Callable[[Update, Sequence[Brought]], None]


class Meetings:
    """The calls for which the towers' steps meet, and how they are combined."""

    def __init__(
        self,
        towers: Sequence[Tower],
        model: Any,
        apply: Apply,
        *,
        of_towers: Callable[[Sequence[Any]], Sequence[Sequence[Any]]],
        alone: bool = False,
        weights: Sequence[Any] | None,
        average: bool,
        reducer: Reducer | None,
        states: Callable[[Any, Sequence[Any]], Sequence[Any]],
        accumulation: Accumulation,
        synchronized: Sequence[str] = (),
        applier: Any = None,
        lent: Any = None,
        divides_by_weights: bool = False,
        ranks: Ranks | None = None,
        checksum: Any = None,
        share: Callable[[], tf.Tensor] | None = None,
        trains: bool = True,
    ) -> None:
        """Finds the optimizers and metrics of ``model``, tower 0's.

        ``of_towers`` returns [K] lists of what towers have for variables of tower 0;
        ``alone``: tower 0 alone runs, for all. ``weights`` are [K], for gradients and
        losses. ``states`` makes the towers' states of an optimizer; ``accumulation``
        has their sums of gradients that are not yet reduced. ``synchronized`` names
        layers through which one tower's loss reaches the others. ``applier`` replaces
        tower 0's optimizer. The last ``lent`` towers have no rows of their own.
        ``divides_by_weights``: losses are divided by the sum of their sample weights.
        ``ranks`` reduce gradients with other processes, which compare the ``checksum``
        of a batch that all have; ``share`` returns the part of a batch's rows that is
        this rank's. They take part in a step that ``trains``.
        """
        self._ranks, self._checksum, self._share = ranks, checksum, share
        self._trains = trains
        self._graph = tf.compat.v1.get_default_graph()  # of the step
        self._lent, self._divides_by_weights = lent, divides_by_weights
        self._states, self._applier = states, applier
        self._accumulation = accumulation
        self._synchronized, self._weighed = synchronized, set[int]()
        self.factors: Sequence[Any] = ()  # the running tower's part of losses, or none
        self._towers, self._apply = towers, apply
        self._weights, self._average, self._reducer = weights, average, reducer
        self._of_towers, self._alone = of_towers, alone
        self._optimizers, self._metrics = optimizers_of(model), list(model.metrics)
        self._loss = getattr(model, "_compile_loss", None)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Makes optimizers and metrics meet, in a tower's step, while open."""
        replaced: dict[int, tuple[Any, str, Any]] = {}

        def replace(owner: Any, method: str, new: Callable[..., Any]) -> None:
            # Set on the object, which keeps its class and so is saved as usual.
            key = hash((id(owner), method))
            if key not in replaced:
                replaced[key] = owner, method, vars(owner).get(method)
                original = getattr(owner, method)
                setattr(owner, method, new(original))

        try:
            for n, optimizer in enumerate(self._optimizers):
                if self._weighs_losses(optimizer):
                    replace(optimizer, "scale_loss", partial(self._weighing, n))
                replace(optimizer, "apply", partial(_applying, n))
            if not self._alone or self._ranks is not None:
                for n, metric in enumerate(self._metrics):
                    replace(metric, "update_state", partial(_updating, n))
            if not self._alone:
                for n, metric in enumerate(self._metrics):
                    replace(metric, "result", partial(_showing, n))
            if self._divides_by_weights and self._loss:
                replace(self._loss, "call", partial(_dividing, self._loss))
            yield
        finally:
            for owner, method, own_method in replaced.values():
                delattr(owner, method)
                if own_method is not None:  # set on the object before
                    setattr(owner, method, own_method)

    def _updates_others(self, optimizer: Any) -> bool:
        """Returns whether an update needs more than the tower whose step runs."""
        is_alone = self._alone and self._ranks is None and self._applier is None
        is_wrapped = isinstance(optimizer, WrappedOptimizer)
        return not is_alone or is_wrapped or self._apply is apply_sharded

    def combine(self, place: tuple[str, int], brought: list[Any]) -> Sequence[Any]:
        """Performs once the call that all towers have reached; returns [K] answers."""
        kind, n = place
        if kind == "divisor":
            return self._divisor_factors(brought)
        if kind == "optimizer":
            calls = [Brought(_joined(own), *more) for own, *more in brought]
            self._update(n, self._of_own_rows(calls))
        elif kind == "metric":
            self._update_metric(self._metrics[n], brought)
        else:
            return [_as_tensors(self._metrics[n].result())] * len(brought)
        return [None] * len(brought)

    def logs(self, of_towers: Sequence[Any]) -> Any:
        """Merges the logs of the towers' steps: metrics once, other losses averaged."""
        if not isinstance(of_towers[0], dict):
            return of_towers[0]
        return {
            name: self._log([own[name] for own in of_towers]) for name in of_towers[0]
        }

    def _weighs_losses(self, optimizer: Any) -> bool:
        """Returns whether losses have their towers' weights before they are scaled.

        Scaled means over a tower's own rows have K times one device's gradients, and
        overflow sooner. Those that pass synchronised layers are added over towers.
        """
        is_one = self._alone or len(self._towers) == 1
        if not self._average or (is_one and self._ranks is None):
            return False
        return scales_losses(optimizer) or (
            bool(self._synchronized) and self._weights is not None
        )

    def loss_factors(self) -> list[tf.Tensor]:
        """Returns [K] parts of the whole batch's loss that are the towers'.

        Empty where no optimizer asks for them.
        """
        if not self._trains or not any(map(self._weighs_losses, self._optimizers)):
            return []
        equal = [1] * (1 if self._alone else len(self._towers))
        weights = [tf.cast(own, tf.float64) for own in self._weights or equal]
        total = tf.add_n(weights)
        if self._ranks is not None:
            [total] = self._ranks.sum_layer("weights of losses", [total])
        self._loss_factors = [tf.math.divide_no_nan(own, total) for own in weights]
        return self._loss_factors

    def _weighing(self, n: int, scale_loss: Callable[[Any], Any]) -> Any:
        """Multiplies losses by their weights first; ``n`` is the optimizer's place."""

        def method(loss: Any) -> Any:
            if may_meet() and self.factors:
                self._weighed.add(n)
                loss = weigh(loss, self.factors[0])  # NaN, of a mean over no rows, to 0
            return scale_loss(loss)

        return method

    def _divisor_factors(self, sums: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Returns [K] factors that make losses divided by ``sums`` means over rows.

        Losses of other divisors may stand beside them: all are averaged by rows.
        """
        sums = [tf.cast(own, tf.float64) for own in self._own(sums)]
        rows = [tf.cast(own, tf.float64) for own in self._weights or [1] * len(sums)]
        totals = tf.stack([tf.add_n(rows), tf.add_n(sums)])
        if self._ranks is not None and self._trains:
            [totals] = self._ranks.sum_layer("divisors of losses", [totals])
        elif self._ranks is not None and self._ranks.shares_data:
            raise ValueError(
                "TowerModel: a loss with reduction='mean_with_sample_weight' divides "
                "by a sum that one rank does not know where it validates on shared "
                "data; use 'sum_over_batch_size', or data='own'."
            )
        per_row = tf.math.divide_no_nan(totals[0], totals[1])
        return [
            tf.math.divide_no_nan(own, of_tower) * per_row
            for own, of_tower in zip(sums, rows, strict=True)
        ]

    def _update(self, n: int, brought: Sequence[Brought]) -> None:
        weights, averages = self._weights, self._average
        if n in self._weighed:
            brought, weights, averages = self._of_weighed(n, brought)
        elif self._weighed and scales_losses(self._optimizers[n]):
            raise ValueError(
                "TowerModel: a train_step scales a loss with one optimizer, and has "
                f"another, {self._optimizers[n].name}, apply gradients without its "
                "scale_loss, so whether these are weighed by rows is not known; "
                "differentiate scale_loss(loss) of the optimizer that applies."
            )
        elif weights is not None and self._synchronized:
            raise ValueError(
                f"TowerModel: {', '.join(self._synchronized)} are synchronised "
                "over towers, whose losses must be weighed by their rows; have "
                "your train_step differentiate self.optimizer.scale_loss(loss)."
            )
        if self._ranks is None and self._alone:
            if self._updates_others(self._optimizers[n]):
                self.apply_reduced(n, brought)
            elif self._reducer is not None:  # one that was given
                self._apply_to(n, brought, None, averages=averages)
            else:
                self._optimizers[n].apply(brought[0].grads, brought[0].variables)
            return
        if self._ranks is None:
            if len(brought) > 1 and self._accumulates(n, brought):
                self._accumulate(n, brought, weights, averages=averages)
                return
            brought = with_rows_added(brought, weights)
            self._apply_to(n, brought, weights, averages=averages)
            return
        if self._graph is not tf.compat.v1.get_default_graph():
            raise ValueError(
                "TowerModel: with a group an optimizer cannot apply in a tf.cond: one "
                "rank does not know the branch of another; apply in every step, or use "
                "the optimizer's gradient_accumulation_steps. With run_eagerly it "
                "cannot apply in a tf.function either."
            )
        if self._accumulates(n, brought):
            self._accumulate(n, brought, weights, averages=weights is not None)
            return
        total = tf.zeros([])
        if weights is not None:
            total = tf.add_n([tf.cast(own, tf.float32) for own in weights])
        reduced = self._ranks.reduce(
            *(n, brought, weights, total),
            add=cast(Reducer, self._reducer),
            checksum=self._checksum,
        )
        self.apply_reduced(n, reduced)

    def apply_reduced(self, n: int, brought: Sequence[Brought]) -> None:
        """Applies gradients that are equal in all towers, or of one for all."""
        if len(brought) < len(self._towers):
            (own,) = brought
            every = self._of_towers(own.variables)
            brought = [Brought(own.grads, variables) for variables in every]
        self._apply_to(n, brought, None, averages=False, is_reduced=True)

    def _apply_to(
        self,
        n: int,
        brought: Sequence[Brought],
        weights: Any,
        *,
        averages: bool,
        is_reduced: bool = False,
    ) -> None:
        optimizer = self._applier or self._optimizers[n]
        update = Update(
            *(self._towers, optimizer, self._states, weights),
            average=averages,
            reducer=self._reducer,
            is_reduced=is_reduced,
        )
        apply = self._apply
        if isinstance(optimizer, WrappedOptimizer):
            apply = apply_wrapped
        with keep_repeated_rows():
            apply(update, brought)

    def _accumulates(self, n: int, brought: Sequence[Brought]) -> bool:
        """Returns whether towers add up what an optimizer is to accumulate."""
        optimizer, variables = self._optimizers[n], brought[0].variables
        # Their sum times a scale may overflow where one gradient does not.
        is_narrow = scales_losses(optimizer) and not keeps_dtype(variables)
        overwrite = any(getattr(v, "overwrite_with_gradient", False) for v in variables)
        return accumulates(optimizer) and not (is_narrow or overwrite)

    def _accumulate(
        self, n: int, brought: Sequence[Brought], weights: Any, *, averages: bool
    ) -> None:
        """Adds gradients up in each tower; applies what is due, or zeros."""
        used = [
            m
            for m in range(len(brought[0].grads))
            if any(own.grads[m] is not None for own in brought)
        ]
        parts = []
        for k, own in enumerate(brought):
            with tf.device(self._towers[k].device):
                grads = [_dense(own.grads[m], own.variables[m]) for m in used]
                if weights is not None:
                    grads = [weigh(grad, weights[k]) for grad in grads]
                parts.append(grads)
        total: Any = len(brought) if averages else 1
        if weights is not None:
            total = tf.add_n([tf.cast(own, tf.float64) for own in weights])
        is_finite = tf.constant(True)
        if isinstance(self._optimizers[n], keras.optimizers.LossScaleOptimizer):
            is_finite = _are_finite(parts)
        told = Told(total, tf.constant(True), is_finite)
        exchange = AccumulatedExchange(n, brought, used, averages)
        self.apply_reduced(n, self._collect(exchange, parts, told))

    def collect_none(self, exchange: AccumulatedExchange) -> list[Brought]:
        """Takes part in an update by other ranks, with what this one has added up."""
        told = Told(0, tf.constant(False), tf.constant(True))
        return self._collect(exchange, make_parts(exchange), told)

    def _collect(
        self, exchange: AccumulatedExchange, parts: Sequence[Any], told: Told
    ) -> list[Brought]:
        brought, ranks = exchange.brought, self._ranks
        optimizer = self._applier or self._optimizers[exchange.place]
        self._build(optimizer, brought)
        if ranks is not None:
            told = ranks.tell(exchange, told, self._checksum)
        homes = self._homes(optimizer, exchange)
        add = cast(Reducer, self._reducer)

        def reduce(sums: Sequence[Sequence[Any]]) -> Sequence[Sequence[Any]]:
            if ranks is not None:
                rows = [ranks.sum_accumulated(exchange, add(sums)[0])] * len(sums)
            elif self._apply is apply_replicated:
                return add(sums)
            else:
                rows = [_added(sums, homes, self._towers)] * len(sums)
            return [
                [own if k in at else None for own, at in zip(row, homes, strict=True)]
                for k, row in enumerate(rows)
            ]

        grads = self._accumulation.collect(
            optimizer, exchange.variables, parts, told, reduce
        )
        rows = [
            [grads[k if k in at else at[0]][m] for m, at in enumerate(homes)]
            for k in range(len(brought))
        ]
        return for_towers(rows, exchange)

    def _homes(
        self, optimizer: Any, exchange: AccumulatedExchange
    ) -> list[Sequence[int]]:
        """Lists for each gradient the towers that apply it."""
        every = range(len(exchange.brought))
        if self._apply is not apply_sharded or len(every) == 1:
            at = every if self._apply is apply_replicated else range(1)
            return [at] * len(exchange.used)
        columns = [own.variables for own in exchange.brought]
        owners = owned(columns, optimizer)
        return [[k for k in every if columns[k][m] is owners[m]] for m in exchange.used]

    def _build(self, optimizer: Any, brought: Sequence[Brought]) -> None:
        if optimizer.built:
            return
        variables = brought[0].variables
        if self._apply is apply_sharded:
            build_for_owners(optimizer, self._towers, self._of_towers(variables))
        elif self._apply is apply_replicated:
            self._states(optimizer, variables)
        else:
            with tf.init_scope():
                create_slots(optimizer, variables)

    def _update_metric(self, metric: Any, calls: Sequence[Any]) -> None:
        positional = [call[0] for call in calls]
        named = [dict(call[1]) for call in calls]
        weights = [own.pop("sample_weight", None) for own in named]
        adds = isinstance(metric, keras.metrics.Sum)
        with tf.device(self._towers[0].device):
            merge = partial(self._merged, adds=adds)
            values = tf.nest.map_structure(merge, *positional)
            masks = tf.nest.map_structure(merge, *[call[2] for call in calls])
            for value, mask in zip(
                tf.nest.flatten(values), tf.nest.flatten(masks), strict=True
            ):
                if mask is not None:
                    value._keras_mask = mask  # as Keras's layers leave it
            options = tf.nest.map_structure(merge, *named)
            if weights[0] is not None:
                options["sample_weight"] = tf.nest.map_structure(
                    partial(self._merged, adds=True), *weights
                )
            elif self._share is not None and _takes_a_mean(metric, values):
                options["sample_weight"] = self._share()
            metric.update_state(*values, **options)

    def _merged(self, *values: Any, adds: bool) -> Any:
        if values[0] is None or not tf.is_tensor(values[0]):
            return values[0]
        if values[0].shape.rank != 0:
            return join(values, self._lent)
        if adds or not values[0].dtype.is_floating:
            return tf.add_n(self._own(values))
        return self._mean(values)

    def _own(self, values: Sequence[Any]) -> list[Any]:
        """Replaces by 0 what towers without rows of their own have counted."""
        if self._lent is None:
            return list(values)
        rows = len(values) - self._lent
        none = tf.zeros_like(values[0])
        return [tf.where(k < rows, own, none) for k, own in enumerate(values)]

    def _of_own_rows(self, brought: Sequence[Brought]) -> Sequence[Brought]:
        """Replaces by 0 gradients that are added, of towers without rows."""
        if self._lent is None or self._average:  # by weight
            return brought
        rows = len(brought) - self._lent
        return _times(brought, [tf.less(k, rows) for k in range(len(brought))])

    def _of_weighed(
        self, n: int, brought: Sequence[Brought]
    ) -> tuple[Sequence[Brought], Sequence[Any] | None, bool]:
        """Returns gradients of losses that had their weights, and how to add them.

        An optimizer over towers weighs them itself, over several batches too.
        """
        weights = self._weights
        if self._ranks is None and isinstance(self._optimizers[n], WrappedOptimizer):
            undone = [
                tf.math.reciprocal_no_nan(factor) for factor in self._loss_factors
            ]
            return _times(brought, undone), weights, self._average
        if weights is not None:  # Of NaN, too, a loss of the weight 0 has gradients.
            brought = _times(brought, [weight > 0 for weight in weights])
        return brought, None, False

    def _mean(self, values: Sequence[Any]) -> Any:
        reducer: Reducer = partial(sum_on_device, device=self._towers[0].device)
        if self._average:
            reducer = mean(reducer, weights=self._weights)
        else:
            values = self._own(values)
        # Where a tower is known to have no rows, Keras's loss is an empty list of them.
        values = [own if own.shape.rank == 0 else tf.reduce_sum(own) for own in values]
        merged = reducer([[value] for value in values])[0][0]
        if self._share is None or self._average:
            return merged
        # Ranks' results are averaged by rows in the end; a sum is that of all.
        share = tf.cast(self._share(), merged.dtype)
        return tf.math.divide_no_nan(merged, share)

    def _log(self, values: Sequence[Any]) -> Any:
        first = values[0]
        # A learning rate; before Keras 3.7 its class is not ``keras.Variable``.
        if is_variable(first) and not isinstance(first, tf.Variable):
            return tf.convert_to_tensor(first)
        if all(value is first for value in values) or not tf.is_tensor(first):
            return first
        if first.shape.rank == 0 and first.dtype.is_floating:
            return self._mean(values)
        return first


def scales_losses(optimizer: Any) -> bool:
    """Returns whether an optimizer of Keras takes gradients of scaled losses."""
    has_own = type(optimizer).scale_loss is not keras.optimizers.Optimizer.scale_loss
    return has_own or optimizer.loss_scale_factor is not None


def _dividing(loss: Any, call: Callable[..., Any]) -> Callable[..., Any]:
    """Makes a compiled model's losses, each divided by its weights, means over rows."""

    def method(y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        if not may_meet():
            return call(y_true, y_pred, sample_weight)
        if not loss.built:
            loss.build(y_true, y_pred)
        plain = loss._flat_losses
        loss._flat_losses = [
            own._replace(loss=_divided(n, own.loss)) for n, own in enumerate(plain)
        ]
        try:
            return call(y_true, y_pred, sample_weight)
        finally:
            loss._flat_losses = plain

    return method


def _divided(n: int, plain: Callable[..., Any]) -> Callable[..., Any]:
    def loss(y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        value = plain(y_true, y_pred, sample_weight)
        if sample_weight is None:  # a mean over rows already
            return value
        total = tf.reduce_sum(tf.cast(sample_weight, tf.float64))
        factor = meet(("divisor", n), total, answer=tf.TensorSpec([], tf.float64))
        return weigh(value, factor)

    return loss


def _applying(n: int, original: Callable[..., Any]) -> Callable[..., Any]:
    def method(*arguments: Any, **named: Any) -> Any:
        if not may_meet():
            return original(*arguments, **named)
        return meet(("optimizer", n), _brought(*arguments, **named), waits=True)

    return method


def _updating(n: int, original: Callable[..., Any]) -> Callable[..., Any]:
    def method(*arguments: Any, **named: Any) -> Any:
        if not may_meet():
            return original(*arguments, **named)
        masks = tf.nest.map_structure(_mask_of, arguments)
        # Variables are read here: the update may come after a later assignment.
        values = tf.nest.map_structure(_read, (arguments, named))
        return meet(("metric", n), (*values, masks))

    return method


def _takes_a_mean(metric: Any, values: Sequence[Any]) -> bool:
    """Returns whether a metric counts one number of a whole batch."""
    is_number = len(values) == 1 and tf.is_tensor(values[0])
    return isinstance(metric, keras.metrics.Mean) and (
        is_number and values[0].shape.rank == 0
    )


def _read(value: Any) -> Any:
    return tf.convert_to_tensor(value) if is_variable(value) else value


def _mask_of(value: Any) -> Any:
    return getattr(value, "_keras_mask", None)


def _showing(n: int, original: Callable[..., Any]) -> Callable[..., Any]:
    def method() -> Any:
        if not may_meet():
            return original()
        # Of these ops only the shapes are used.
        specs = tf.nest.map_structure(
            lambda own: tf.TensorSpec(own.shape, own.dtype), _as_tensors(original())
        )
        return meet(("result", n), None, answer=specs, is_same=True)

    return method


def _dense(grad: Any, variable: Any) -> tf.Tensor:
    """Returns a gradient as Keras adds it to its accumulators."""
    if grad is None:
        grad = tf.zeros(variable.shape, tf.as_dtype(variable.dtype))
    return to_travel(grad, variable, True)


def _are_finite(parts: Sequence[Sequence[tf.Tensor]]) -> tf.Tensor:
    found = []
    for part in (part for own in parts for part in own):
        with tf.device(part.device):
            found.append(tf.reduce_all(tf.math.is_finite(part)))
    return tf.reduce_all(tf.stack(found))


def _added(
    sums: Sequence[Sequence[Any]], homes: Sequence[Any], towers: Sequence[Tower]
) -> list[tf.Tensor]:
    """Adds towers' sums where they are applied."""
    totals = []
    for column, at in zip(zip(*sums, strict=True), homes, strict=True):
        with tf.device(towers[at[0]].device):
            totals.append(tf.add_n(column))
    return totals


def _times(brought: Sequence[Brought], factors: Sequence[Any]) -> list[Brought]:
    """Multiplies each tower's gradients."""
    return [
        Brought(
            [g if g is None else weigh(g, tf.cast(factor, tf.float32)) for g in grads],
            *(own.variables, own.same_rows),
        )
        for own, factor in zip(brought, factors, strict=True)
        for grads in [own.grads]
    ]


def _as_tensors(result: Any) -> Any:
    return tf.nest.map_structure(tf.convert_to_tensor, result)


def _brought(grads: Any, trainable_variables: Any = None) -> tuple[Any, ...]:
    if trainable_variables is None:
        raise ValueError(
            "TowerModel: optimizer.apply needs the variables of the tower, as in "
            "optimizer.apply(gradients, self.trainable_variables)."
        )
    grads = list(grads)
    same = [
        n
        for n, grad in enumerate(grads)
        if isinstance(grad, tf.IndexedSlices) and is_same_in_towers(grad.indices)
    ]
    return list(map(split_rows, grads)), list(trainable_variables), same


def _joined(grads: Sequence[Sequence[Any]]) -> list[Any]:
    """Joins what ``_brought`` split, so that the parts are known outside of a tower."""
    joined = []
    for parts in grads:
        with tf.device(getattr(values_of(parts[0]), "device", None)):
            joined.append(join_rows(parts))
    return joined
