"""``ModelAverager``: averages the variables of ranks that train alone in between.

Local SGD (Stich, "Local SGD Converges Fast and Communicates Little", 2019; Lin et al.,
"Don't Use Large Mini-Batches, Use Local SGD", 2020): every rank runs some steps alone,
and then all ranks average their weights. With an outer optimizer (DiLoCo, Douillard et
al., 2023; Wang et al., "SlowMo", 2020) the mean does not replace the weights: the
weights before the steps minus the mean is the gradient that this optimizer applies.
"""

import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tw_builders._local_steps.rules import Averaging, Report, agree
from tw_core import copy_to_replicas
from tw_core.internal import (
    apply_pairs,
    check_flag,
    check_kind,
    check_nested,
    check_number,
    check_whole_number,
    follow_variables,
    tf_variable,
    weigh,
)
from tw_core.ranks import RankGroup

Lists = Sequence[Sequence[Any]]  # [K][N] variables
_NARROW = (tf.float16, tf.bfloat16)


class ModelAverager:
    """Averages the variables of all ranks after every few steps that each made alone.

    All ranks create one with equal values, call ``after_step`` after each of their
    steps and ``finish`` at the end. In ``finish``, a rank whose data ends sooner takes
    part in the others' averagings, and takes their mean.

    An outer optimizer has its own state: save it with the model. After restoring or
    setting variables call ``restart``.

    >>> import keras
    >>> import tensorflow as tf
    >>> import tw_ranks
    >>> group = tw_ranks.join()
    >>> weights = [tf.Variable([1.0, 2.0])]
    >>> averager = ModelAverager([weights], group=group, steps=2)
    >>> [averager.after_step(weight=32) for _ in range(3)]
    [False, True, False]
    >>> averager.finish()
    >>> group.leave()
    """

    def __init__(
        self,
        variables: Lists,
        *,
        group: RankGroup,
        steps: int,
        outer: Any = None,
        state: Lists | Callable[[], Lists] = (),
        keeps_state: bool = False,
    ) -> None:
        """Records the variables' values, from which all ranks begin.

        Args:
          variables: [K][N] of this rank's towers, the same on all ranks; tower 0's are
            averaged, and the other towers get copies. ``[model.trainable_variables]``
            for a single tower. Those of whole numbers, such as seeds, are left as they
            are on each rank and tower.
          group: the ranks, from ``tw_ranks.join``.
          steps: how many steps each rank runs between two averagings, at least 1.
          outer: an optimizer, of Keras or TensorFlow, that applies, as a gradient, the
            values after the last averaging minus the mean, such as
            ``keras.optimizers.SGD(0.7, momentum=0.9, nesterov=True)``; it needs a copy
            of the variables. Its state of them is kept where it was made for others,
            too. None to take the mean itself, as SGD with rate 1 would.
          state: [K][M] variables of the towers' optimizers, or a function that returns
            them once they are made. Floating-point arrays are averaged; scalars and
            integers, such as counts of steps and learning rates, are taken from the
            rank that ran the most steps. By default each rank keeps its own.
          keeps_state: whether ``state`` is averaged only in ``finish``.

        Raises:
          TypeError: not lists of variables, or another argument of the wrong kind.
          ValueError: fewer than 1 step; no towers.
        """
        check_nested(variables=variables, of="variables")
        check_kind(RankGroup, "from tw_ranks.join, or have its methods", group=group)
        check_whole_number(steps=steps, at_least=1)
        check_flag(keeps_state=keeps_state)
        if not callable(state):
            check_nested(state=state, of="variables")
        self._towers = [list(filter(_has_mean, own)) for own in variables]
        self._group, self._every = group, steps
        self._variables = [tf_variable(own) for own in self._towers[0]]
        self._state, self._keeps_state = state, keeps_state
        self.outer, self._anchors = outer, list[tf.Variable]()
        if outer is not None:
            follow_variables(outer, self._towers[0])
            for own in self._variables:
                with tf.device(own.device):
                    self._anchors.append(tf.Variable(own, trainable=False))
        self._functions: dict[tuple[bool, bool], Any] = {}
        self._last: Averaging | None = None
        self._steps, self._weight = 0, 0.0

    def after_step(self, weight: float = 1.0) -> bool:
        """Counts a step of this rank, and averages with all ranks when it is due.

        Args:
          weight: the weight of the step's data in the mean, such as its rows.

        Returns:
          Whether this rank has averaged.

        Raises:
          TypeError: the weight is not a number.
          ValueError: it is negative.
        """
        check_number(weight=weight, at_least=0)
        self._steps, self._weight = self._steps + 1, self._weight + weight
        if self._steps < self._every:
            return False
        self.average(self._steps, self._weight)
        return True

    def finish(self) -> None:
        """Averages remaining steps, and takes part until no rank has another step.

        Then all ranks are equal, including their ``state``, and may continue.
        """
        while not self.average(self._steps, self._weight, has_more=False).is_last:
            pass

    def restart(self) -> None:
        """Restarts from the variables' present values, which all ranks must have.

        Call it after restoring or setting them.
        """
        self._steps, self._weight = 0, 0.0
        for anchor, own in zip(self._anchors, self._variables, strict=False):
            anchor.assign(own)

    def average(
        self,
        steps: float,
        weight: float,
        *,
        has_more: bool = True,
        stops: bool = False,
    ) -> Averaging:
        """Averages with all ranks, which all call it equally often.

        For loops that count steps themselves; others call ``after_step`` and
        ``finish``.

        Args:
          steps: the steps that this rank ran since the last call; 0 if it had no data.
          weight: the weight of their data.
          has_more: whether this rank may call it again before the end.
          stops: whether it asks all ranks to stop.

        Returns:
          The ranks' reports, combined: ``is_last``: no rank has more steps, or one asks
          to stop; ``stops``: one asks to stop; ``shares`` and ``has_steps``.

        Raises:
          TypeError: not numbers and flags.
          ValueError: a negative number.
        """
        check_number(steps=steps, at_least=0)
        check_number(weight=weight, at_least=0)
        check_flag(has_more=has_more)
        check_flag(stops=stops)
        rank, size = self._group.rank, self._group.size
        table = np.zeros([size, 4])
        table[rank] = Report(steps, weight, has_more, stops).row()
        [told] = self._group.sum([tf.constant(table)], names=["steps of ranks"])
        self._last = last = agree(told.numpy().tolist(), self._last)
        self._steps, self._weight = 0, 0.0
        states = last.is_last if self._keeps_state else last.has_steps
        if last.has_steps or (states and self._state):
            share = tf.constant(last.shares[rank], tf.float64)
            run = self._function(last.has_steps, states)
            run(share, tf.constant(last.lead == rank))
        return last

    def _function(self, with_weights: bool, with_state: bool) -> Any:
        """Returns the function that averages, traced once: ranks start it together."""
        key = with_weights, with_state
        if key not in self._functions:
            weights = self._variables if with_weights else []
            lists = self._state() if callable(self._state) else self._state
            lists = lists if with_state else []

            def run(share: tf.Tensor, leads: tf.Tensor) -> None:
                self._average(weights, lists, share, leads)

            made = tf.function(run, autograph=False)
            self._functions[key] = self._group.bounded(made)
        return self._functions[key]

    def _average(
        self,
        weights: Sequence[tf.Variable],
        lists: Lists,
        share: tf.Tensor,
        leads: tf.Tensor,
    ) -> None:
        state = [tf_variable(own) for own in lists[0]] if lists else []
        brought = []
        for n, own in enumerate(weights):
            with tf.device(own.device):
                value = own.read_value()
                if self._anchors:  # an outer optimizer's gradient
                    value = self._anchors[n].read_value() - value
                brought.append(weigh(_wide(value), share))
        for own in state:
            with tf.device(own.device):
                brought.append(_of_state(own.read_value(), share, leads))
        if not brought:
            return
        names = [_unnumbered(own) for own in (*weights, *state)]
        sums = self._group.sum(brought, names=names)
        sums = [
            tf.cast(value, own.dtype)
            for value, own in zip(sums, (*weights, *state), strict=True)
        ]
        if weights:
            self._take(sums[: len(weights)])
            if len(self._towers) > 1:
                copy_to_replicas(self._towers)
        for own, value in zip(state, sums[len(weights) :], strict=True):
            own.assign(value)
        if len(lists) > 1:
            copy_to_replicas(lists)

    def _take(self, means: Sequence[tf.Tensor]) -> None:
        """Assigns means, or applies them as gradients to the anchors."""
        if self.outer is None:
            for own, mean in zip(self._variables, means, strict=True):
                own.assign(mean)
            return
        for own, anchor in zip(self._variables, self._anchors, strict=True):
            own.assign(anchor)
        apply_pairs(self.outer, list(zip(means, self._towers[0], strict=True)))
        for own, anchor in zip(self._variables, self._anchors, strict=True):
            anchor.assign(own)


def _has_mean(variable: Any) -> bool:
    dtype = tf_variable(variable).dtype
    return bool(dtype.is_floating or dtype.is_complex)


def _wide(value: tf.Tensor) -> tf.Tensor:
    return tf.cast(value, tf.float32) if value.dtype in _NARROW else value


def _of_state(value: tf.Tensor, share: tf.Tensor, leads: tf.Tensor) -> tf.Tensor:
    """Returns a rank's term in the sum of an optimizer's state."""
    if value.dtype.is_floating and value.shape.rank != 0:
        return weigh(_wide(value), share)
    value = _wide(value) if value.dtype.is_floating else tf.cast(value, tf.int64)
    return tf.where(leads, value, tf.zeros_like(value))


def _unnumbered(variable: tf.Variable) -> str:
    """Returns a variable's name without the numbers that Keras counts per process."""
    return re.sub(r"_\d+(?=[_/:]|$)", "", variable.name)
