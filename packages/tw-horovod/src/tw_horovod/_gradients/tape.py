"""Gradient tapes that combine the gradients of all ranks."""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tw_horovod._gradients.reducer import GradientReducer, make_reducer
from tw_horovod._keras import keras
from tw_horovod._operations.reductions import ALL_OPS, Average
from tw_horovod._state.group import global_process_set
from tw_horovod.compression import Compression

_PASSED_ON = (
    "batch_jacobian",
    "jacobian",
    "reset",
    "stop_recording",
    "watch",
    "watched_variables",
)


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

    ``gradtape`` is recorded already, or through the returned tape; ``op`` is Average,
    Sum, Min, Max or Product. All else is as in ``DistributedOptimizer``; local are the
    sources registered with ``register_local_source``.

    Raises:
      ValueError: an argument is out of range.
      TypeError: not a tape, or an argument has the wrong type.
    """
    if not isinstance(gradtape, tf.GradientTape):
        raise TypeError(f"gradtape must be a tf.GradientTape; got {gradtape!r}.")
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

    ``local_layers`` is one or several built Keras layers; each rank keeps the gradients
    of their variables. All else is as in ``DistributedGradientTape``.

    Raises:
      ValueError: an item of ``local_layers`` is not a layer.
    """
    local = find_local_variables(local_layers)
    tape = DistributedGradientTape(
        gradtape,
        compression=compression,
        sparse_as_dense=sparse_as_dense,
        op=op,
        gradient_predivide_factor=gradient_predivide_factor,
        num_groups=num_groups,
        groups=groups,
        process_set=process_set,
        scale_local_gradients=scale_local_gradients,
    )
    for variable in local:
        tape.register_local_source(variable)
    return tape


def find_local_variables(local_layers: Any) -> list[Any]:
    """Returns the trainable variables of one or several Keras layers."""
    layers = [] if local_layers is None else local_layers
    layers = list(layers) if isinstance(layers, list | tuple) else [layers]
    others = [layer for layer in layers if not isinstance(layer, keras.layers.Layer)]
    if others:
        raise ValueError(f"local_layers must be Keras layers; got {others!r}.")
    return [variable for layer in layers for variable in layer.trainable_weights]


class _DistributedGradientTape(tf.GradientTape):  # type: ignore[misc]
    """A wrapper of the tape that records; only ``gradient`` differs.

    Jacobians are this rank's.
    """

    def __init__(self, tape: tf.GradientTape, reducer: GradientReducer) -> None:
        super().__init__()
        for method in _PASSED_ON:
            setattr(self, method, getattr(tape, method))
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
