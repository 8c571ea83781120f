"""Gradient tapes that combine the gradients of all ranks."""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tw_core.checks import caller, public
from tw_syncrep.horovod._basics import ALL_OPS, Average, global_process_set
from tw_syncrep.horovod._gradients import GradientReducer, make_reducer
from tw_syncrep.horovod.compression import Compression


@public
def DistributedGradientTape(
    gradtape: tf.GradientTape,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    op: Any = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Any = None,
    process_set: Any = global_process_set,
    scale_local_gradients: bool = True,
) -> Any:
    """Returns a tape whose ``gradient`` is reduced over all ranks.

    Args:
      gradtape: already recorded, or to be recorded through the returned tape.
      device_dense: changes nothing.
      device_sparse: changes nothing.
      compression: of the gradients that are sent.
      sparse_as_dense: whether sparse gradients are made dense first.
      op: Average, Sum, Min, Max or Product.
      gradient_predivide_factor: divisor applied before the sum of a mean; the result is
        multiplied by it afterwards.
      num_groups: deprecated for ``groups``.
      groups: changes nothing: all gradients travel together.
      process_set: all ranks.
      scale_local_gradients: whether gradients of sources registered with
        ``register_local_source``, which each rank keeps, are divided by the number of
        ranks.

    Raises:
      NotImplementedError: Adasum, another process set.
      ValueError: ``init`` was not called; an argument is out of range.
      TypeError: not a tape, or an argument has the wrong type.
    """
    if not isinstance(gradtape, tf.GradientTape):
        raise TypeError(f"{caller()}: needs a tf.GradientTape; got {gradtape!r}.")
    reducer = make_reducer(
        ALL_OPS,
        op=op,
        compression=compression,
        sparse_as_dense=sparse_as_dense,
        gradient_predivide_factor=gradient_predivide_factor,
        num_groups=num_groups,
        groups=groups,
        process_set=process_set,
        scale_local_gradients=scale_local_gradients,
    )
    return _DistributedGradientTape(gradtape, reducer)


def PartialDistributedGradientTape(
    gradtape: tf.GradientTape,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    op: Any = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Any = None,
    process_set: Any = global_process_set,
    local_layers: Any = None,
    scale_local_gradients: bool = True,
) -> Any:
    """Returns a ``DistributedGradientTape`` that keeps some layers local to each rank.

    Args:
      gradtape: as in ``DistributedGradientTape``.
      device_dense: changes nothing.
      device_sparse: changes nothing.
      compression: as in ``DistributedGradientTape``.
      sparse_as_dense: as in ``DistributedGradientTape``.
      op: as in ``DistributedGradientTape``.
      gradient_predivide_factor: as in ``DistributedGradientTape``.
      num_groups: deprecated for ``groups``.
      groups: changes nothing.
      process_set: all ranks.
      local_layers: one or several built Keras layers; each rank keeps the gradients of
        their variables.
      scale_local_gradients: as in ``DistributedGradientTape``.

    Raises:
      NotImplementedError: as in ``DistributedGradientTape``.
      ValueError: as in ``DistributedGradientTape``; an item is not a layer.
    """
    import keras

    layers = [] if local_layers is None else local_layers
    layers = list(layers) if isinstance(layers, list | tuple) else [layers]
    others = [layer for layer in layers if not isinstance(layer, keras.layers.Layer)]
    if others:
        raise ValueError(
            "PartialDistributedGradientTape: local_layers must be Keras layers; got "
            f"{others!r}."
        )
    tape = DistributedGradientTape(
        gradtape,
        device_dense,
        device_sparse,
        compression,
        sparse_as_dense,
        op,
        gradient_predivide_factor,
        num_groups,
        groups,
        process_set,
        scale_local_gradients,
    )
    for layer in layers:
        for variable in layer.trainable_weights:
            tape.register_local_source(variable)
    return tape


class _DistributedGradientTape(tf.GradientTape):  # type: ignore[misc]
    """A wrapper of the tape that records; only ``gradient`` differs."""

    def __init__(self, tape: tf.GradientTape, reducer: GradientReducer) -> None:
        """Wraps a tape, recorded already or not."""
        super().__init__()
        self._wrapped, self._reducer = tape, reducer
        self._local: dict[int, Any] = {}

    def __enter__(self) -> "_DistributedGradientTape":
        self._wrapped.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._wrapped.__exit__(*error)

    def register_local_source(self, source: Any) -> None:
        """Excludes a source's gradient from reduction."""
        self._local[id(source)] = source

    def gradient(
        self,
        target: Any,
        sources: Any,
        output_gradients: Any = None,
        use_generic_names: bool = False,
        *,
        unconnected_gradients: Any = tf.UnconnectedGradients.NONE,
    ) -> Any:
        """Reduces the wrapped tape's gradients; ``use_generic_names`` has no effect."""
        grads = self._wrapped.gradient(
            target,
            sources,
            output_gradients=output_gradients,
            unconnected_gradients=unconnected_gradients,
        )
        reduced = self._reducer.reduce(
            tf.nest.flatten(grads), tf.nest.flatten(sources), self._local
        )
        return tf.nest.pack_sequence_as(sources, reduced)

    def get_local_and_global_gradients(
        self,
        target: Any,
        sources: Sequence[Any],
        output_gradients: Any = None,
        use_generic_names: bool = False,
    ) -> tuple[list[tuple[Any, Any]], list[tuple[Any, Any]]]:
        """Returns (source, gradient) pairs: those of local sources, and the rest."""
        grads = self.gradient(target, sources, output_gradients)
        pairs = list(zip(sources, grads, strict=True))
        local = [pair for pair in pairs if id(pair[0]) in self._local]
        return local, [pair for pair in pairs if id(pair[0]) not in self._local]

    def jacobian(self, *args: Any, **kwargs: Any) -> Any:
        """Computes this rank's Jacobian."""
        return self._wrapped.jacobian(*args, **kwargs)

    def batch_jacobian(self, *args: Any, **kwargs: Any) -> Any:
        """Computes this rank's batch Jacobian."""
        return self._wrapped.batch_jacobian(*args, **kwargs)

    def watch(self, tensor: Any) -> None:
        """Makes the wrapped tape watch a tensor."""
        self._wrapped.watch(tensor)

    def watched_variables(self) -> Any:
        """Returns the variables that the wrapped tape watches."""
        return self._wrapped.watched_variables()

    def stop_recording(self) -> Any:
        """Returns the wrapped tape's scope."""
        return self._wrapped.stop_recording()

    def reset(self) -> None:
        """Resets the wrapped tape."""
        self._wrapped.reset()
