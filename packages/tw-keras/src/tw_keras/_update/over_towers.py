"""An optimizer over towers: as the optimizer of a Keras model, and as a place."""

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tw_core import AccumulatingOptimizerLike, Tower, TowerOptimizerLike
from tw_core.ranks import RankGroup
from tw_keras._update.gradients import Rows
from tw_keras._update.places import Place, Terms


class WrappedOptimizer(keras.optimizers.Optimizer):  # type: ignore[misc] # untyped
    """Stands in for an optimizer that takes the gradients of all towers at once.

    It has the members that Keras needs: ``scale_loss``, ``learning_rate`` and
    ``iterations``, which counts calls. State and checkpoints are the wrapped
    optimizer's.
    """

    def __init__(self, wrapped: TowerOptimizerLike) -> None:
        super().__init__(learning_rate=0.0, name="wrapped_optimizer")
        self.wrapped: Any = wrapped
        self.accumulates = self.progress is not None
        self.built = True

    @property
    def progress(self) -> tuple[int, int] | None:
        """The micro-batches accumulated, and those per update, outside of a step."""
        own = self.wrapped
        return own.progress if isinstance(own, AccumulatingOptimizerLike) else None

    @property
    def learning_rate(self) -> Any:
        """The wrapped optimizer's learning rate."""
        return getattr(self.wrapped, "learning_rate", 0.0)

    @learning_rate.setter
    def learning_rate(self, value: Any) -> None:
        own = self.learning_rate
        if not hasattr(own, "assign"):
            raise ValueError(
                "TowerModel: the learning rate of "
                f"{type(self.wrapped).__name__} is {own!r:.80}, which cannot be "
                "changed; pass a tf.Variable to it as learning_rate."
            )
        own.assign(value)

    def scale_loss(self, loss: Any) -> Any:
        """Returns the loss to differentiate."""
        return self.wrapped.apply_loss_scaling(loss)

    def copy_to_replicas(self) -> None:
        """Makes the wrapped optimizer copy tower 0's state to all, if it can."""
        if hasattr(self.wrapped, "copy_to_replicas") and self.iterations.numpy() > 0:
            self.wrapped.copy_to_replicas()

    def copy_to_ranks(self, group: Any) -> None:
        """Makes the wrapped optimizer copy rank 0's state to all ranks, if it can."""
        getattr(self.wrapped, "copy_to_ranks", lambda group: None)(group)

    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        """Refuses: one tower's gradients are not enough."""
        raise RuntimeError(
            f"TowerModel: {type(self.wrapped).__name__} takes the gradients of all "
            "towers; train with the TowerModel."
        )


def wrapped(value: Any) -> Any:
    """Wraps an optimizer over towers; returns anything else as it is."""
    is_keras = isinstance(value, keras.optimizers.Optimizer | type)
    if not is_keras and isinstance(value, TowerOptimizerLike):
        return WrappedOptimizer(value)
    return value


class OverTowers(Place):
    """Passes all towers' gradients to an optimizer that reduces them itself."""

    def __init__(
        self,
        optimizer: WrappedOptimizer,
        towers: Sequence[Tower],
        group: Any,
        at_once: tf.Variable,
    ) -> None:
        """Takes the group of an optimizer that accumulates, or None.

        Such a group's ranks exchange what is accumulated; ``at_once``: in all steps.
        """
        super().__init__(optimizer)
        self._towers = towers
        self.group, self._at_once = group, at_once
        self._variables: Sequence[Any] = ()  # of the last step

    @property
    def states(self) -> list[Any]:
        """None: the wrapped optimizer has them."""
        return []

    @property
    def averages(self) -> int:
        """Over how many processes' towers the optimizer averages."""
        return 1 if self.group is None else self.group.size

    def build(self, variables: Sequence[Any]) -> None:
        """Notes tower 0's variables, with and without a gradient."""
        self._variables = variables

    def make_equal(self) -> None:
        """Copies tower 0's state to the other towers, if the optimizer can."""
        self._optimizer.copy_to_replicas()

    def of_rank_0(self, group: RankGroup) -> list[Any]:
        """Takes rank 0's state itself, if the optimizer can."""
        self._optimizer.copy_to_ranks(group)
        return []

    def apply(self, rows: Rows, variables: Sequence[Any], terms: Terms) -> None:
        """Updates with [K][M] shares of a mean times K, or with [1][M] for all."""
        total = len(self._towers)
        every = rows if len(rows) == total else [*rows] * total
        given: dict[str, Any] = {"jit_compile": terms.jit_compile}
        if self._optimizer.accumulates and terms.weight is not None:
            # An update's other batches may have other weights.
            given["weights"] = [terms.weight / total] * total
        if self.group is not None:
            given["group"] = self.group
        names = list(map(id, variables))
        with tf.device(self._towers[0].device):
            of_all = [dict(zip(names, own, strict=True)) for own in every]
            self._optimizer.wrapped.apply(
                [[own.get(id(v)) for v in self._variables] for own in of_all], **given
            )
            self._optimizer.iterations.assign_add(1)
        if self.group is not None:
            tf.cond(self._at_once, self._average, lambda: tf.constant(False))

    def settle(self) -> None:
        """Averages accumulated gradients over the ranks; all ranks call it."""
        if self.group is not None:
            self._optimizer.wrapped.average_accumulated(self.group)

    def _average(self) -> tf.Tensor:
        self.settle()
        return tf.constant(True)
