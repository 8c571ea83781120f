"""The row of stages between an optimizer's ``apply`` and the next step.

    gradients   [K][N], as the towers pass them
       share       times each tower's part of the mean over all rows
       accumulate  sums of micro-batches, until an update is due
       reduce      over towers, by a reducer with or without memory
       exchange    over ranks: all get the sums, or each those of its shards
       place       the optimizer: in each tower, at owners, in shards, or once

A stage that has nothing to do is not in the row. A rank without a batch runs the same
row, with zeros.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import tensorflow as tf

from tw_core import Tower
from tw_core.internal import is_elementwise, keep_repeated_rows, scale
from tw_keras._keras_compat import trained_by
from tw_keras._update.accumulate import Accumulation
from tw_keras._update.at_owners import AtOwners
from tw_keras._update.gradients import (
    Rows,
    TowerGradients,
    as_gradient_of,
    specs_of,
    times,
    zeros_of,
)
from tw_keras._update.in_shards import InShards
from tw_keras._update.optimizers import may_accumulate, scale_of
from tw_keras._update.over_towers import OverTowers, WrappedOptimizer
from tw_keras._update.places import Place, Terms
from tw_keras._update.reduce import (
    Averaging,
    Stage,
    over_ranks,
    over_towers,
    remembering,
    to_shards,
    where_applied,
)
from tw_keras._update.replicated import Replicated
from tw_reduce import Reducer


@dataclass(kw_only=True)
class Setting:
    """What the rows of a model's optimizers have in common."""

    towers: Sequence[Tower]
    variables: str
    of_towers: Callable[[Sequence[Any]], Sequence[Sequence[Any]]]
    at_once: tf.Variable  # whether accumulated gradients are reduced in all steps
    reducer: Reducer | None = None  # over towers, that was given
    memory: Any = None  # of a reducer that was given; ``memory.Memory``
    exchanges: Any = None  # with other ranks; ``_over_ranks.exchanges.Exchanges``
    shards: Any = None  # of ranks; ``_over_ranks.sharded.ShardedStates``
    jit_compile: bool = False  # whether XLA compiles updates


class Row:
    """The update by one optimizer of a model, the n-th."""

    def __init__(self, number: int, optimizer: Any, setting: Setting) -> None:
        """Chooses the stages."""
        self.number, self.optimizer, self._setting = number, optimizer, setting
        self.place = _place(number, optimizer, setting)
        self._sums: Accumulation | None = None  # made with the optimizer's state
        self._over_towers: Averaging | None = None
        self._stages: list[Stage] = []  # after that
        own, what = setting, f"gradients, update {number}"
        self._is_passed_on = isinstance(self.place, OverTowers) and (
            own.exchanges is None or self.place.group is not None
        )
        if self._is_passed_on:
            return
        shards = self.place if isinstance(self.place, InShards) else None
        if own.exchanges is not None:
            self._over_towers = over_towers(own.towers, own.reducer, keeps_one=True)
        elif own.memory is None and (own.reducer or own.variables == "replicated"):
            self._over_towers = over_towers(own.towers, own.reducer, keeps_one=False)
        elif own.memory is None:
            self._over_towers = where_applied(self.place.targets)
        if own.memory is not None:  # It has its own exchange.
            state = partial(own.memory.of, number, optimizer)
            count = len(own.memory.towers)
            self._stages.append(remembering(state, count, shards))
        elif shards is not None:
            self._stages.append(to_shards(what, shards))
        elif own.exchanges is not None:
            self._stages.append(over_ranks(own.exchanges, what))

    @property
    def trained(self) -> Sequence[Any]:
        """All of tower 0's variables that the optimizer was built for."""
        if isinstance(self.place, InShards):
            return self.place.shards.columns[0]
        return trained_by(self.optimizer)

    def build(self, variables: Sequence[Any]) -> None:
        """Creates the state of all stages; ``variables`` are tower 0's."""
        self.place.build(variables)
        own = self._setting
        is_alone = len(own.towers) == 1 and own.exchanges is None and own.memory is None
        if self._sums is not None or is_alone or self._is_passed_on:
            return
        if may_accumulate(self.optimizer, self.trained):
            self._sums = Accumulation(
                *(self.optimizer, self.trained, own.towers, self.place),
                at_once=own.at_once,
                all_true=self._all_true,
            )

    def __call__(
        self,
        gradients: TowerGradients,
        factors: Sequence[Any] | None = None,
        *,
        of_sums: Any = None,
        averages: bool = False,
        weight: Any = None,
    ) -> None:
        """Updates all towers' variables.

        ``factors``: [K] of the towers' gradients, whose sum over all towers and ranks
        is then that of the whole batch, times ``of_sums``; None for 1. ``averages``:
        they are 1/K. ``weight``: of the batch, over all; None if losses are sums.
        """
        own, total = self._setting, len(gradients.grads)
        self.build(gradients.variables[0])
        is_sent = own.exchanges is not None or own.memory is not None
        if is_sent or self._sums is not None:
            gradients = gradients.widened(dense=self._sums is not None)
        if own.exchanges is not None:
            is_divided, has_weight = of_sums is not None, weight is not None
            self._record(gradients, is_divided=is_divided, has_weight=has_weight)
        # Sums, which are fewer, are divided where nothing remembers parts of them.
        if averages and (self._sums is not None or own.memory is not None):
            factors, averages = [1.0 / total] * total, False
        if isinstance(self.place, OverTowers) and self._is_passed_on and not averages:
            number = float(total * self.place.averages)
            factors = [one * number for one in factors or [1.0] * total]
        loss_scale = scale_of(self.optimizer) if self._unscales() else None
        if loss_scale is not None:
            factors = [one / loss_scale for one in factors or [1.0] * total]
        buckets = None if own.exchanges is None else own.exchanges.bucket_bytes
        rows: Rows = gradients.shares(factors, is_packed=not buckets)
        variables = [gradients.variables[0][n] for n in gradients.places]
        if gradients.records:
            self._share_records(gradients, rows, averages=averages)
        changes = None
        if self._sums is not None:
            rows, changes = self._sums(rows, variables, self._reduce)
        else:
            rows = self._reduce(rows, variables, averages=averages)
            if of_sums is not None:
                rows = [times(row, of_sums) for row in rows]
            if loss_scale is not None:
                by = partial(scale, factor=loss_scale)
                rows = [[g if g is None else by(g) for g in row] for row in rows]
            if is_sent and not (self._is_passed_on or isinstance(self.place, InShards)):
                rows = [list(map(as_gradient_of, variables, row)) for row in rows]
        by_xla = own.jit_compile and not tf.executing_eagerly()
        terms = Terms(jit_compile=by_xla, weight=weight, changes=changes)
        with keep_repeated_rows():
            self.place.apply(rows, variables, terms)

    def may_divide_sums(self, gradients: TowerGradients) -> bool:
        """Returns whether sums over ranks may be divided, not each rank's gradients.

        Where nothing but sums is computed of the gradients before, in a dtype in which
        gradients times rows do not overflow.
        """
        own = self._setting
        self.build(gradients.variables[0])
        looks = own.memory is not None or own.reducer is not None
        if own.exchanges is None or own.exchanges.manner or self._is_passed_on:
            return False
        return not (looks or self._sums or gradients.records)

    def settle(self, *, over_ranks: bool) -> None:
        """Moves accumulated gradients to where they are saved, between steps.

        Without the other ranks, after an error, those of shards are lost.
        """
        if isinstance(self.place, OverTowers):
            if over_ranks:
                self.place.settle()
        elif self._sums is not None:
            is_lost = not over_ranks and isinstance(self.place, InShards)
            send = self._settle if over_ranks else _added
            self._sums.settle(None if is_lost else send)

    def _settle(self, rows: Rows, variables: Sequence[Any]) -> Rows:
        """Sends sums as a step does, but adds towers' without a reducer."""
        rows = _added(rows, variables)
        for stage in self._stages:
            rows = stage(rows, variables)
        return rows

    def _reduce(
        self, rows: Rows, variables: Sequence[Any], *, averages: bool = False
    ) -> Rows:
        if self._over_towers is not None:
            rows = self._over_towers(rows, variables, averages=averages)
        for stage in self._stages:
            rows = stage(rows, variables)
        return rows

    def _unscales(self) -> bool:
        """Returns whether stages need the gradients of losses that are not scaled."""
        own = self._setting
        looks = own.reducer is not None and not is_elementwise(own.reducer)
        return not self._is_passed_on and (
            looks or own.memory is not None or self._sums is not None
        )

    def _record(
        self, gradients: TowerGradients, *, is_divided: bool, has_weight: bool
    ) -> None:
        """Records the row for ranks without a batch, which run it with zeros."""
        specs, total = specs_of(gradients.grads[0]), len(gradients.grads)
        variables = gradients.variables

        def replay(weight: tf.Tensor) -> None:
            zeros = TowerGradients([zeros_of(specs)] * total, variables)
            by = tf.math.reciprocal_no_nan(weight) if is_divided else None
            self(zeros, of_sums=by, weight=weight if has_weight else None)

        self._setting.exchanges.record(self.number, replay)

    def _all_true(self, own: tf.Tensor) -> tf.Tensor:
        """Returns whether a condition holds on all ranks."""
        ranks = self._setting.exchanges
        if ranks is None:
            return own
        false = tf.cast(tf.logical_not(own), tf.float32)
        what = f"ranks with gradients that are not finite, update {self.number}"
        return tf.equal(ranks.sum(what, [false], [what])[0], 0)

    def _share_records(
        self, gradients: TowerGradients, rows: Any, *, averages: bool
    ) -> None:
        """Replaces records by equal shares of the largest of all towers and ranks."""
        ranks, places = self._setting.exchanges, gradients.records
        group = None if ranks is None else ranks.group
        count = len(rows) * (1 if group is None else group.size)
        if count == 1:
            return
        for m, n in enumerate(gradients.places):
            if n not in places:
                continue
            with tf.device(self._setting.towers[0].device):
                largest = tf.reduce_max([own[n] for own in gradients.grads], 0)
            if group is not None:
                seats = [
                    largest if k == group.rank else tf.zeros_like(largest)
                    for k in range(group.size)
                ]
                what = f"records of update {self.number}"
                [of_ranks] = ranks.sum(what, [tf.stack(seats)])
                largest = tf.reduce_max(of_ranks, 0)
            for row in rows:
                row[m] = largest if averages else largest / count


def _added(rows: Rows, variables: Sequence[Any]) -> Rows:
    """Adds towers' sums, eagerly: [1][M]."""
    return [[tf.add_n(column) for column in zip(*rows, strict=True)]]


def _place(number: int, optimizer: Any, own: Setting) -> Place:
    if isinstance(optimizer, WrappedOptimizer):
        group = None
        if own.exchanges is not None and optimizer.accumulates:
            if own.exchanges.manner:
                raise ValueError(
                    "TowerModel: wire_dtype is not used by "
                    f"{type(optimizer.wrapped).__name__}, which sends what it "
                    "accumulates itself; use a Keras optimizer's "
                    "gradient_accumulation_steps, or leave wire_dtype out."
                )
            group = own.exchanges.group_of(f"sums of update {number}")
        return OverTowers(optimizer, own.towers, group, own.at_once)
    if own.shards is not None:
        return InShards(
            *(number, optimizer),
            lambda variables: own.shards.of(optimizer, own.of_towers(variables)),
        )
    if own.variables == "parameter_server":
        return Place(optimizer)
    kind = Replicated if own.variables == "replicated" else AtOwners
    return kind(optimizer, own.towers, own.of_towers)
