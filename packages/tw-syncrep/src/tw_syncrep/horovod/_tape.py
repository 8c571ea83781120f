"""Gradient tapes that combine the gradients of all ranks."""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tw_syncrep.horovod._basics import ALL_OPS, Average, global_process_set
from tw_syncrep.horovod._gradients import GradientReducer, make_reducer
from tw_syncrep.horovod.compression import Compression


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
    """Returns a tape whose ``gradient`` is what comes of those of all ranks.

    Args:
      gradtape: recorded already, or to be recorded through the tape returned.
      device_dense: changes nothing.
      device_sparse: changes nothing.
      compression: what gradients travel as.
      sparse_as_dense: whether sparse gradients become dense before.
      op: Average, Sum, Min, Max or Product.
      gradient_predivide_factor: what gradients are divided by before a mean, and times
        after.
      num_groups: deprecated for ``groups``.
      groups: changes nothing: all gradients travel together.
      process_set: all ranks.
      scale_local_gradients: whether gradients of sources that
        ``register_local_source`` was told of, which are of each rank alone, are divided
        by the number of ranks.

    Raises:
      NotImplementedError: Adasum, another process set.
      ValueError: ``init`` was not called; an argument is out of range.
      TypeError: no tape, or an argument of another type.
    """
    caller = "DistributedGradientTape"
    if not isinstance(gradtape, tf.GradientTape):
        raise TypeError(f"{caller}: needs a tf.GradientTape; got {gradtape!r}.")
    reducer = make_reducer(
        caller,
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
    """Returns a ``DistributedGradientTape`` that leaves some layers to each rank.

    Args:
      gradtape: as ``DistributedGradientTape``.
      device_dense: changes nothing.
      device_sparse: changes nothing.
      compression: as ``DistributedGradientTape``.
      sparse_as_dense: as ``DistributedGradientTape``.
      op: as ``DistributedGradientTape``.
      gradient_predivide_factor: as ``DistributedGradientTape``.
      num_groups: deprecated for ``groups``.
      groups: changes nothing.
      process_set: all ranks.
      local_layers: a Keras layer, built, or several: their variables' gradients are of
        each rank alone.
      scale_local_gradients: as ``DistributedGradientTape``.

    Raises:
      NotImplementedError: as ``DistributedGradientTape``.
      ValueError: as ``DistributedGradientTape``; what is no layer.
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
    """A tape in which another one records; only ``gradient`` does something else."""

    def __init__(self, tape: tf.GradientTape, reducer: GradientReducer) -> None:
        """Is made by ``DistributedGradientTape``."""
        super().__init__()
        self._wrapped, self._reducer = tape, reducer
        self._local: dict[int, Any] = {}

    def __enter__(self) -> "_DistributedGradientTape":
        self._wrapped.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._wrapped.__exit__(*error)

    def register_local_source(self, source: Any) -> None:
        """Leaves the gradient of a source to each rank."""
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
        """Computes gradients as the wrapped tape does, and reduces them.

        Args:
          target: as ``tf.GradientTape.gradient`` takes it.
          sources: as it takes them, one or any structure of them.
          output_gradients: as it takes them.
          use_generic_names: changes nothing.
          unconnected_gradients: as it takes them.

        Returns:
          In the structure of ``sources``; None where there is none.

        Raises:
          ReplicaTimeoutError: a rank is missing.
        """
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
        """Computes gradients, and tells those of local sources from the others.

        Args:
          target: as ``gradient``.
          sources: as ``gradient``, a list.
          output_gradients: as ``gradient``.
          use_generic_names: changes nothing.

        Returns:
          Pairs of sources and gradients: the local ones, and the others.
        """
        grads = self.gradient(target, sources, output_gradients)
        pairs = list(zip(sources, grads, strict=True))
        local = [pair for pair in pairs if id(pair[0]) in self._local]
        return local, [pair for pair in pairs if id(pair[0]) not in self._local]

    def jacobian(self, *args: Any, **kwargs: Any) -> Any:
        """Computes that of this rank."""
        return self._wrapped.jacobian(*args, **kwargs)

    def batch_jacobian(self, *args: Any, **kwargs: Any) -> Any:
        """Computes that of this rank."""
        return self._wrapped.batch_jacobian(*args, **kwargs)

    def watch(self, tensor: Any) -> None:
        """Has the wrapped tape watch it."""
        self._wrapped.watch(tensor)

    def watched_variables(self) -> Any:
        """Returns those of the wrapped tape."""
        return self._wrapped.watched_variables()

    def stop_recording(self) -> Any:
        """Returns the wrapped tape's scope."""
        return self._wrapped.stop_recording()

    def reset(self) -> None:
        """Resets the wrapped tape."""
        self._wrapped.reset()
