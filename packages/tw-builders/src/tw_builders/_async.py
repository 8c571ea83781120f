"""Asynchronous training: every tower applies its own gradients to shared variables."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import tensorflow as tf

from tw_builders._apply import apply_pairs
from tw_builders._data_parallel import (
    DataParallelBuilder,
    check_session_graph,
    check_tower_count,
)
from tw_builders._optimizers import check_optimizer, one_optimizer_per_tower
from tw_builders._parameter_server import shared_variable_devices
from tw_core import check_shared_grad_list, ensure_gradient_shapes
from tw_core.checks import check_flag, check_function

_T = TypeVar("_T")
_Pairs = Sequence[tuple[Any, tf.Variable]]

_TOWERS_FOR_CPU = 4


class AsyncMultiGPUBuilder(DataParallelBuilder):
    """Towers share variables and apply their gradients without averaging them.

    ``build`` gives the one training op of the older system, in which the towers
    compute together and apply one after the other. ``build_tower_ops`` gives
    an op a tower, for towers that do not wait for each other: run each in a
    thread of its own, with ``AsyncRunner``.
    """

    def __init__(
        self, towers: Sequence[int | str], scale_gradient: bool = True
    ) -> None:
        """Chooses the towers.

        Args:
          towers: ints (GPU numbers) and device strings.
          scale_gradient: whether gradients are multiplied by 1/K, so that the
            learning rate means what it does in synchronous training.
        """
        super().__init__(towers)
        check_flag("AsyncMultiGPUBuilder", scale_gradient=scale_gradient)
        self._scale_gradient = scale_gradient

    def call_for_each_tower(  # type: ignore[override]
        self, tower_fn: Callable[[], _T]
    ) -> list[_T]:
        """Calls ``tower_fn()`` in every tower; the variables are tower 0's.

        They live on ``/cpu:0`` from four towers on, else spread over the
        towers' devices by bytes.

        Args:
          tower_fn: builds one tower; usually returns (gradient, variable) pairs.

        Returns:
          The K results.
        """
        check_function("AsyncMultiGPUBuilder.call_for_each_tower", tower_fn=tower_fn)
        ps_device = "cpu" if len(self.towers) >= _TOWERS_FOR_CPU else "gpu"
        devices = shared_variable_devices(self.devices, ps_device)
        return DataParallelBuilder.build_on_towers(self.towers, tower_fn, devices)

    def build(
        self, grad_list: Sequence[_Pairs], get_opt_fn: Callable[[], Any]
    ) -> tf.Operation:
        """Builds one op in which every tower applies its own gradients once.

        The applies follow each other: parallel ones lose updates of state that
        an optimizer shares between variables, such as Adam's ``beta1_power``,
        which advances K times a step here.

        Args:
          grad_list: [K][N] (gradient, variable) pairs.
          get_opt_fn: returns the optimizer; called once.

        Returns:
          The training op.

        Raises:
          ValueError: towers that bring different gradients or variables, or None.
          TypeError: no optimizer, or a Keras 3 one.
          RuntimeError: in eager mode or a ``tf.function``.
        """
        scaled = self._prepare(grad_list, caller="AsyncMultiGPUBuilder.build")
        check_function("AsyncMultiGPUBuilder.build", get_opt_fn=get_opt_fn)
        optimizer = get_opt_fn()
        check_optimizer(optimizer, caller="AsyncMultiGPUBuilder.build")
        previous: list[tf.Operation] = []
        for k, pairs in enumerate(scaled):
            with tf.control_dependencies(previous):
                previous = [apply_pairs(optimizer, pairs, name=f"apply_grad_{k}")]
        return tf.group(*previous, name="train_op")

    def build_tower_ops(
        self,
        grad_list: Sequence[_Pairs],
        get_opt_fn: Callable[[], Any],
        *,
        share_optimizer: bool = False,
    ) -> list[tf.Operation]:
        """Builds one op a tower, each to be run by a thread of its own.

        Args:
          grad_list: [K][N] (gradient, variable) pairs.
          get_opt_fn: returns a new optimizer; called once a tower, or once.
          share_optimizer: False: an optimizer and its slots a tower, and nothing
            waits. True: one optimizer, whose applies wait for each other
            (computing gradients never does).

        Returns:
          K ops.

        Raises:
          ValueError: towers that bring different gradients or variables, or None;
            without ``share_optimizer`` a function that returns the same object twice.
          TypeError: no optimizer, or a Keras 3 one.
          RuntimeError: in eager mode or a ``tf.function``.
        """
        caller = "AsyncMultiGPUBuilder.build_tower_ops"
        check_flag(caller, share_optimizer=share_optimizer)
        scaled = self._prepare(grad_list, caller=caller)
        check_function(caller, get_opt_fn=get_opt_fn)
        if not share_optimizer:
            optimizers = one_optimizer_per_tower(
                self._towers, get_opt_fn, caller=caller
            )
            return [
                apply_pairs(optimizer, pairs, name=f"apply_grad_{k}")
                for k, (optimizer, pairs) in enumerate(
                    zip(optimizers, scaled, strict=True)
                )
            ]
        optimizer = get_opt_fn()
        check_optimizer(optimizer, caller=caller)
        section = tf.CriticalSection(name="shared_optimizer")
        return [
            _apply_in_section(section, optimizer, pairs, name=f"apply_grad_{k}")
            for k, pairs in enumerate(scaled)
        ]

    def _prepare(self, grad_list: Sequence[_Pairs], *, caller: str) -> list[_Pairs]:
        check_session_graph(caller)
        check_tower_count(grad_list, len(self.towers), caller=caller)
        check_shared_grad_list(grad_list, caller=caller)
        ensured = ensure_gradient_shapes(grad_list)
        if not self._scale_gradient or len(grad_list) == 1:
            return list(ensured)
        factor = 1.0 / len(grad_list)
        return [
            [(_scaled(grad, factor), variable) for grad, variable in pairs]
            for pairs in ensured
        ]


def _apply_in_section(
    section: tf.CriticalSection, optimizer: Any, pairs: _Pairs, *, name: str
) -> tf.Operation:
    def apply() -> tf.Tensor:
        with tf.control_dependencies([apply_pairs(optimizer, pairs, name=name)]):
            return tf.constant(0)

    # The section opens once its inputs are there: gradients are computed outside.
    with tf.control_dependencies([_trigger(grad) for grad, _ in pairs]):
        return section.execute(apply).op


def _trigger(grad: Any) -> tf.Tensor:
    return grad.values if isinstance(grad, tf.IndexedSlices) else grad


def _scaled(grad: Any, factor: float) -> Any:
    if isinstance(grad, tf.IndexedSlices):
        values = grad.values * tf.cast(factor, grad.values.dtype)
        return tf.IndexedSlices(values, grad.indices, grad.dense_shape)
    return grad * tf.cast(factor, grad.dtype)
