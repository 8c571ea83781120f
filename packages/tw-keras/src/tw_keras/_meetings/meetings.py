"""Where the towers' steps synchronise: optimizers apply, and metrics are updated.

While a step is traced, and only then, the ``apply`` of tower 0's optimizers and the
``update_state`` and ``result`` of its metrics are replaced. The metrics are updated
once, with the arguments of all towers joined, and every tower gets their results: so
any metric has the same value as on one device. These optimizers also make all updates:
the other towers have only their state. In an eager step, which runs on a whole batch,
only calls that involve other towers or ranks are replaced.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import tensorflow as tf

from tw_builders.internal import owned
from tw_core.internal import (
    is_same_in_towers,
    join_rows,
    keep_repeated_rows,
    may_meet,
    meet,
    split_rows,
    tf_variable,
    values_of,
)
from tw_keras._checks import (
    check_all_remember,
    check_records,
    metrics_of,
    optimizers_of,
)
from tw_keras._meetings import metrics
from tw_keras._meetings.accumulated import (
    accumulate,
    accumulate_for_shards,
    collect_none,
    collect_none_for_shards,
    may_accumulate,
)
from tw_keras._meetings.losses import Losses
from tw_keras._meetings.over_towers import (
    SendingGroup,
    none_of,
    shares_of_mean,
    tell_of_none,
)
from tw_keras._meetings.remembered import reduce_remembering, send_none
from tw_keras._meetings.step import Step
from tw_keras._over_ranks.exchanges import (
    AccumulatedExchange,
    AccumulatedShardsExchange,
    OverTowersExchange,
    RememberedExchange,
    ShardedExchange,
    UpdateExchange,
    for_towers,
)
from tw_keras._updates.applying import APPLY, apply_wrapped
from tw_keras._updates.update import (
    Brought,
    Update,
    places_of_records,
    times,
    with_records,
    with_rows_added,
)
from tw_keras._updates.wrapped import WrappedOptimizer
from tw_reduce import Reducer


class Meetings:
    """The calls that all towers make together, and how they are combined."""

    def __init__(self, step: Step) -> None:
        """Finds the optimizers and metrics of tower 0."""
        self._step, self._copies = step, step.copies
        self._graph = tf.compat.v1.get_default_graph()  # of the step
        self._optimizers = optimizers_of(step.copies.main)
        self._metrics = metrics_of(step.copies.main)
        self.losses = Losses(step, self._optimizers)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Makes towers synchronise in calls of optimizers and metrics, while open."""
        replaced: dict[tuple[int, str], tuple[Any, Any]] = {}
        try:
            for owner, method, new in self._replacements():
                if (id(owner), method) not in replaced:  # a metric may be held twice
                    # Set on the object, which keeps its class and so is saved as usual.
                    replaced[id(owner), method] = owner, vars(owner).get(method)
                    setattr(owner, method, new(getattr(owner, method)))
            yield
        finally:
            for (_, method), (owner, own_method) in replaced.items():
                delattr(owner, method)
                if own_method is not None:  # set on the object before
                    setattr(owner, method, own_method)

    def _replacements(self) -> Iterator[tuple[Any, str, Callable[..., Any]]]:
        """Yields objects, names of methods, and functions that wrap these methods."""
        step, losses, main = self._step, self.losses, self._copies.main
        for n, optimizer in enumerate(self._optimizers):
            if losses.are_weighed_by(optimizer):
                yield optimizer, "scale_loss", partial(losses.weighing, n)
            yield optimizer, "apply", partial(_applying, n, self._homes)
        for n, metric in enumerate(self._metrics):
            if not step.is_one_device:
                what = f"the number that a step passes to {metric.name!r}"
                is_mean = partial(losses.is_mean, what=what)
                yield metric, "update_state", partial(metrics.updating, n, is_mean)
            if not step.is_alone:
                yield metric, "result", partial(metrics.showing, n, losses)
        compiled = getattr(main, "_compile_loss", None)
        if step.rescaled and compiled:
            yield compiled, "call", partial(losses.rescaling, compiled)
        if not (step.average or step.is_whole):
            yield main, "_aggregate_additional_loss", losses.parted

    def combine(self, place: tuple[str, int], brought: list[Any]) -> Sequence[Any]:
        """Makes the call that all towers have reached, once; returns [K] answers."""
        kind, n = place
        if kind == "divisor":
            return self.losses.divisor_factors(brought)
        if kind == "part":
            return self._step.parts()
        if kind == "result":
            return [metrics.as_tensors(self._metrics[n].result())] * len(brought)
        if kind == "optimizer":
            calls = [Brought(_joined(own), *more) for own, *more in brought]
            self._update(n, self._of_own_rows(calls))
        else:
            metrics.update(self._step, self._metrics[n], brought)
        return [None] * len(brought)

    def _of_own_rows(self, brought: Sequence[Brought]) -> Sequence[Brought]:
        """Zeroes the gradients of towers without rows, if gradients are added."""
        if self._step.lent is None or self._step.average:  # or weighted
            return brought
        rows = len(brought) - self._step.lent
        return times(brought, [tf.less(k, rows) for k in range(len(brought))])

    def _homes(self, n: int, brought: tuple[Any, ...]) -> dict[int, str]:
        """Maps gradients' ids to the devices that apply them."""
        if self._copies.variables == "replicated" or self._copies.sharded is not None:
            return {}
        grads, variables, _ = brought
        owners = owned(self._copies.of_towers(variables), self._optimizers[n])
        pairs = zip(grads, owners, strict=True)
        return {id(g): tf_variable(own).device for parts, own in pairs for g in parts}

    def _update(self, n: int, brought: Sequence[Brought]) -> None:
        ranks = self._step.ranks
        records, count = self._records(n, brought)
        brought, weights, averages = self.losses.of_gradients(
            n, self._optimizers[n], brought
        )
        if records:
            brought = with_records(brought, records, 1.0 if averages else count)
        counts_rows = ranks is None and _accumulates_over_towers(self._optimizers[n])
        if counts_rows and averages and weights is None:
            # Equal here, but an update's other batches may have other rows.
            weights = self._step.rows
        if self._copies.memory is not None:
            check_all_remember(is_alone=self._step.is_alone)
        elif self._step.is_one_device:
            self._update_alone(n, brought, weights, averages=averages)
            return
        if ranks is not None:
            self._check_whole_step()
        remembers = self._copies.memory is not None
        if ranks is not None and self._copies.sharded is not None:
            self._update_shards(n, brought, weights, averages=averages)
        elif ranks is not None and _accumulates_over_towers(self._optimizers[n]):
            shares, weight = shares_of_mean(self._step, n, brought, weights)
            self._add_shares(n, shares, weight)
        elif (ranks is not None or len(brought) > 1 or remembers) and may_accumulate(
            self._optimizers[n], brought[0].variables
        ):
            due = accumulate(
                *(self._step, n, self._optimizers[n], brought, weights),
                averages=averages,
            )
            self.apply_reduced(n, due)
        elif remembers:
            sums = reduce_remembering(
                *(self._step, n, self._optimizers[n], brought, weights),
                averages=averages,
            )
            self.apply_reduced(n, sums)
        elif ranks is None:
            brought = with_rows_added(brought, weights)
            self._apply_to(n, brought, weights, averages=averages)
        else:
            add = cast(Reducer, self._step.reducer)
            checksum = self._step.checksum
            self.apply_reduced(
                n,
                ranks.in_steps.reduce(n, brought, weights, add=add, checksum=checksum),
            )

    def _records(
        self, n: int, brought: Sequence[Brought]
    ) -> tuple[dict[int, tf.Tensor], Any]:
        """Returns the largest of records, by place, and how many towers have them."""
        step, ranks, count = self._step, self._step.ranks, float(len(brought))
        places = places_of_records(brought[0])
        if not places or step.is_one_device:
            return {}, count
        check_records(self._copies.memory)
        largest = []
        for m in places:
            with tf.device(step.copies.towers[0].device):
                largest.append(tf.reduce_max([own.grads[m] for own in brought], 0))
        if ranks is not None:
            seats = range(ranks.group.size)
            own = [
                tf.stack(
                    [r if k == ranks.group.rank else tf.zeros_like(r) for k in seats]
                )
                for r in largest
            ]
            *of_ranks, active = ranks.in_steps.sum_layer(
                f"records of update {n}", [*own, tf.ones([])]
            )
            largest, count = [tf.reduce_max(r, 0) for r in of_ranks], count * active
        return dict(zip(places, largest, strict=True)), count

    def _update_shards(
        self,
        n: int,
        brought: Sequence[Brought],
        weights: Sequence[Any] | None,
        *,
        averages: bool,
    ) -> None:
        """Updates each rank's shards, and sends the new values to all."""
        copies, own = self._copies, self._step
        in_steps, sharded = cast(Any, copies.ranks).in_steps, cast(Any, copies.sharded)
        optimizer, variables = self._optimizers[n], brought[0].variables
        shards = sharded.of(optimizer, copies.of_towers(variables))
        if may_accumulate(optimizer, variables):
            exchange, due = accumulate_for_shards(
                *(own, n, shards, brought, weights), averages=averages
            )
            self.apply_shards(exchange, due[:-1], due[-1])
            return
        grads = in_steps.reduce(
            *(n, brought, weights),
            add=cast(Reducer, own.reducer),
            checksum=own.checksum,
            shards=shards,
        )
        self.apply_shards(in_steps.exchange_at(n), grads)

    def apply_shards(
        self,
        exchange: ShardedExchange | AccumulatedShardsExchange,
        grads: Sequence[Any],
        changes: Any = None,
    ) -> None:
        """Applies the reduced gradients of this rank's shards, and sends the values."""
        shards, name = exchange.shards, f"update {exchange.place}"
        by_xla = self._copies.compiled_by_xla and not tf.executing_eagerly()
        with keep_repeated_rows():
            shards.update(
                *(grads, exchange.places),
                name=name,
                jit_compile=by_xla,
                changes=changes,
            )

    def _update_alone(
        self,
        n: int,
        brought: Sequence[Brought],
        weights: Sequence[Any] | None,
        *,
        averages: bool,
    ) -> None:
        """Updates tower 0, which the others copy; sharded variables at their owners."""
        optimizer = self._optimizers[n]
        is_wrapped = isinstance(optimizer, WrappedOptimizer)
        is_elsewhere = self._copies.variables == "sharded"
        if is_wrapped or is_elsewhere:
            self.apply_reduced(n, brought, weights)
        elif self._step.reducer is not None:  # one that was given
            self._apply_to(n, brought, None, averages=averages)
        else:
            optimizer.apply(brought[0].grads, brought[0].variables)

    def _add_shares(self, n: int, shares: Sequence[Brought], weight: Any) -> None:
        """Makes an optimizer over towers accumulate shares of all ranks' mean."""
        ranks, accumulation = self._step.ranks, self._copies.accumulation
        group = SendingGroup(ranks.in_steps, n)
        weights = None if weight is None else [weight / len(shares)] * len(shares)
        self.apply_reduced(n, shares, weights, group)

        def average() -> tf.Tensor:
            self._optimizers[n].wrapped.average_accumulated(group)
            return tf.constant(True)

        tf.cond(accumulation.at_once, average, lambda: tf.constant(False))

    def _check_whole_step(self) -> None:
        """Refuses an update in a branch or a function, if ranks exchange."""
        if self._graph is not tf.compat.v1.get_default_graph():
            raise ValueError(
                "TowerModel: with a group an optimizer cannot apply in a tf.cond: one "
                "rank does not know the branch of another; apply in every step, or use "
                "the optimizer's gradient_accumulation_steps. With run_eagerly it "
                "cannot apply in a tf.function either."
            )

    def apply_reduced(
        self,
        n: int,
        brought: Sequence[Brought],
        weights: Sequence[Any] | None = None,
        group: Any = None,
    ) -> None:
        """Applies gradients that are equal in all towers, or given once for all.

        With a ``group`` they are shares of the mean over its ranks.
        """
        if len(brought) < len(self._copies.towers):
            (own,) = brought
            every = self._copies.of_towers(own.variables)
            brought = [Brought(own.grads, variables) for variables in every]
            weights = weights and [weights[0] / len(every)] * len(every)
        self._apply_to(
            n, brought, weights, averages=False, is_reduced=True, group=group
        )

    def collect_none(self, exchange: AccumulatedExchange) -> list[list[Any]]:
        """Takes part in other ranks' exchange, with this rank's accumulated gradients.

        Returns the reduced gradients for ``apply_exchanged``.
        """
        optimizer = self._optimizers[exchange.place]
        if isinstance(exchange, OverTowersExchange):
            return [[tell_of_none(self._step, exchange)]]
        if isinstance(exchange, AccumulatedShardsExchange):
            return [collect_none_for_shards(self._step, exchange)]
        if isinstance(exchange, RememberedExchange):
            brought = send_none(self._step, optimizer, exchange)
        else:
            brought = collect_none(self._step, optimizer, exchange)
        return [[own.grads[n] for n in exchange.used] for own in brought]

    def apply_exchanged(
        self,
        exchange: UpdateExchange | AccumulatedExchange,
        reduced: Sequence[Sequence[Any]],
    ) -> None:
        """Applies other ranks' update."""
        if isinstance(exchange, ShardedExchange):
            self.apply_shards(exchange, reduced[0])
        elif isinstance(exchange, AccumulatedShardsExchange):
            *grads, changes = reduced[0]
            self.apply_shards(exchange, grads, changes)
        elif isinstance(exchange, OverTowersExchange):
            weight = reduced[0][0] if exchange.averages else None
            self._add_shares(exchange.place, none_of(exchange), weight)
        else:
            self.apply_reduced(exchange.place, for_towers(reduced, exchange))

    def _apply_to(
        self,
        n: int,
        brought: Sequence[Brought],
        weights: Sequence[Any] | None,
        *,
        averages: bool,
        is_reduced: bool = False,
        group: Any = None,
    ) -> None:
        copies, optimizer = self._copies, self._optimizers[n]
        update = Update(
            *(copies.towers, optimizer, copies.states.of, weights),
            average=averages,
            reducer=self._step.reducer,
            is_reduced=is_reduced,
            compiled_by_xla=copies.compiled_by_xla and not tf.executing_eagerly(),
            group=group,
        )
        is_wrapped = isinstance(optimizer, WrappedOptimizer)
        apply = apply_wrapped if is_wrapped else APPLY[copies.variables]
        with keep_repeated_rows():
            apply(update, brought)


def _accumulates_over_towers(optimizer: Any) -> bool:
    return isinstance(optimizer, WrappedOptimizer) and optimizer.accumulates


def _applying(
    n: int,
    homes: Callable[[int, tuple[Any, ...]], dict[int, str]],
    original: Callable[..., Any],
) -> Callable[..., Any]:
    def method(*arguments: Any, **named: Any) -> Any:
        if not may_meet():
            return original(*arguments, **named)
        brought = _brought(*arguments, **named)
        together = homes(n, brought)
        return meet(("optimizer", n), brought, waits=True, together=together)

    return method


def _brought(grads: Any, trainable_variables: Any = None) -> tuple[Any, ...]:
    if trainable_variables is None:
        raise ValueError(
            "TowerModel: optimizer.apply needs the tower's variables, as in "
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
    """Joins the parts that ``_brought`` split for use outside of a tower."""
    joined = []
    for parts in grads:
        with tf.device(getattr(values_of(parts[0]), "device", None)):
            joined.append(join_rows(parts))
    return joined
