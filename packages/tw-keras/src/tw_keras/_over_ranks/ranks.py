"""The other processes of a ``TowerModel``, and coordination between steps.

Every rank runs Keras's ``fit`` on its own towers. Ranks sum gradients in every step,
together with whether a rank had a batch and whether one of its callbacks asks to stop,
and metrics at the end of an epoch. A rank whose data has ended sends zeros and applies
the others' updates, until no rank has a batch.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from tw_core.internal import tf_variable
from tw_core.ranks import RankGroup
from tw_keras._keras_compat import end_after, iterator_of
from tw_keras._over_ranks.agreement import begin_fit
from tw_keras._over_ranks.exchanges import Exchanges
from tw_keras._over_ranks.local_steps import Alone, LocalSteps
from tw_keras._over_ranks.results import Results
from tw_keras._update.gradients import name_of, unnumbered

_Run = Callable[..., Any]


class Ranks:
    """The other processes, as one rank's model sees them."""

    def __init__(
        self,
        group: RankGroup,
        *,
        shares_data: bool,
        ends_first: bool,
        local_steps: LocalSteps | None = None,
        wire_dtype: Any = None,
    ) -> None:
        """Takes whether ranks share batches, and whether the first to end ends all."""
        self.group, self.shares_data = group, shares_data
        # Where ranks train alone between averagings, their steps exchange nothing.
        self.alone = None if local_steps is None else Alone(group, local_steps)
        self._ends_first = ends_first
        self.exchanges = Exchanges(
            group, shares_data=shares_data, wire_dtype=wire_dtype
        )
        self.results = Results(group)
        self.num_calls = 0  # made by all ranks together, such as fit
        self.has_begun = False  # All ranks have received rank 0's values.
        self._asked = self.stops = False
        self._is_last = True  # This rank had a batch in the epoch's last step.
        self._may_stop = True  # Some rank's callbacks may ask to, at an epoch's end.
        self._batches: Any = None  # Keras's, of the epoch
        self._left = 0  # batches left
        self._is_over = False  # No rank has another.

    @property
    def is_first(self) -> bool:
        """Whether this rank writes files and shows progress."""
        return self.group.rank == 0

    def parts(self, num_towers: int) -> tuple[int, slice]:
        """Returns into how many parts a batch is cut, and which are this rank's."""
        if not self.shares_data:
            return num_towers, slice(num_towers)
        first = self.group.rank * num_towers
        return self.group.size * num_towers, slice(first, first + num_towers)

    def forget_steps(self) -> None:
        """Forgets what steps exchange and return, as the model is compiled again."""
        self.exchanges.forget()
        self.results = Results(self.group)
        if self.alone is not None:
            self.alone.forget()

    def running(self, function: _Run) -> _Run:
        """Wraps the function that runs a step, or several."""
        if self.alone is not None:
            return self._running_alone(self.alone, function)
        bounded = self.group.bounded(function)

        def run(iterator: Any) -> Any:
            more = self._has_more_after(iterator)
            self.exchanges.say_next(to_stop=self._asked, has_more=more)
            logs = bounded(iterator)
            self._hear()
            return logs

        return run

    def _running_alone(self, alone: Alone, function: _Run) -> _Run:
        def run(iterator: Any) -> Any:
            more = self._has_more_after(iterator)
            steps = self._batches.steps_per_execution if self._is_of(iterator) else 1
            alone.begin()
            logs = function(iterator)
            if alone.is_due(steps):
                self._average(has_more=more)
            return logs

        return run

    def _average(self, *, has_more: bool) -> None:
        alone: Any = self.alone
        self._is_over, ends = alone.average(has_more=has_more, stops=self._asked)
        self.stops = self.stops or ends

    def average_rest(self) -> None:
        """Averages after steps outside of ``fit``; all ranks call it."""
        if self.alone is not None and self.alone.has_steps:
            self._average(has_more=False)

    def _is_of(self, iterator: Any) -> bool:
        """Returns whether an iterator is that of the epoch."""
        # Others belong to ``train_on_batch``, or to a ``fit`` in a callback.
        return iterator_of(self._batches) is iterator

    def _has_more_after(self, iterator: Any) -> bool:
        """Returns whether this rank may have another step after the next batch's."""
        if not self._is_of(iterator):
            return True
        self._left -= 1
        return self._left != 0 or self._batches.steps_per_execution > 1

    def _hear(self) -> bool:
        """Reads the ranks' reports of the last step; returns if any had a batch."""
        has_batch, stops, has_more = self.exchanges.heard()
        self.stops = self.stops or stops
        self._is_over = has_batch and not has_more
        return has_batch

    def ask_to_stop(self) -> None:
        """Notes that a callback of this rank asks to stop."""
        self._asked = True

    def go_on(self) -> None:
        """Clears requests to stop."""
        self._asked = self.stops = False

    def agree_on_stop(self) -> None:
        """Learns whether a callback of any rank asks to stop; all ranks call it."""
        if self._may_stop and not self.stops:
            asked = tf.constant([float(self._asked)])
            (total,) = self.group.sum([asked], names=["whether ranks stop"])
            self.stops = bool(total[0] > 0)

    def is_any(self, condition: bool) -> bool:
        """Returns whether a condition is true on any rank; all ranks call it."""
        flag = tf.constant([float(condition)])
        (total,) = self.group.sum([flag], names=["conditions"])
        return bool(total[0] > 0)

    def begin_epoch(self, batches: Any) -> None:
        """Prepares an epoch over Keras's ``batches``, which may end early."""
        self.exchanges.begin_epoch()
        if self._ends_first:
            self._end_with_first(batches)
        self._batches, self._is_over = batches, False
        self._left = batches.num_batches or 0  # 0: not known

    def _end_with_first(self, batches: Any) -> None:
        """Ends this rank's epoch with the first rank's last batch."""
        number = batches.num_batches
        numbers = [0] * self.group.size
        numbers[self.group.rank] = -1 if number is None else number
        numbers = tf.constant(numbers, tf.int64)
        (of_all,) = self.group.sum([numbers], names=["numbers of batches"])
        least, steps = int(tf.reduce_min(of_all)), batches.steps_per_execution
        if least < 0:
            raise ValueError(
                "TowerModel: uneven='stop' needs to know how many batches each rank "
                "has; pass steps_per_epoch, or data of known length."
            )
        if least == 0 or (least % steps and least < int(tf.reduce_max(of_all))):
            raise ValueError(
                "TowerModel: with uneven='stop' every rank needs a batch, and the "
                "smallest number of batches must be a multiple of "
                f"steps_per_execution={steps}; got {of_all.numpy().tolist()} by rank. "
                "Use uneven='wait'."
            )
        end_after(batches, least)

    def finish_epoch(self) -> None:
        """Takes part in the others' updates until no rank has a batch."""
        self._is_last, self._batches = True, None
        if self.alone is not None:
            while not self._is_over:
                self._average(has_more=False)
            return
        idle = None
        if not self._is_over:
            idle = self.exchanges.idle_step()
        if idle is None:
            return
        report, take_part = idle
        while not self._is_over:
            self.exchanges.say_next(to_stop=self._asked, has_more=False)
            totals = report()
            if not self._hear():
                return
            take_part(*totals)
            self._is_last = False

    def begin_fit(self, settings: Mapping[str, int], *, may_stop: bool) -> None:
        """Refuses settings that differ; gives ranks that share their data one seed."""
        steps = 0 if self.alone is None else self.alone.settings.steps
        every = {"data": self.shares_data, "uneven": self._ends_first, **settings}
        every["local_steps"] = steps
        self._may_stop = begin_fit(
            self.group, every, seeds=self.shares_data, may_stop=may_stop
        )

    def begin(self, variables: Sequence[Any]) -> None:
        """Gives all ranks the values of rank 0; all ranks call it."""
        self.group.broadcast(variables)
        self.has_begun = True

    def take_state(self, variables: Sequence[Any], *, of_last: bool) -> None:
        """Gives all ranks the state of rank 0, or of one that had the last batch.

        Layers synchronised over ranks are equal on those that had a batch.
        """
        if not variables:
            return
        root = 0
        if of_last:
            flags = [0] * self.group.size
            flags[self.group.rank] = int(self._is_last)
            (had,) = self.group.sum([tf.constant(flags)], names=["ranks with a batch"])
            root = int(tf.argmax(had))
        if root == 0:
            self.begin(variables)
            return
        values = [tf_variable(v).read_value() for v in variables]
        if self.group.rank != root:
            values = [tf.zeros_like(value) for value in values]
        names = [unnumbered(name_of(variable)) for variable in variables]
        for variable, value in zip(
            variables, self.group.sum(values, names=names), strict=True
        ):
            variable.assign(value)
