"""Optimizers of TensorFlow 1 that combine the gradients of all ranks."""

import weakref
from typing import Any

import tensorflow as tf

from tw_core.flat_variables import slots_like_parts
from tw_core.internal import (
    builds_session_graph,
    check_elementwise,
    without_autograph,
)
from tw_core.variables import override_to_local_variable
from tw_horovod._gradients.keras_optimizers import copy_reducing
from tw_horovod._gradients.passes import Passes
from tw_horovod._gradients.reducer import (
    GradientReducer,
    Grads,
    make_reducer,
)
from tw_horovod._operations.reductions import ALL_OPS, Average, Sum
from tw_horovod._state.group import global_process_set
from tw_horovod.compression import Compression

v1 = tf.compat.v1


def DistributedOptimizer(
    optimizer: Any,
    name: str | None = None,
    use_locking: bool = False,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    backward_passes_per_step: int = 1,
    op: Any = Average,
    gradient_predivide_factor: float = 1.0,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: Any = None,
    process_set: Any = global_process_set,
    scale_local_gradients: bool = True,
) -> Any:
    """Returns an optimizer that applies gradients reduced over all ranks.

    Args:
      optimizer: of ``tf.compat.v1.train`` or ``keras.optimizers``; for Keras, a copy is
        returned, with fresh state.
      name: of the optimizer; by default, "Distributed" and the class of ``optimizer``.
      use_locking: of ``tf.compat.v1.train.Optimizer``.
      device_dense: changes nothing.
      device_sparse: changes nothing.
      compression: of the gradients that are sent.
      sparse_as_dense: whether sparse gradients are made dense first.
      backward_passes_per_step: number of steps whose gradients each rank adds up
        before they are reduced and applied.
      op: Average or Sum; for ``tf.compat.v1.train`` also Min, Max, Product.
      gradient_predivide_factor: divisor applied before the sum of a mean; the result is
        multiplied by it afterwards.
      average_aggregated_gradients: whether sums over passes are divided by their
        number.
      num_groups: deprecated for ``groups``.
      groups: changes nothing: all gradients are sent together.
      process_set: all ranks.
      scale_local_gradients: whether gradients of variables registered with
        ``register_local_var``, which each rank keeps, are divided by the number of
        ranks.

    Returns:
      For ``tf.compat.v1.train``, an optimizer whose ``compute_gradients`` reduces and
      whose ``apply_gradients`` does not. For Keras: ``keras.DistributedOptimizer``.

    Raises:
      NotImplementedError: Adasum.
      ValueError: an argument is out of range; a Keras optimizer reduces already.
      TypeError: not an optimizer, or an argument has the wrong type.
    """
    is_of_keras = not isinstance(optimizer, v1.train.Optimizer)
    reducer = make_reducer(
        (Average, Sum) if is_of_keras else ALL_OPS,
        op=op,
        compression=compression,
        sparse_as_dense=sparse_as_dense,
        gradient_predivide_factor=gradient_predivide_factor,
        num_groups=num_groups,
        groups=groups,
        process_set=process_set,
        scale_local_gradients=scale_local_gradients,
        backward_passes_per_step=backward_passes_per_step,
        average_aggregated_gradients=average_aggregated_gradients,
    )
    if is_of_keras:
        return copy_reducing(optimizer, name, reducer)
    name = name or f"Distributed{type(optimizer).__name__}"
    return _DistributedOptimizer(optimizer, name, use_locking, reducer)


class _DistributedOptimizer(v1.train.Optimizer):  # type: ignore[misc,name-defined]
    """A wrapped optimizer whose ``compute_gradients`` reduces over all ranks."""

    elementwise = True  # if the wrapped one is

    def __init__(
        self, optimizer: Any, name: str, use_locking: bool, reducer: GradientReducer
    ) -> None:
        super().__init__(name=name, use_locking=use_locking)
        self._optimizer, self._reducer = optimizer, reducer
        self.get_slot, self.variables = optimizer.get_slot, optimizer.variables
        self.get_slot_names = optimizer.get_slot_names
        self._local: dict[int, Any] = {}
        self._is_last: weakref.WeakKeyDictionary[Any, tf.Tensor] = (
            weakref.WeakKeyDictionary()
        )

    def register_local_var(self, var: Any) -> None:
        """Excludes a variable's gradient from reduction."""
        self._local[id(var)] = var

    def compute_gradients(self, *args: Any, **kwargs: Any) -> list[tuple[Any, Any]]:
        """Computes gradients, and reduces them in the last of several passes."""
        pairs = self._optimizer.compute_gradients(*args, **kwargs)
        grads = [grad for grad, _ in pairs]
        variables = [variable for _, variable in pairs]
        if self._reducer.passes == 1:
            reduced = self._reducer.reduce(grads, variables, self._local)
        else:
            reduced = self._add_pass(grads, variables)
        return list(zip(reduced, variables, strict=True))

    def apply_gradients(
        self, grads_and_vars: Any, global_step: Any = None, name: str | None = None
    ) -> Any:
        """Applies gradients in the last of several passes; counts every pass."""
        pairs = list(grads_and_vars)
        variables = [variable for _, variable in pairs]
        check_elementwise(self._optimizer, variables)
        leaves = [
            leaf for grad, _ in pairs if grad is not None for leaf in _parts(grad)
        ]

        def apply() -> Any:
            with slots_like_parts(variables):
                return self._optimizer.apply_gradients(
                    pairs, global_step=global_step, name=name
                )

        if self._reducer.passes == 1:
            # A gradient may have to read another variable before its update.
            awaited = map(tf.identity, leaves) if builds_session_graph() else []
            with tf.control_dependencies(list(awaited)):
                return apply()
        is_last = self._is_last.get(v1.get_default_graph())
        if is_last is None:
            raise RuntimeError(
                "DistributedOptimizer.apply_gradients: with backward_passes_per_step "
                "above 1 call compute_gradients, in the same graph, before."
            )

        def finish() -> tf.Tensor:
            with tf.control_dependencies([apply()]):
                return tf.constant(True)

        def count() -> tf.Tensor:
            done = []
            if global_step is not None:
                one = tf.ones([], global_step.dtype.base_dtype)
                done.append(v1.assign_add(global_step, one))
            with tf.control_dependencies(done):
                return tf.constant(False)

        with tf.control_dependencies(leaves):
            return tf.cond(is_last, finish, count).op

    @without_autograph
    def _add_pass(self, grads: Grads, variables: list[Any]) -> list[Any]:
        if not builds_session_graph():
            raise ValueError(
                "DistributedOptimizer: backward_passes_per_step above 1 is for session "
                "graphs with this optimizer; use one of keras.optimizers."
            )
        own = [n for n, grad in enumerate(grads) if grad is not None]

        def finish(reduced: list[Any]) -> list[Any]:
            return [tf.constant(True), *(reduced[n] for n in own)]

        def wait(read: Any) -> list[Any]:
            sums = read()
            return [tf.constant(False), *(sums[n] for n in own)]

        passes = Passes(self._reducer)
        passes.local.update(self._local)
        with tf.name_scope("tw_horovod_passes"), override_to_local_variable():
            found = passes.add(grads, variables, finish=finish, wait=wait)
        self._is_last[v1.get_default_graph()] = found[0]
        results = dict(zip(own, found[1:], strict=True))
        return [results.get(n) for n in range(len(grads))]


def _parts(grad: Any) -> list[tf.Tensor]:
    if isinstance(grad, tf.IndexedSlices):
        return [grad.values, grad.indices]
    return [grad]
