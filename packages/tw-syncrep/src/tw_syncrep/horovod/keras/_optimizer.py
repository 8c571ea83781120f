"""Keras optimizers that reduce gradients over all ranks."""

import functools
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tw_core.checks import check_flag, check_whole_number
from tw_core.gradients import map_values
from tw_core.modes import without_autograph
from tw_syncrep.horovod._basics import Average, Sum, global_process_set
from tw_syncrep.horovod._exchanges import scaled
from tw_syncrep.horovod._gradients import (
    GradientReducer,
    check_dense,
    make_reducer,
)
from tw_syncrep.horovod.compression import Compression

_CALLER = "DistributedOptimizer"


def DistributedOptimizer(
    optimizer: Any,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: Any = Average,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: Any = None,
    process_set: Any = global_process_set,
    scale_local_gradients: bool = True,
) -> Any:
    """Returns a copy of an optimizer that applies gradients reduced over all ranks.

    The copy has the configuration of ``optimizer`` and fresh state. Its class is a
    subclass of ``optimizer``'s with the same name, so that a model saved with it loads
    where this package is not installed.

    Args:
      optimizer: of Keras 3; the outermost, such as a ``LossScaleOptimizer``, if several
        wrap each other.
      name: of the copy; by default, that of ``optimizer``.
      device_dense: changes nothing.
      device_sparse: changes nothing.
      compression: of the gradients that are sent.
      sparse_as_dense: whether sparse gradients are made dense first.
      gradient_predivide_factor: divisor applied before the sum of a mean; the result is
        multiplied by it afterwards.
      op: Average or Sum.
      backward_passes_per_step: number of steps whose gradients each rank adds up
        before they are reduced and applied; ``iterations`` counts all of them.
      average_aggregated_gradients: whether sums over passes are divided by their
        number.
      num_groups: deprecated for ``groups``.
      groups: changes nothing: all gradients travel together.
      process_set: all ranks.
      scale_local_gradients: whether gradients of variables registered with
        ``register_local_var``, which each rank keeps, are divided by the number of
        ranks.

    Returns:
      The copy. Its ``apply`` and ``apply_gradients`` reduce first.

    Raises:
      NotImplementedError: another reduction or process set.
      ValueError: ``init`` was not called; an argument is out of range; an optimizer
        that reduces already.
      TypeError: not an optimizer of Keras 3, or an argument has the wrong type.
    """
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise TypeError(
            f"{_CALLER}: needs an optimizer of keras.optimizers (Keras 3) or of "
            f"tf.compat.v1.train; got {optimizer!r}."
        )
    if isinstance(optimizer, Distributed):
        raise ValueError(f"{_CALLER}: {optimizer!r} reduces gradients already.")
    check_whole_number(backward_passes_per_step=backward_passes_per_step, at_least=1)
    check_flag(average_aggregated_gradients=average_aggregated_gradients)
    reducer = make_reducer(
        (Average, Sum),
        op=op,
        compression=compression,
        sparse_as_dense=sparse_as_dense,
        gradient_predivide_factor=gradient_predivide_factor,
        num_groups=num_groups,
        groups=groups,
        process_set=process_set,
        scale_local_gradients=scale_local_gradients,
    )
    share = 1.0
    if average_aggregated_gradients:
        share = 1.0 / backward_passes_per_step
    own = type(optimizer)
    settings = (reducer, backward_passes_per_step, share)
    members = {"__module__": own.__module__, "_settings": settings}
    cls: Any = type(own.__name__, (Distributed, own), members)
    config = optimizer.get_config()
    return cls.from_config(config | {"name": name} if name else config)


class _State:
    """State of a distributed optimizer that Keras does not save."""

    def __init__(self, reducer: GradientReducer, passes: int, share: float) -> None:
        """Starts at pass 0; ``share`` multiplies the sums over ``passes`` of a step."""
        self.reducer, self.passes, self.share = reducer, passes, share
        self.local: dict[int, Any] = {}
        self.count: tf.Variable | None = None
        self.sums: dict[int, tf.Variable] = {}

    def make_variables(self, grads: Sequence[Any], variables: Sequence[Any]) -> None:
        """Makes the sums over passes that do not exist yet."""
        with tf.init_scope():
            if self.count is None:
                self.count = tf.Variable(0, trainable=False, name="horovod_passes")
            for grad, variable in zip(grads, variables, strict=True):
                if grad is not None and id(variable) not in self.sums:
                    start = tf.zeros(variable.shape, grad.dtype)
                    self.sums[id(variable)] = tf.Variable(start, trainable=False)


class _CallableList(list[Any]):
    """A list of variables for both ``optimizer.variables`` and ``.variables()``."""

    def __call__(self) -> "_CallableList":
        return self


class Distributed:
    """The part of a distributed optimizer that is not Keras's."""

    _horovod: Any = None
    _settings: tuple[GradientReducer, int, float]  # The class's: from_config finds it.

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._horovod = _State(*self._settings)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Returns a copy with fresh state, as Keras does, that also reduces."""
        own: Any = self
        made = type(own).from_config(own.get_config())
        made._horovod.local.update(self._horovod.local)
        return made

    def __copy__(self) -> Any:
        return self.__deepcopy__({})

    @property
    def variables(self) -> _CallableList:
        """The optimizer's variables."""
        return _CallableList(super().variables)  # type: ignore[misc]

    def __setattr__(self, name: str, value: Any) -> None:
        # A LossScaleOptimizer sets this when it wraps an optimizer. It skips steps
        # according to this rank's gradients alone, so other ranks would wait for it.
        if name == "loss_scale_factor" and value is None and self._horovod is not None:
            raise ValueError(
                f"{_CALLER}: cannot be inside a LossScaleOptimizer, which Keras puts "
                "around the optimizer of a mixed_float16 model; pass hvd."
                "DistributedOptimizer(keras.optimizers.LossScaleOptimizer(optimizer))."
            )
        super().__setattr__(name, value)

    def register_local_var(self, var: Any) -> None:
        """Excludes a variable's gradient from reduction."""
        self._horovod.local[id(var)] = var

    @without_autograph
    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        """Reduces gradients, [N] with None where there is none, and applies them."""
        base: Any = super()
        own: Any = self
        known = list(grads)
        given = trainable_variables
        variables = list(own._trainable_variables if given is None else given)
        if len(known) != len(variables):  # Keras refuses it.
            base.apply(known, trainable_variables)
        elif self._horovod.passes > 1 and any(g is not None for g in known):
            self._add_pass(known, variables, base.apply)
        else:
            state = self._horovod
            reduced = state.reducer.reduce(known, variables, state.local)
            base.apply(reduced, trainable_variables)

    def _add_pass(self, grads: list[Any], variables: list[Any], apply: Any) -> None:
        state = self._horovod
        own: Any = self
        dense = state.reducer.densify(grads)
        check_dense(dense)
        if not own.built:
            own.build(variables)
        state.make_variables(dense, variables)
        sums = [
            None if grad is None else state.sums[id(variable)]
            for grad, variable in zip(dense, variables, strict=True)
        ]
        for kept, grad in zip(sums, dense, strict=True):
            if kept is not None:
                kept.assign_add(grad)
        state.count.assign_add(1)

        def finish() -> tf.Tensor:
            totals = [None if kept is None else kept.read_value() for kept in sums]
            reduced = state.reducer.reduce(totals, variables, state.local)
            share = functools.partial(scaled, factor=state.share)
            apply(
                [g if g is None else map_values(share, g) for g in reduced], variables
            )
            for kept in [state.count, *(kept for kept in sums if kept is not None)]:
                kept.assign(tf.zeros_like(kept))
            return tf.constant(True)

        def count() -> tf.Tensor:
            getattr(self, "inner_optimizer", own)._iterations.assign_add(1)
            return tf.constant(False)

        tf.cond(tf.equal(state.count, state.passes), finish, count)
