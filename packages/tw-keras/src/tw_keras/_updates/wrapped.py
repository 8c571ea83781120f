"""An optimizer over towers, as the optimizer of a Keras model."""

from typing import Any

import keras

from tw_core import AccumulatingOptimizerLike, TowerOptimizerLike


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
