"""Collectives that run at once on values, and loading of models."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from tw_horovod._gradients.keras_optimizers import build, find_variables
from tw_horovod._keras import IS_KERAS_2, keras
from tw_horovod._operations import ops, shares, variables
from tw_horovod._operations.reductions import Average
from tw_horovod.compression import Compression
from tw_horovod.keras._optimizer import DistributedOptimizer
from tw_ranks.internal import eager_mode


def allreduce(
    value: Any,
    name: str | None = None,
    average: bool | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    op: Any = None,
    compression: Any = Compression.none,
) -> Any:
    """Reduces a value over all ranks, as ``tw_horovod.allreduce`` does."""
    return _run(
        lambda: ops.allreduce(
            tf.constant(value),
            average=average,
            compression=compression,
            op=op,
            prescale_factor=prescale_factor,
            postscale_factor=postscale_factor,
            name=name,
        )
    )


def allgather(value: Any, name: str | None = None) -> Any:
    """Joins the rows of all ranks, as ``tw_horovod.allgather`` does."""
    return _run(lambda: ops.allgather(tf.constant(value), name))


def broadcast(value: Any, root_rank: int, name: str | None = None) -> Any:
    """Returns one rank's value, as ``tw_horovod.broadcast`` does."""
    return _run(lambda: ops.broadcast(tf.constant(value), root_rank, name))


def reducescatter(value: Any, name: str | None = None, op: Any = Average) -> Any:
    """Gives each rank a share, as ``tw_horovod.reducescatter`` does."""
    return _run(lambda: shares.reducescatter(tf.constant(value), op=op, name=name))


def broadcast_global_variables(root_rank: int) -> None:
    """Sends the values of one rank's global variables to all ranks, in graph mode.

    Args:
      root_rank: the rank whose values are sent.

    Raises:
      RuntimeError: there is no session graph, or no default session.
    """
    done = variables.broadcast_global_variables(root_rank)
    session = tf.compat.v1.get_default_session()
    if session is None:
        raise RuntimeError(
            "broadcast_global_variables: needs a default session; call it inside "
            "`with session.as_default()`."
        )
    session.run(done)


def load_model(
    filepath: Any,
    custom_optimizers: Sequence[type] | None = None,
    custom_objects: Mapping[str, Any] | None = None,
    compression: Any = Compression.none,
    legacy_opts: bool = False,
) -> Any:
    """Loads a Keras model, and makes its optimizer a ``DistributedOptimizer``.

    Args:
      filepath: as ``keras.models.load_model`` takes it, e.g. of a ``.keras`` file.
      custom_optimizers: classes that the file may name.
      custom_objects: other objects that it may name.
      compression: of the gradients that are sent.
      legacy_opts: False with Keras 3; with Keras 2 it changes nothing, as all its
        optimizers are accepted.

    Returns:
      The model, with the optimizer's state.

    Raises:
      NotImplementedError: ``legacy_opts`` with Keras 3, which has no such optimizers.
      ValueError: no model can be read.
    """
    if legacy_opts and not IS_KERAS_2:
        raise NotImplementedError(
            "load_model: legacy_opts is not supported by Keras 3."
        )
    known = {cls.__name__: cls for cls in custom_optimizers or ()}
    model = keras.models.load_model(
        filepath, custom_objects={**known, **(custom_objects or {})}
    )
    loaded = getattr(model, "optimizer", None)
    if loaded is not None:
        made = DistributedOptimizer(loaded, compression=compression)
        if IS_KERAS_2 or loaded.built:
            build(loaded, model.trainable_variables)
            build(made, model.trainable_variables)
            pairs = zip(find_variables(made), find_variables(loaded), strict=True)
            for variable, value in pairs:
                variable.assign(value)
        model.optimizer = made
    return model


def _run(function: Callable[[], tf.Tensor]) -> Any:
    if tf.executing_eagerly():
        return function()
    with eager_mode():
        return function().numpy()
