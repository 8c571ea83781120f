"""Callbacks: which run on a rank, and copying tower 0 to other towers after them.

A user's callback may set weights, the optimizer's state or a layer's variables at any
time; so do some of Keras's, such as ``SwapEMAWeights``.
"""

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tw_keras._copies.copies import Copies
from tw_keras._keras_compat import replace_initial_epoch
from tw_keras._over_ranks.ranks import Ranks


class Follower(keras.callbacks.Callback):  # type: ignore[misc] # untyped
    """Copies tower 0 to the other towers after callbacks that run between epochs.

    Ranks synchronise there too, after all callbacks.
    """

    def __init__(self, copies: Copies) -> None:
        super().__init__()
        self._copies = copies

    def copy(self, *_: Any, **__: Any) -> None:
        self._copies.make_equal()

    on_test_begin = on_test_end = on_predict_begin = on_predict_end = copy

    def on_train_begin(self, logs: Any = None) -> None:
        """Takes the values of rank 0, whose callbacks may have restored them."""
        self.copy()
        if self._copies.ranks is not None:
            replace_initial_epoch(self.model, self._copies.take_from_rank_0)
            self._copies.memory.take_of_rank_0()

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Discards gathered state, and prepares the ranks for an epoch."""
        self.copy()
        for state in self._copies.states:
            state.forget_gathered()
        if self._copies.ranks is not None:
            self._copies.ranks.begin_epoch(self._copies.train_batches)

    def on_train_end(self, logs: Any = None) -> None:
        """Gathers the reducer's memory on rank 0, as the model may be saved now."""
        self._copies.memory.gather()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Learns whether a callback on any rank asks to stop."""
        self.copy()
        if self._copies.ranks is not None:
            self._copies.ranks.agree_on_stop()


class _AfterBatches(Follower):
    """Also copies after callbacks that run between batches."""

    on_train_batch_begin = on_train_batch_end = Follower.copy


def follower(copies: Copies, callbacks: Sequence[Any]) -> keras.callbacks.Callback:
    """Returns the callback to run after ``callbacks``."""
    own = filter(_is_users, callbacks)
    changes = any(_overrides(one, _BATCH_HOOKS) for one in own)
    return (_AfterBatches if changes else Follower)(copies)


def look_between_batches(callbacks: Any) -> bool:
    """Returns whether callbacks may see an optimizer between the batches of an epoch.

    Of Keras's, only ``LambdaCallback`` and those that save every few batches do.
    """
    return any(
        _overrides(one, _BATCH_HOOKS)
        for one in _flat(callbacks)
        if not isinstance(one, Follower)
        if _is_users(one)
        or isinstance(one, keras.callbacks.LambdaCallback)
        or getattr(one, "save_freq", "epoch") != "epoch"
    )


def _is_users(callback: Any) -> bool:
    return not type(callback).__module__.startswith(("keras.", "tw_keras."))


def _overrides(callback: Any, hooks: Sequence[str]) -> bool:
    base = keras.callbacks.Callback
    functions = {h: getattr(getattr(callback, h), "__func__", None) for h in hooks}
    return any(functions[hook] is not getattr(base, hook) for hook in hooks)


def check_saves(callbacks: Any) -> None:
    """Refuses Keras callbacks that save every few batches."""
    for callback in _flat(callbacks):
        if isinstance(getattr(callback, "save_freq", None), int):
            raise ValueError(
                f"TowerModel: {type(callback).__name__}(save_freq="
                f"{callback.save_freq}) would save rank 0's weights between two "
                "averagings; with local_steps use save_freq='epoch'."
            )


def check_callbacks(callbacks: Any) -> None:
    """Refuses callbacks that need an optimizer's whole state, if ranks have parts."""
    for callback in _flat(callbacks, unwrap=True):
        if getattr(callback, "save_freq", "epoch") != "epoch":
            raise ValueError(
                f"TowerModel: {type(callback).__name__} saves between batches, when "
                "the optimizer's state is divided among ranks; with "
                "variables='sharded' and a group use save_freq='epoch'; got "
                f"{callback.save_freq!r}."
            )
        if type(callback).__name__ in ("SwapEMAWeights", "OrbaxCheckpoint"):
            raise ValueError(
                f"TowerModel: {type(callback).__name__} reads the optimizer's "
                "variables itself, of which a rank has only a part; with "
                "variables='sharded' and a group use ModelCheckpoint, and "
                "ema_overwrite_frequency."
            )


def may_save(callbacks: Any) -> bool:
    """Returns whether callbacks may save a model when an epoch ends."""
    known = keras.callbacks
    savers = (known.ModelCheckpoint, known.BackupAndRestore, known.LambdaCallback)
    return any(
        isinstance(one, savers) or (_is_users(one) and _overrides(one, _EPOCH_HOOKS))
        for one in _flat(callbacks, unwrap=True)
    )


def may_stop(callbacks: Any) -> bool:
    """Returns whether callbacks may ask to stop; some of Keras's never do."""
    never = (*_WRITERS, keras.callbacks.History, keras.callbacks.ReduceLROnPlateau)
    return any(type(callback) not in never for callback in _flat(callbacks))


def show_tower_0(callbacks: Sequence[Any], model: Any) -> None:
    """Passes ``model``, tower 0, to callbacks that serialize a model themselves.

    ``OrbaxCheckpoint`` does not call ``save``, but reads the model's parts.
    """
    kinds = getattr(keras.callbacks, "OrbaxCheckpoint", ())
    for one in callbacks:
        if isinstance(one, kinds):
            one.set_model = lambda _, one=one: type(one).set_model(one, model)


_BATCH_HOOKS = (
    *("on_train_batch_begin", "on_train_batch_end"),
    *("on_batch_begin", "on_batch_end"),
)
# Between the last batch of an epoch and the first of the next.
_EPOCH_HOOKS = [hook for hook in dir(keras.callbacks.Callback) if hook[:3] == "on_"]
for _hook in ("on_train_begin", *_BATCH_HOOKS):
    _EPOCH_HOOKS.remove(_hook)


_WRITERS = tuple(
    getattr(keras.callbacks, name)
    for name in (
        *("ModelCheckpoint", "OrbaxCheckpoint", "BackupAndRestore"),
        *("CSVLogger", "TensorBoard", "RemoteMonitor", "ProgbarLogger"),
    )
    if hasattr(keras.callbacks, name)
)


class _OnRank0(keras.callbacks.Callback):  # type: ignore[misc] # untyped
    """Marks a callback that runs on rank 0 alone."""

    def __init__(self, callback: Any) -> None:
        super().__init__()
        self.callback = callback


def on_rank_0(callback: keras.callbacks.Callback) -> keras.callbacks.Callback:
    """Makes ``TowerModel.fit`` run a callback on rank 0 alone.

    Keras's callbacks that write files or show progress already do; your own run on
    every rank. A callback on one rank must not change the model, or call methods that
    all ranks must call, such as ``evaluate``; it may ask to stop training.

    Args:
      callback: a ``keras.callbacks.Callback``.

    Returns:
      A callback to pass to ``TowerModel.fit``.

    Raises:
      TypeError: ``callback`` is not a Keras callback.
    """
    if not isinstance(callback, keras.callbacks.Callback):
        raise TypeError(
            "on_rank_0: callback must be a keras.callbacks.Callback; got "
            f"{callback!r:.80}."
        )
    return _OnRank0(callback)


def _flat(callbacks: Any, *, unwrap: bool = False) -> list[Any]:
    """Lists the callbacks in an argument of ``fit``; may ``unwrap`` those of rank 0."""
    every = tf.nest.flatten(getattr(callbacks, "callbacks", callbacks) or [])
    return of_this_rank(every, None) if unwrap else every


def of_this_rank(callbacks: Sequence[Any], ranks: Ranks | None) -> list[Any]:
    """Returns the callbacks of this rank."""
    if ranks is not None and not ranks.is_first:
        return [one for one in callbacks if not isinstance(one, (*_WRITERS, _OnRank0))]
    return [one.callback if isinstance(one, _OnRank0) else one for one in callbacks]
