"""The steps of a ``TowerModel``: each copy runs one on its part of a batch."""

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import keras
import tensorflow as tf

from tw_builders.internal import cut, on_devices, rows_of
from tw_core import Tower, map_towers
from tw_core.internal import (
    call_towers_once,
    may_meet,
    meeting_alone,
    placing_calls,
    reached_sums,
    refusing_sums,
    tf_variable,
)
from tw_core.synchronized import synchronized_layers
from tw_keras import _batches
from tw_keras._checks import optimizers_of, reductions_of
from tw_keras._copies.building import has_own_step
from tw_keras._copies.copies import Copies, Weigh
from tw_keras._copies.models import naming
from tw_keras._lost_errors import LastBatch
from tw_keras._meetings.meetings import Meetings
from tw_keras._meetings.metrics import merged_logs
from tw_keras._meetings.report import Report
from tw_keras._meetings.step import Step


class Steps:
    """Runs the copies' steps: traced once, or eagerly on tower 0 for all."""

    def __init__(self, copies: Copies) -> None:
        self.copies = copies
        self.last = LastBatch()

    def step(self, method: str, data: Any) -> Any:
        """Runs one step of every copy on its part of a batch; returns merged logs."""
        with tf.device("/cpu:0"):  # On a GPU, it would be copied there once more.
            waits = _batches.after(data)
        with waits:
            return self._step(method, data)

    def _step(self, method: str, data: Any) -> Any:
        copies, ranks = self.copies, self.copies.ranks
        trains, is_alone = method == "train_step", tf.executing_eagerly()
        sizes, parts, lent = self._cut(method, data)
        if ranks is not None:
            ranks.exchanges.begin_step()
        reductions = reductions_of(copies.main)
        added = copies.adds or reductions == {"sum"}
        weights = None if added else self._weights(parts, sizes)
        if trains and ranks is not None and ranks.alone is not None:
            ranks.alone.note(weights or sizes)
        step = Step(
            copies=copies,
            is_alone=is_alone,
            trains=trains,
            average=not added,
            report=self._report(data, sizes, weights, trains=trains),
            lent=lent,
            rescaled=self._rescaled(
                reductions, added=added, is_alone=is_alone, trains=trains
            ),
        )
        meetings = Meetings(step)
        with meetings.held(), self._naming_rows(data, sizes):
            logs = self._run(method, parts, sizes, meetings)
        if is_alone and trains:
            copies.make_equal()
        if added and copies.main.losses:
            meetings.losses.check_parted()
        merged = merged_logs(step, logs, meetings.losses.are_means)
        if ranks is not None:
            ranks.results.note_step(method, merged)
        return merged

    def _rescaled(
        self, reductions: frozenset[str], *, added: bool, is_alone: bool, trains: bool
    ) -> frozenset[str]:
        """Returns the loss reductions that must first become means, or are refused."""
        is_one = is_alone or len(self.copies.towers) == 1
        if is_one and self.copies.ranks_in_steps is None:
            return frozenset()
        kinds: set[Any] = set() if added else {"sum"}
        if self.copies.weigh is None:
            kinds.add("mean_with_sample_weight")
        if trains:
            kinds |= {"none", None}
        return reductions & kinds

    def _report(
        self, data: Any, sizes: Sequence[Any], weights: Any, *, trains: bool
    ) -> Report:
        """Reports a batch; if ranks train together, they begin to exchange it."""
        ranks = self.copies.ranks
        if ranks is None:
            return Report(sizes, weights)
        if trains and ranks.alone is None:
            checksum = ranks.exchanges.checksum(data) if ranks.shares_data else None
            sums = partial(ranks.exchanges.report, checksum=checksum)
            return Report(sizes, weights, sums)

        def assumed(weight: tf.Tensor, rows: tf.Tensor) -> Sequence[tf.Tensor]:
            """Assumes equal batches, as other ranks may have none."""
            if not ranks.shares_data:
                return weight * ranks.group.size, rows * ranks.group.size
            leaf = next(leaf for leaf in tf.nest.flatten(data) if leaf is not None)
            total = tf.cast(rows_of(leaf), tf.float64)
            return tf.math.divide_no_nan(weight * total, rows), total

        return Report(sizes, weights, assumed, trains_alone=trains)

    def finish_epoch(self) -> None:
        """Takes part in other ranks' updates until none has a batch."""
        if self.copies.ranks is not None:
            self.copies.ranks.finish_epoch()

    def predict(self, data: Any) -> Any:
        """Returns every copy's predictions for its part, in the batch's order."""
        method = "predict_step"
        sizes, parts, lent = self._cut(method, data)
        with self._naming_rows(data, sizes):
            predictions = self._run(method, parts, sizes)
        return _batches.join(predictions, lent, sizes)

    def _cut(self, method: str, data: Any) -> Any:
        """Cuts a batch into the towers' parts; the first batch also builds the models.

        Returns the parts' sizes, the parts, and how many have only a padding row.
        """
        if not tf.executing_eagerly():
            data = self.last.hold(method, data)
        data, towers = _batches.tensors(data), self.copies.towers
        count, own = self._own_parts(method)
        sizes = _batches.checked_sizes(data, count)
        if tf.executing_eagerly():  # Tower 0 takes all rows of its rank.
            sizes, own = _by_rank(sizes, own, len(towers))
        parts = cut(data, sizes, lends_row=True)[own]
        sizes, parts = sizes[own], on_devices(parts, towers[: len(parts)])
        self.copies.build(data, method)
        return sizes, parts, _batches.lent_rows(sizes)

    def _own_parts(self, method: str) -> tuple[int, slice]:
        """Returns into how many parts a batch is cut, and which are this rank's."""
        count, ranks = len(self.copies.towers), self.copies.ranks
        if ranks is None or method == "predict_step":  # A rank predicts all its rows.
            return count, slice(count)
        return ranks.parts(count)

    @contextmanager
    def _naming_rows(self, data: Any, sizes: Sequence[Any]) -> Iterator[None]:
        """Adds a note with the rows of tower 0, whose step is being traced."""
        try:
            yield
        except Exception as error:
            self._note_rows(error, data, sizes[0])
            raise

    def _note_rows(self, error: Exception, data: Any, size: Any, k: int = 0) -> None:
        rows = _batches.static_rows(data)
        if isinstance(size, int) and rows is not None and size != rows:
            error.add_note(
                f"(in tower {k} of {len(self.copies.towers)}, which has {size} of the "
                f"batch's {rows} rows)"
            )

    def note_rows(self, error: Exception) -> None:
        """Adds a note if the last step failed at a tensor with the rows of a tower."""
        last = self.last.take()
        if last is None:
            return
        method, data = last
        count, own = self._own_parts(method)
        for k, size in enumerate(_batches.checked_sizes(data, count)[own]):
            if re.search(rf"\[{size}[,\]]", str(error)):
                self._note_rows(error, data, size, k)
                return

    def run_again(self) -> None:
        """Runs the towers' parts of the last batch one by one; raises the first error.

        Uses tower 0's variables and restores their values: nothing is updated.
        """
        last, main = self.last.take(), self.copies.main
        if last is None:
            return
        method, data = last
        count, own = self._own_parts(method)
        sizes = _batches.checked_sizes(data, count)
        parts = cut(data, sizes, lends_row=True)[own]
        before = [variable.numpy() for variable in main.variables]
        meetings = Meetings(Step(copies=self.copies, average=True, trains=False))

        def combine(place: Any, values: list[Any]) -> Sequence[Any]:
            if place[0] == "result":
                return meetings.combine(place, values)
            return [None] * len(values)

        try:
            with meetings.held():
                for part, tower in zip(parts, self.copies.towers, strict=True):
                    with (
                        naming(tower),
                        tf.device(tower.device),
                        _refusing_new_variables(),
                        meeting_alone(combine),
                        tf.summary.record_if(False),
                    ):
                        getattr(main, method)(part)
        except Exception as error:
            self._note_rows(error, data, sizes[own][tower.index], tower.index)
            raise
        finally:
            for variable, value in zip(main.variables, before, strict=True):
                variable.assign(value)

    def _run(
        self,
        method: str,
        parts: Sequence[Any],
        sizes: Sequence[Any],
        meetings: Meetings | None = None,
    ) -> list[Any]:
        """Runs a step of every copy, traced once; eagerly, tower 0's for all."""
        if not tf.executing_eagerly():
            if self.copies.is_plain:
                return self._run_alone(method, parts)
            return self._run_once(method, parts, sizes, meetings)
        combine = _no_meeting
        if meetings is not None:
            combine = meetings.combine
            meetings.losses.of_tower = meetings.losses.factors
        ranks = self.copies.ranks_in_steps if method == "train_step" else None
        is_one = ranks is None or ranks.group.size == 1
        with (
            tf.device(self.copies.towers[0].device),
            _refusing_new_variables(),
            meeting_alone(combine),
            nullcontext() if is_one else refusing_sums(_EAGER_SUMS),
        ):
            return [getattr(self.copies.main, method)(parts[0])]

    def _run_alone(self, method: str, parts: Sequence[Any]) -> list[Any]:
        """Runs a lone tower's step as one function, its update and metrics included."""
        run = getattr(self.copies.main, method)

        def step(part: Any) -> list[Any]:
            with (
                _refusing_new_variables(),
                synchronized_layers(),
                _batches.after(part),
            ):
                return map_towers(lambda _, part: run(part), self.copies.towers, [part])

        if self.copies.setting.jit_compile:
            step = tf.function(step, autograph=False, jit_compile=True)
        return step(parts[0])

    def _run_once(
        self,
        method: str,
        parts: Sequence[Any],
        sizes: Sequence[Any],
        meetings: Meetings | None,
    ) -> list[Any]:
        def step(part: Any, model: Any, own_factors: Any, _: Any) -> Any:
            if meetings is not None:
                meetings.losses.of_tower = own_factors
                meetings.losses.reached = reached_sums()
            with (
                _refusing_new_variables(),
                synchronized_layers(),
                _batches.after(part),
            ):
                logs = getattr(model, method)(part)
                if meetings is not None:
                    meetings.losses.note_logs(logs)
                return logs

        copies, models = self.copies, self.copies.models
        of_towers = zip(parts, models.by_tower, copies.beside_models(), strict=True)
        factors = [] if meetings is None else meetings.losses.factors
        items = [
            (part, model, factors[k : k + 1], beside)
            for k, (part, model, beside) in enumerate(of_towers)
        ]
        ranks = copies.ranks_in_steps if method == "train_step" else None
        num_ranks = 1 if ranks is None else ranks.group.size
        inline = copies.inline
        if inline is None and ranks is not None and ranks.exchanges.bucket_bytes:
            inline = True  # A call that is not has all of its results at its end.
        return call_towers_once(
            step,
            items,
            [partial(placing_calls, tower) for tower in copies.towers],
            combine=_no_meeting if meetings is None else meetings.combine,
            # Padding rows are not among all rows.
            counted=_batches.have_rows(sizes),
            written_once=models.shared_state(),
            kept_equal=models.kept_equal(),
            settle=None if num_ranks == 1 else self._settle,
            outside="" if len(items) * num_ranks == 1 else _OUTSIDE,
            inline=inline,
            jit_compile=copies.setting.jit_compile and method == "train_step",
            rank=0 if ranks is None else ranks.group.rank,
            num_ranks=num_ranks,
            sum_ranks=None if ranks is None else ranks.exchanges.sum_layer,
        )

    def _settle(self, handles: Sequence[Any], values: Sequence[Any]) -> Sequence[Any]:
        """Returns all ranks' common values of trained variables a step assigned."""
        written, known = set(map(id, handles)), set(map(id, self.copies.assigned))
        self.copies.assigned += [
            variable
            for variable in map(tf_variable, self.copies.models.kept_equal())
            if id(variable.handle) in written and id(variable) not in known
        ]
        ranks: Any = self.copies.ranks_in_steps
        return list(ranks.exchanges.of_first(values))

    def _weights(self, parts: Sequence[Any], sizes: Sequence[Any]) -> Any:
        weights, weigh = list(sizes), self.copies.weigh
        if weigh is not None:
            columns = zip(parts, sizes, self.copies.towers, strict=False)
            weights = [_weight(weigh, *own) for own in columns]
        is_equal = isinstance(weights[0], int) and len(set(weights)) == 1
        return None if is_equal and self.copies.ranks is None else weights

    def trace_beforehand(self, data: Any) -> None:
        """Traces an overridden ``train_step`` that may create optimizers' variables.

        TensorFlow traces a function twice if it creates variables, but ranks match
        exchanges by their place in a trace. Rank 0's values are taken before that.
        """
        if has_own_step(self.copies.main):
            self.copies.take_from_rank_0()
        if not all(optimizer.built for optimizer in optimizers_of(self.copies.main)):
            self.trace(data)

    def trace(self, data: Any) -> None:
        """Traces a step for batches with the specs ``data``; runs nothing."""
        step = partial(self.step, "train_step")
        tf.function(step, autograph=False).get_concrete_function(data)

    def trace_for_others(self, data: Any, *, run_eagerly: bool) -> None:
        """Learns from a trace what ranks that have a batch exchange."""
        ranks: Any = self.copies.ranks
        with ranks.exchanges.recording() if run_eagerly else nullcontext():
            self.trace(data)


_EAGER_SUMS = (
    "TowerModel: over ranks, eager steps neither sum nor gather over towers; compile "
    "with run_eagerly=False."
)
_OUTSIDE = (
    "they are outside of the towers' models. Make such a variable in make_model, as an "
    "attribute of the model or of a layer, so that each tower has its own (tower 0's "
    "is saved); or assign a value that is equal in all towers, as from sum_over_towers"
)


def _weight(weigh: Weigh, part: Any, size: Any, tower: Tower) -> Any:
    x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(part)
    with tf.device(tower.device):
        weight = weigh(x, y, sample_weight)
        if not tf.is_tensor(weight):  # A number would become float32.
            weight = tf.constant(weight, tf.float64)
        return tf.where(size > 0, weight, tf.zeros_like(weight))


def _by_rank(sizes: Sequence[Any], own: slice, count: int) -> tuple[list[Any], slice]:
    """Returns the rows of each rank of ``count`` towers, and this rank as a slice."""
    firsts = range(0, len(sizes), count)
    of_ranks = [sum(sizes[first : first + count]) for first in firsts]
    rank = (own.start or 0) // count
    return of_ranks, slice(rank, rank + 1)


@contextmanager
def _refusing_new_variables() -> Iterator[None]:
    """Refuses variables that a step would create, even if Keras ignores the error."""
    refused = []

    def create(next_creator: Callable[..., Any], **kwargs: Any) -> Any:
        if not may_meet():  # Where towers meet, optimizers make state.
            with tf.control_dependencies(None):  # A value that waits for a batch
                return next_creator(**kwargs)  # is not lifted, and fails in XLA.
        scope = tf.get_current_name_scope()
        refused.append(
            ValueError(
                "TowerModel: a step would create the variable "
                f"{kwargs.get('name')!r}{scope and f' in {scope}'}; create all "
                "variables in make_model, or in the build of layers that the model has."
            )
        )
        raise refused[0]

    try:
        with tf.variable_creator_scope(create):
            yield
    finally:
        # While Keras builds a layer, it turns any error into a warning.
        if refused:
            raise refused[0]


def _no_meeting(place: Any, values: list[Any]) -> Sequence[Any]:
    raise RuntimeError(f"TowerModel: a predict_step reached {place} ({values}).")
