"""Callbacks after which the other towers follow what was changed in tower 0.

A callback of one's own may set weights, the optimizer's state or a layer's variables at
any time; those of Keras that train on do so as well, such as ``SwapEMAWeights``.
"""

from collections.abc import Sequence
from typing import Any

import keras


class _AfterEpochs(keras.callbacks.Callback):  # type: ignore[misc] # untyped
    """Copies tower 0 to the others after callbacks that run between epochs."""

    def __init__(self, towers: Any) -> None:
        super().__init__()
        self._towers = towers

    def _copy(self, *_: Any, **__: Any) -> None:
        self._towers.copy_to_replicas()

    on_train_begin = on_epoch_begin = on_epoch_end = _copy
    on_test_begin = on_test_end = on_predict_begin = _copy


class _AfterBatches(_AfterEpochs):
    """Copies after callbacks that run between batches, too."""

    on_train_batch_begin = on_train_batch_end = _AfterEpochs._copy


def followers(towers: Any, callbacks: Sequence[Any]) -> keras.callbacks.Callback:
    """Returns the callback to run after ``callbacks``."""
    base = keras.callbacks.Callback
    changes = any(
        getattr(type(own), hook) is not getattr(base, hook)
        for own in callbacks
        if not type(own).__module__.startswith("keras.")
        for hook in _BATCH_HOOKS
    )
    return (_AfterBatches if changes else _AfterEpochs)(towers)


def show_tower_0(callbacks: Sequence[Any], model: Any) -> None:
    """Gives callbacks that write a model by themselves ``model``, tower 0.

    ``OrbaxCheckpoint`` does not call ``save``, but takes the model apart.
    """
    kinds = getattr(keras.callbacks, "OrbaxCheckpoint", ())
    for own in callbacks:
        if isinstance(own, kinds):
            own.set_model = lambda _, own=own: type(own).set_model(own, model)


_BATCH_HOOKS = (
    *("on_train_batch_begin", "on_train_batch_end"),
    *("on_batch_begin", "on_batch_end"),
)
