"""Private members of Keras that this package needs: each is named here, and only here.

There is no public name for any of them. Some are overridden by name elsewhere, in
``_as_tower_0`` and ``_model``: what Keras saves, clones and tracks of a model, and what
it calls before it traces a step and after an epoch.
"""

import os
import shutil
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from operator import methodcaller
from pathlib import Path
from types import FrameType
from typing import Any

import keras
import tensorflow as tf

from tw_core.internal import tf_variable
from tw_keras._files import companion_of, is_remote


def _reader(name: str) -> Callable[[Any], Any]:
    return lambda owner: getattr(owner, name, None)


layers_of = methodcaller("_flatten_layers")  # a model and all inside, outer ones first
compiles_by_default = methodcaller("_resolve_auto_jit_compile")  # a model, by XLA
compiled_loss_of = _reader("_compile_loss")  # of a model: adds its losses
mask_of = _reader("_keras_mask")  # of a layer's output
dataset_of = _reader("_distributed_dataset")  # of an epoch's batches, in ``tf.data``
iterator_of = _reader("_current_iterator")  # of an epoch's batches, passed to steps

# Methods that are replaced on objects, while a step is traced or an optimizer applies.
ADDED_LOSSES = "_aggregate_additional_loss"  # of a model: regularizers, ``add_loss``
VARIABLE_KEY = "_var_key"  # of an optimizer: what identifies a variable
AVERAGING = (  # of an optimizer, by ``use_ema``
    "_update_model_variables_moving_average",
    "_overwrite_model_variables_with_average_value",
)


@contextmanager
def replaced(owner: Any, name: str, new: Callable[[Any], Any]) -> Iterator[None]:
    """Replaces a method on an object, which keeps its class and so is saved as usual.

    ``new`` returns the replacement of the method that it takes.
    """
    before = vars(owner).get(name)
    setattr(owner, name, new(getattr(owner, name)))
    try:
        yield
    finally:
        delattr(owner, name)
        if before is not None:  # set on the object before
            setattr(owner, name, before)


def inner_of(optimizer: Any) -> Any:
    """Returns the optimizer in a ``LossScaleOptimizer``; any other as it is."""
    is_scaling = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
    return optimizer.inner_optimizer if is_scaling else optimizer


def counter_of(optimizer: Any) -> Any:
    """Returns the variable that counts calls; the public ``iterations`` are updates."""
    return inner_of(optimizer)._iterations


def trained_by(optimizer: Any) -> list[Any]:
    """Lists the variables for which an optimizer was built, in its order."""
    trained: list[Any] = inner_of(optimizer)._trainable_variables
    return trained


def slots_of(optimizer: Any) -> list[list[Any]]:
    """Lists an optimizer's lists with a slot per variable, in the variables' order."""
    count = len(optimizer._trainable_variables)
    known = ("_variables", "_trainable_variables")
    held = [value for name, value in vars(optimizer).items() if name not in known]
    return [own for own in held if isinstance(own, list) and len(own) == count]


def accumulators_of(optimizer: Any, variables: Sequence[Any]) -> list[tf.Variable]:
    """Returns the accumulators of some variables' gradients."""
    inner = inner_of(optimizer)
    places = [inner._get_variable_index(variable) for variable in variables]
    return [tf_variable(inner._accumulated_gradients[n]) for n in places]


def accumulates(optimizer: Any) -> bool:
    """Returns whether an optimizer accumulates as Keras's base class does."""
    inner, base = inner_of(optimizer), keras.optimizers.Optimizer
    if not getattr(inner, "gradient_accumulation_steps", None):
        return False
    names = ("apply", "_backend_apply_gradients")
    return all(getattr(type(inner), n) is getattr(base, n) for n in names) and (
        inner is optimizer
        or type(optimizer).apply is keras.optimizers.LossScaleOptimizer.apply
    )


def check_known(optimizer: Any, variables: Sequence[Any]) -> None:
    """Makes an optimizer refuse variables for which it was not built."""
    inner_of(optimizer)._check_variables_are_known(variables)


def replace_value(variable: Any, value: tf.Variable) -> None:
    """Replaces the TensorFlow variable in a variable of Keras."""
    variable._value = value


def state_of_layers(model: Any) -> list[Any]:
    """Lists layers' state, without frozen weights and without metrics."""
    return [v for layer in layers_of(model) for v in layer._non_trainable_variables]


def build_from_symbols(model: Any, batch: Any) -> None:
    """Builds a compiled model's optimizer, losses and metrics from a symbolic batch."""
    model._symbolic_build(data_batch=batch)


def look_up(model: Any, *args: Any, **kwargs: Any) -> Any:
    """Finds a child of a model for ``tf.train.Checkpoint``, as TensorFlow does."""
    model._maybe_initialize_trackable()
    return model._lookup_dependency(*args, **kwargs)


def replaced_losses(
    compiled: Any, new: Callable[[int, Any], Any]
) -> AbstractContextManager[None]:
    """Replaces each loss in a compiled loss, which is built, by a function."""

    def each(losses: Sequence[Any]) -> list[Any]:
        return [own._replace(loss=new(n, own.loss)) for n, own in enumerate(losses)]

    return replaced(compiled, "_flat_losses", each)


def set_mask(value: Any, mask: Any) -> None:
    """Attaches a mask to a tensor, as layers do for losses and metrics."""
    value._keras_mask = mask


def end_after(batches: Any, number: int) -> None:
    """Ends an epoch after ``number`` batches, if the data has more."""
    if batches.steps_per_epoch:  # Data continues in the next epoch.
        batches.steps_per_epoch = number
    else:
        batches._num_batches = number


def note_end(batches: Any) -> None:
    """Keeps the error by which data of unknown size ends, for ``end_iteration``."""
    if batches is None or "catch_stop_iteration" in vars(batches):
        return
    catch, batches.end = batches.catch_stop_iteration, None

    @contextmanager
    def catching() -> Iterator[None]:
        with catch():
            try:
                yield
            except tf.errors.OutOfRangeError as error:
                batches.end = error
                raise
        _clear_frames(batches.end)  # An epoch's iterator does not outlive it.

    batches.catch_stop_iteration = catching


def end_iteration(batches: Any) -> None:
    """Breaks the reference cycles around an iterator over data of unknown size.

    TensorFlow may take up to a minute to delete an old iterator, and would do so
    wherever Python collects garbage: in a step that other ranks wait for. From Python
    3.13 on, the error by which the data has ended is in such a cycle, too.
    """
    if batches is not None:
        batches._epoch_iterator = None
        _clear_frames(batches.end)
        batches.end = None


def _clear_frames(error: BaseException | None) -> None:
    """Clears all frames that an error holds, also those that TensorFlow hides."""
    while error is not None:
        for frame, _ in traceback.walk_tb(error.__traceback__):
            holder: FrameType | None = frame
            while holder is not None:
                try:
                    holder.clear()
                except RuntimeError:  # It still runs, and so do its callers.
                    break
                holder = holder.f_back
        error = error.__context__


def replace_initial_epoch(model: Any, new: Callable[[int], int]) -> None:
    """Replaces the epoch with which ``fit`` continues, which callbacks may set."""
    model._initial_epoch = new(model._initial_epoch or 0) or None


def back_up_at_once(callbacks: Sequence[Any]) -> None:
    """Makes ``BackupAndRestore`` replace its two files once both are written.

    A process killed between the two would leave the weights of one epoch with the
    number of another; one killed while writing, half a file. A backup within an epoch
    records that epoch's number; Keras records 0 in the first epoch of any ``fit``.
    """
    for callback in callbacks:
        if isinstance(callback, keras.callbacks.BackupAndRestore):
            callback.on_epoch_begin = partial(_note_epoch, callback)
            if not is_remote(callback.backup_dir):
                callback._save_model = partial(_save_at_once, callback)


def _note_epoch(callback: Any, epoch: int, logs: Any = None) -> None:
    callback._current_epoch = epoch
    type(callback).on_epoch_begin(callback, epoch, logs)


def _save_at_once(callback: Any) -> None:
    paths = callback._weights_path, callback._training_metadata_path
    new = [str(Path(path).with_name(f"new.{Path(path).name}")) for path in paths]
    callback._weights_path, callback._training_metadata_path = new
    try:
        type(callback)._save_model(callback)
    finally:
        callback._weights_path, callback._training_metadata_path = paths
    before = callback._prev_weights_path, callback._prev_training_metadata_path
    for path, kept in zip(paths, before, strict=True):
        if callback.double_checkpoint and os.path.exists(path):
            shutil.copy(path, kept)
    companions = [(companion_of(new[0]), companion_of(paths[0]))]
    for written, path in [*zip(new, paths, strict=True), *companions]:
        if os.path.exists(written):
            os.replace(written, path)
