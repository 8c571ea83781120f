"""Steps that a rank runs alone, between averagings of all ranks' weights."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import keras
import tensorflow as tf

from tw_builders import ModelAverager
from tw_core.internal import check_whole_number
from tw_core.ranks import RankGroup

Lists = Sequence[Sequence[Any]]  # [K][N] variables


@dataclass(frozen=True)
class LocalSteps:
    """How ranks train alone for some steps, and then average.

    Attributes:
      steps: how many steps each rank runs between two averagings, at least 1.
      outer: a Keras optimizer that applies, as a gradient, the weights after the last
        averaging minus the mean weights (DiLoCo), such as ``keras.optimizers.SGD(0.7,
        momentum=0.9, nesterov=True)``; None to take the mean itself (local SGD).
      state: the model's optimizer state: ``"local"``: each rank keeps its own within an
        epoch; ``"averaged"``: it is averaged with the weights each time. Both average
        it at the end of an epoch.

    Raises:
      TypeError: ``outer`` is not an optimizer of Keras.
      ValueError: fewer than 1 step; an unknown ``state``.
    """

    steps: int
    outer: Any = None
    state: Literal["local", "averaged"] = "local"

    def __post_init__(self) -> None:
        """Checks the arguments."""
        check_whole_number(steps=self.steps, at_least=1)
        if self.state not in ("local", "averaged"):
            raise ValueError(
                f"state must be 'local' or 'averaged'; got {self.state!r}."
            )
        if not isinstance(self.outer, keras.optimizers.Optimizer | None):
            raise TypeError(
                "outer must be a Keras optimizer, such as keras.optimizers.SGD(0.7,"
                f" momentum=0.9, nesterov=True), or None; got {self.outer!r:.80}."
            )


class Alone:
    """One rank's steps since the last averaging."""

    def __init__(self, group: RankGroup, settings: LocalSteps) -> None:
        """Starts without a step; ``find`` and ``find_state`` are set by the copies."""
        self._group, self.settings = group, settings
        self.find: Callable[[], Lists] = list  # the averaged variables, [K][N]
        self.find_state: Callable[[], Lists] = list  # of the optimizers, [K][M]
        self._calls = 0  # steps called: some may have had no batch
        with tf.init_scope(), tf.device("/cpu:0"):
            # Steps that had a batch, and the weight of their data.
            self._counted = tf.Variable(tf.zeros([2], tf.float64), trainable=False)
        self._averager: ModelAverager | None = None
        self._is_stale = True

    def forget(self) -> None:
        """Forgets which variables are averaged, as the model is compiled again.

        Steps made before are averaged first, from the values before them.
        """
        self._is_stale = True

    def check_calls(self, steps: int) -> None:
        """Refuses to average within a call of ``steps_per_execution`` steps."""
        if self.settings.steps % steps:
            raise ValueError(
                "TowerModel: local_steps must be a multiple of steps_per_execution; "
                f"got {self.settings.steps} and {steps}."
            )

    def drop(self) -> None:
        """Forgets steps after an error, when ranks are out of step."""
        self._calls = 0
        self._counted.assign(tf.zeros([2], tf.float64))

    def note(self, weights: Sequence[Any]) -> None:
        """Counts a step while it runs, with its towers' weights."""
        own = tf.add_n([tf.cast(weight, tf.float64) for weight in weights])
        self._counted.assign_add(tf.stack([tf.ones_like(own), own]))

    @property
    def has_steps(self) -> bool:
        """Whether this rank has made steps since the last averaging."""
        return self._calls > 0

    @property
    def follows(self) -> bool:
        """Whether the variables may be others than those of the last averaging."""
        return self._is_stale and not self.has_steps

    def begin(self) -> None:
        """Records all ranks' first values, which callbacks may have set."""
        if self._is_stale:
            if self.has_steps:
                self.average(has_more=True, stops=False)
            self._is_stale = False
            self._averager = ModelAverager(
                self.find(),
                group=self._group,
                steps=self.settings.steps,
                outer=self.settings.outer,
                state=self.find_state,
                keeps_state=self.settings.state == "local",
            )
        if self._averager is not None and not self.has_steps:
            self._averager.restart()

    def is_due(self, steps: int) -> bool:
        """Counts steps, whether they had a batch or not; returns whether to average."""
        self._calls += steps
        return self._calls >= self.settings.steps

    def average(self, *, has_more: bool, stops: bool) -> tuple[bool, bool]:
        """Averages with all ranks; returns ``(is_last, stops)``.

        ``is_last``: no rank has more steps; ``stops``: a rank asks to stop.
        """
        if not self.has_steps:
            self.begin()
        steps, weight = self._counted.numpy().tolist()
        averager: Any = self._averager
        averaging = averager.average(steps, weight, has_more=has_more, stops=stops)
        self.drop()
        return averaging.is_last, averaging.stops


def read_local_steps(given: int | LocalSteps | None) -> LocalSteps | None:
    """Returns the settings of local steps, or None; refuses invalid ones."""
    if given is None or isinstance(given, LocalSteps):
        return given
    return LocalSteps(check_whole_number(local_steps=given))
