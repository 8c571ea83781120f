"""The steps of a ``TowerModel``: every copy's, on its part of a batch."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import keras
import tensorflow as tf

from tw_builders.internal import cut, on_devices
from tw_core import Tower
from tw_core.synchronized import call_towers_once, synchronized_layers
from tw_core.tracing import may_meet, meeting_alone
from tw_core.variables import tf_variable
from tw_keras import _batches
from tw_keras._building import global_seeds, is_random
from tw_keras._checks import adds_rows, divides_by_weights, optimizers_of
from tw_keras._copies import Copies
from tw_keras._meetings import Meetings
from tw_keras._updates import APPLY


class Steps:
    """Runs steps of all copies: traced once, or eagerly tower 0's for all."""

    def __init__(self, copies: Copies) -> None:
        self._own = copies
        self._last = _batches.LastBatch()

    def step(self, method: str, data: Any) -> Any:
        """Runs one step of every copy on its part of a batch; returns merged logs."""
        with _batches.after(data):
            return self._step(method, data)

    def _step(self, method: str, data: Any) -> Any:
        main, flat, ranks = self._own.main, self._own.flat, self._own.ranks
        trains, alone = method == "train_step", tf.executing_eagerly()
        added = self._own.adds or adds_rows(main)
        synchronized = [] if alone else self._own.synchronized(trains=trains)
        sizes, parts, lent = self._cut(self._held(method, data), metrics=True)
        checksum = share = None
        if ranks is not None:
            ranks.begin_step()
            share = ranks.share(data, sizes, trains=trains)
            if ranks.shares_data and trains:  # the rest exchanges none
                checksum = ranks.checksum(data)
        divides = self._own.weigh is None and divides_by_weights(main)
        meetings = self._meetings(
            alone=alone,
            weights=None if added else self._weights(parts, sizes),
            average=not added,
            synchronized=synchronized,
            lent=lent,
            divides_by_weights=divides and not (alone and ranks is None),
            checksum=checksum,
            share=share,
            trains=trains,
        )
        # The moments of all rows have no part of what is lent.
        counted = _batches.have_rows(sizes) if synchronized else None
        factors = meetings.loss_factors()
        with meetings.held(), flat.training() if flat else nullcontext():
            logs = self._run(method, parts, meetings, counted, factors)
        if alone and trains:
            self._own.make_equal()
        if added and main.losses:
            raise ValueError(
                "TowerModel: a loss that is added over rows cannot be told from the "
                "regularizers' losses, which every tower has; use the reduction "
                "'sum_over_batch_size', or no regularizers."
            )
        merged = meetings.logs(logs)
        if ranks is not None:
            ranks.results.note_step(method, merged)
        return merged

    def _meetings(self, **options: Any) -> Meetings:
        # A single tower, with no ranks, has nothing to add.
        is_one = bool(options.get("alone")) and self._own.ranks is None
        return Meetings(
            self._own.towers,
            self._own.main,
            APPLY[self._own.variables],
            of_towers=self._own.of_towers,
            reducer=self._own.reducer if is_one else self._own.add,
            states=self._own.states.of,
            accumulation=self._own.accumulation,
            applier=None if self._own.flat is None else self._own.flat.optimizer,
            ranks=self._own.ranks,
            **options,
        )

    def finish_epoch(self) -> None:
        """Takes part in other ranks' updates until none has a batch."""
        if self._own.ranks is not None:
            idle = self._meetings(weights=None, average=False)
            self._own.ranks.finish_epoch(idle.apply_reduced, idle.collect_none)

    def predict(self, data: Any) -> Any:
        """Returns every copy's predictions for its part, in the batch's order."""
        data = self._held("predict_step", data)
        sizes, parts, lent = self._cut(data, metrics=False)
        return _batches.join(self._run("predict_step", parts), lent, sizes)

    def _cut(self, data: Any, *, metrics: bool) -> Any:
        """Cuts a batch into the towers' parts, and builds the models by the first.

        Returns the parts' sizes, the parts, and how many have a row that is lent.
        """
        data = _batches.tensors(data)
        count, own, ranks = len(self._own.towers), slice(None), self._own.ranks
        if ranks is not None and metrics:  # Every rank predicts all that it gets.
            count, own = ranks.parts(count)
        sizes = _batches.checked_sizes(data, count)
        if tf.executing_eagerly():  # Tower 0 takes what all towers of its rank have.
            sizes, own = _by_rank(sizes, own, len(self._own.towers))
        parts = cut(data, sizes, lends_row=True)[own]
        sizes, parts = sizes[own], on_devices(parts, self._own.towers[: len(parts)])
        self._own.build(data, metrics=metrics)
        return sizes, parts, _batches.lent_rows(sizes)

    def _held(self, method: str, data: Any) -> Any:
        return data if tf.executing_eagerly() else self._last.hold(method, data)

    def forget_batch(self) -> None:
        """Frees the last batch."""
        self._last.forget()

    def run_again(self) -> None:
        """Runs the towers' parts of the last batch one by one; raises what fails.

        With tower 0's values, which it keeps: nothing is updated.
        """
        last, main, flat = self._last.take(), self._own.main, self._own.flat
        if last is None:
            return
        method, data = last
        count, own, ranks = len(self._own.towers), slice(None), self._own.ranks
        if ranks is not None and method != "predict_step":
            count, own = ranks.parts(count)
        parts = cut(data, _batches.checked_sizes(data, count), lends_row=True)[own]
        before = [variable.numpy() for variable in main.variables]
        meetings = self._meetings(weights=None, average=True, trains=False)

        def combine(place: Any, brought: list[Any]) -> Sequence[Any]:
            if place[0] == "result":
                return meetings.combine(place, brought)
            return [None] * len(brought)

        try:
            with meetings.held(), flat.training() if flat else nullcontext():
                for part, tower in zip(parts, self._own.towers, strict=True):
                    creating = tf.variable_creator_scope(_refuse_new_variable)
                    with (
                        _naming(tower),
                        tf.device(tower.device),
                        creating,
                        meeting_alone(combine),
                        tf.summary.record_if(False),
                    ):
                        getattr(main, method)(part)
        finally:
            for variable, value in zip(main.variables, before, strict=True):
                variable.assign(value)

    def _run(
        self,
        method: str,
        parts: Sequence[Any],
        meetings: Meetings | None = None,
        counted: Sequence[tf.Tensor] | None = None,
        factors: Sequence[tf.Tensor] = (),
    ) -> list[Any]:
        """Runs a step of every copy, traced once; eagerly tower 0's, for all."""
        if not tf.executing_eagerly():
            return self._run_once(method, parts, meetings, counted, factors)
        combine = _no_meeting
        if meetings is not None:
            combine, meetings.factors = meetings.combine, factors
        creating = tf.variable_creator_scope(_refuse_new_variable)
        with tf.device(self._own.towers[0].device), creating, meeting_alone(combine):
            return [getattr(self._own.main, method)(parts[0])]

    def _run_once(
        self,
        method: str,
        parts: Sequence[Any],
        meetings: Meetings | None,
        counted: Sequence[tf.Tensor] | None,
        factors: Sequence[tf.Tensor],
    ) -> list[Any]:
        def step(part: Any, model: Any, own_factors: Any, *_: Any) -> Any:
            if meetings is not None:
                meetings.factors = own_factors
            with (
                tf.variable_creator_scope(_refuse_new_variable),
                synchronized_layers(),
                _batches.after(part),
            ):
                return getattr(model, method)(part)

        flats = [()] * len(parts) if self._own.flat is None else self._own.flat.flats
        states = [self._own.states.known(own) for own in self._own.appliers]
        seeds, unlisted = global_seeds(), self._own.unlisted()
        items = [
            (
                part,
                model,
                factors[k : k + 1],
                flat,
                [own[k] for own in states if own],
                seeds,
                unlisted[k],
                self._own.states_by_row[k],
            )
            for k, (part, model, flat) in enumerate(
                zip(parts, self._own.models, flats, strict=True)
            )
        ]
        shared: list[Any] = []
        if self._own.variables == "parameter_server":
            every = (*self._own.main.variables, *unlisted[0])
            shared = [v for v in every if not is_random(v)]
        ranks = self._own.ranks if method == "train_step" else None
        num_ranks = 1 if ranks is None else ranks.group.size
        return call_towers_once(
            step,
            items,
            [tower.scope for tower in self._own.towers],
            combine=_no_meeting if meetings is None else meetings.combine,
            counted=counted,
            written_once=shared,
            kept_equal=self._own.kept_equal(),
            settle=None if num_ranks == 1 else self._settle,
            outside="" if len(items) * num_ranks == 1 else _OUTSIDE,
            inline=self._own.inline,
            jit_compile=self._own.compiled_by_xla and method == "train_step",
            num_ranks=num_ranks,
            sum_ranks=None if ranks is None else ranks.sum_layer,
        )

    def _settle(self, handles: Sequence[Any], values: Sequence[Any]) -> Sequence[Any]:
        """Returns what all ranks have for variables that train and a step assigned."""
        written, known = set(map(id, handles)), set(map(id, self._own.assigned))
        self._own.assigned += [
            own
            for own in map(tf_variable, self._own.kept_equal())
            if id(own.handle) in written and id(own) not in known
        ]
        ranks: Any = self._own.ranks
        return list(ranks.of_first(values))

    def _weights(self, parts: Sequence[Any], sizes: Sequence[Any]) -> Any:
        weights = [
            self._weight(part, size, tower)
            for part, size, tower in zip(parts, sizes, self._own.towers, strict=False)
        ]
        is_equal = isinstance(weights[0], int) and len(set(weights)) == 1
        return None if is_equal and self._own.ranks is None else weights

    def _weight(self, part: Any, size: Any, tower: Tower) -> Any:
        if self._own.weigh is None:
            return size
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(part)
        with tf.device(tower.device):
            weight = self._own.weigh(x, y, sample_weight)
            return tf.where(size > 0, weight, tf.zeros_like(weight))

    def trace_beforehand(self, data: Any) -> None:
        """Traces an own ``train_step`` that may make variables of its optimizers.

        TensorFlow traces twice what makes variables, and ranks match what they exchange
        by its place in a trace.
        """
        if not all(own.built for own in optimizers_of(self._own.main)):
            self.trace(data)

    def trace(self, data: Any) -> None:
        """Traces a step for batches of the specs ``data``, and runs none."""
        step = partial(self.step, "train_step")
        tf.function(step, autograph=False).get_concrete_function(data)


_OUTSIDE = (
    "they are outside of the towers' models. Make such a variable in make_model, as an "
    "attribute of the model or of a layer, so that each tower has its own, of which "
    "tower 0's is kept; or write what is equal in all towers, as by sum_over_towers"
)


def _by_rank(sizes: Sequence[Any], own: slice, count: int) -> tuple[list[Any], slice]:
    """Returns the rows of each rank, of ``count`` towers, and which rank is this."""
    firsts = range(0, len(sizes), count)
    of_ranks = [sum(sizes[first : first + count]) for first in firsts]
    rank = (own.start or 0) // count
    return of_ranks, slice(rank, rank + 1)


@contextmanager
def _naming(tower: Tower) -> Iterator[None]:
    """Notes a tower in errors that are raised inside."""
    try:
        yield
    except Exception as error:
        error.add_note(f"(in {tower.name} of {tower.total}, on {tower.device})")
        raise


def _refuse_new_variable(next_creator: Callable[..., Any], **kwargs: Any) -> Any:
    if not may_meet():  # In a meeting optimizers make their state.
        return next_creator(**kwargs)
    raise ValueError(
        f"TowerModel: the variable {kwargs.get('name')!r} was to be made in a step; "
        "make all variables in make_model, or in the layers' build."
    )


def _no_meeting(place: Any, brought: list[Any]) -> Sequence[Any]:
    raise RuntimeError(f"TowerModel: a predict_step came to {place} ({brought}).")
