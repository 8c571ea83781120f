"""Training with one set of variables that all towers share.

Synchronously, the towers' mean gradient is applied once; asynchronously, every tower
applies its own gradients.
"""

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import tensorflow as tf

from tw_builders._apply import (
    Pairs,
    one_optimizer_per_tower,
    reduce_onto,
)
from tw_builders._session.base import Device, TowersBuilder
from tw_core import Tower
from tw_core.devices import LeastLoadedDeviceSetter, replica_device_setter
from tw_core.gradients import GradList
from tw_core.internal import apply_pairs, check_flag, check_optimizer, scale, values_of

_TOWERS_FOR_CPU = 4


class SyncMultiGPUParameterServerBuilder(TowersBuilder):
    """Towers share variables; their mean gradient is applied once.

    Attributes:
      ps_device: ``"cpu"`` (variables and updates on ``/cpu:0``) or ``"gpu"``
        (balanced over the towers' devices by bytes).
      grads: after ``build``, [N] (mean gradient, variable) pairs.

    >>> import tensorflow as tf
    >>> v1 = tf.compat.v1
    >>> def tower():
    ...     w = v1.get_variable("w", initializer=tf.constant([4.0, 8.0]))
    ...     return [(tf.gradients(tf.reduce_sum(w**2), w)[0], w)]
    >>> with tf.Graph().as_default(), v1.Session() as session:
    ...     builder = SyncMultiGPUParameterServerBuilder(["/cpu:0"] * 2, "cpu")
    ...     pairs = builder.call_for_each_tower(tower)
    ...     train_op = builder.build(
    ...         pairs, lambda: v1.train.GradientDescentOptimizer(0.25)
    ...     )
    ...     _ = session.run(v1.global_variables_initializer())
    ...     _ = session.run(train_op)
    ...     print(session.run(pairs[0][0][1]))
    [2. 4.]
    """

    def __init__(
        self,
        towers: Sequence[int | str | Tower],
        ps_device: str,
        *,
        flat_below_bytes: int = 0,
        flat_group: Callable[[str], Hashable | None] | None = None,
    ) -> None:
        """Chooses the variables' devices.

        Args:
          towers: ints (GPU numbers) and device strings, or the result of
            ``tw_core.towers``.
          ps_device: ``"cpu"`` or ``"gpu"``.
          flat_below_bytes: as for ``DataParallelBuilder``.
          flat_group: as for ``DataParallelBuilder``.

        Raises:
          ValueError: another ``ps_device``, or as ``DataParallelBuilder``.
        """
        super().__init__(
            towers, flat_below_bytes=flat_below_bytes, flat_group=flat_group
        )
        if ps_device not in ("cpu", "gpu"):
            raise ValueError(
                "ps_device must be 'cpu' (all variables on /cpu:0) or 'gpu' (spread "
                f"over the towers' devices); got {ps_device!r}."
            )
        self.ps_device = ps_device
        self.grads: list[tuple[Any, tf.Variable]] | Any = None

    def build(
        self,
        grad_list: GradList,
        get_opt_fn: Callable[[], Any],
        *,
        weights: Sequence[Any] | None = None,
    ) -> tf.Operation:
        """Builds the update from the towers' gradients.

        Args:
          grad_list: [K][N] (gradient, variable) pairs.
          get_opt_fn: returns the optimizer; called once.
          weights: [K] weight of each tower's gradients in the mean, such as its
            rows; see ``tw_reduce.mean``. None for equal weights.

        Returns:
          The training op.

        Raises:
          ValueError: towers with different gradients or variables, or with None;
            weights as ``tw_reduce.mean``.
          TypeError: something that is not an optimizer, or a Keras 3 one; weights
            as ``tw_reduce.mean``.
          RuntimeError: in eager mode or a ``tf.function``.
        """
        packed = self._read(grad_list, get_opt_fn, weights=weights)
        shared = packed.variables[0]
        self.grads = reduce_onto(shared, packed, average=True, weights=weights)
        optimizer = get_opt_fn()
        check_optimizer(optimizer)
        with tf.device("/cpu:0" if self.ps_device == "cpu" else None):
            return apply_pairs(optimizer, self.grads, name="train_op")

    def _variable_devices(self) -> Sequence[Device]:
        return _variable_devices(self.devices, self.ps_device)


class AsyncMultiGPUBuilder(TowersBuilder):
    """Towers share variables and apply their gradients without averaging them.

    ``build`` returns the one training op of the older system, in which the towers
    compute together and apply one after the other. ``build_tower_ops`` returns
    one op per tower, for towers that do not wait for each other: run each in its
    own thread, with ``AsyncRunner``.

    >>> import tensorflow as tf
    >>> v1 = tf.compat.v1
    >>> def tower():
    ...     w = v1.get_variable("w", initializer=tf.constant([4.0, 8.0]))
    ...     return [(tf.gradients(tf.reduce_sum(w), w)[0], w)]
    >>> with tf.Graph().as_default(), v1.Session() as session:
    ...     builder = AsyncMultiGPUBuilder(["/cpu:0"] * 2)
    ...     pairs = builder.call_for_each_tower(tower)
    ...     train_op = builder.build(
    ...         pairs, lambda: v1.train.GradientDescentOptimizer(0.25)
    ...     )
    ...     _ = session.run(v1.global_variables_initializer())
    ...     _ = session.run(train_op)
    ...     print(session.run(pairs[0][0][1]))
    [3.75 7.75]
    """

    def __init__(
        self,
        towers: Sequence[int | str | Tower],
        scale_gradient: bool = True,
        *,
        flat_below_bytes: int = 0,
        flat_group: Callable[[str], Hashable | None] | None = None,
    ) -> None:
        """Chooses the towers.

        Args:
          towers: ints (GPU numbers) and device strings, or the result of
            ``tw_core.towers``.
          scale_gradient: whether gradients are multiplied by 1/K, so that the
            learning rate has the same meaning as in synchronous training.
          flat_below_bytes: as for ``DataParallelBuilder``.
          flat_group: as for ``DataParallelBuilder``.
        """
        super().__init__(
            towers, flat_below_bytes=flat_below_bytes, flat_group=flat_group
        )
        check_flag(scale_gradient=scale_gradient)
        self._scale_gradient = scale_gradient

    def build(self, grad_list: GradList, get_opt_fn: Callable[[], Any]) -> tf.Operation:
        """Builds one op in which every tower applies its own gradients once.

        The applies run in sequence: parallel ones lose updates of state that
        an optimizer shares between variables, such as Adam's ``beta1_power``,
        which advances K times per step here.

        Args:
          grad_list: [K][N] (gradient, variable) pairs.
          get_opt_fn: returns the optimizer; called once.

        Returns:
          The training op.

        Raises:
          ValueError: towers with different gradients or variables, or with None.
          TypeError: something that is not an optimizer, or a Keras 3 one.
          RuntimeError: in eager mode or a ``tf.function``.
        """
        scaled = self._scaled(grad_list, get_opt_fn)
        optimizer = get_opt_fn()
        check_optimizer(optimizer)
        previous: list[tf.Operation] = []
        for k, pairs in enumerate(scaled):
            with tf.control_dependencies(previous):
                previous = [apply_pairs(optimizer, pairs, name=f"apply_grad_{k}")]
        return tf.group(*previous, name="train_op")

    def build_tower_ops(
        self,
        grad_list: GradList,
        get_opt_fn: Callable[[], Any],
        *,
        share_optimizer: bool = False,
    ) -> list[tf.Operation]:
        """Builds one op per tower, each to be run in its own thread.

        Args:
          grad_list: [K][N] (gradient, variable) pairs.
          get_opt_fn: returns a new optimizer; called once per tower, or once.
          share_optimizer: False: every tower has an optimizer and its slots, and
            nothing waits. True: one optimizer, whose applies exclude each other
            (computing gradients never waits).

        Returns:
          K ops.

        Raises:
          ValueError: towers with different gradients or variables, or with None;
            without ``share_optimizer`` a function that returns the same object twice.
          TypeError: something that is not an optimizer, or a Keras 3 one.
          RuntimeError: in eager mode or a ``tf.function``.
        """
        check_flag(share_optimizer=share_optimizer)
        scaled = self._scaled(grad_list, get_opt_fn)
        if not share_optimizer:
            optimizers = one_optimizer_per_tower(self._towers, get_opt_fn)
            return [
                apply_pairs(optimizer, pairs, name=f"apply_grad_{k}")
                for k, (optimizer, pairs) in enumerate(
                    zip(optimizers, scaled, strict=True)
                )
            ]
        optimizer = get_opt_fn()
        check_optimizer(optimizer)
        section = tf.CriticalSection(name="shared_optimizer")
        return [
            _apply_in_section(section, optimizer, pairs, name=f"apply_grad_{k}")
            for k, pairs in enumerate(scaled)
        ]

    def _scaled(
        self, grad_list: GradList, get_opt_fn: Callable[[], Any]
    ) -> list[Pairs]:
        packed = self._read(grad_list, get_opt_fn)
        scales = self._scale_gradient and len(packed) > 1
        factor = 1.0 / len(packed) if scales else None
        return [
            [(scale(grad, factor), variable) for grad, variable in pairs]
            for pairs in packed.pairs
        ]

    def _variable_devices(self) -> Sequence[Device]:
        on_host = len(self.towers) >= _TOWERS_FOR_CPU
        return _variable_devices(self.devices, "cpu" if on_host else "gpu")


def _variable_devices(devices: Sequence[str], ps_device: str) -> list[Device]:
    """Makes a device function per tower; ``"gpu"`` balances variables by bytes."""
    if ps_device == "gpu":
        return [LeastLoadedDeviceSetter(device, devices) for device in devices]
    setters = [
        replica_device_setter(ps_tasks=1, ps_device="/cpu:0", worker_device=device)
        for device in devices
    ]
    return [setter for setter in setters if setter is not None]


def _apply_in_section(
    section: tf.CriticalSection, optimizer: Any, pairs: Pairs, *, name: str
) -> tf.Operation:
    def apply() -> tf.Tensor:
        with tf.control_dependencies([apply_pairs(optimizer, pairs, name=name)]):
            return tf.constant(0)

    # The section is entered once its inputs are ready: gradients are computed outside.
    with tf.control_dependencies([values_of(grad) for grad, _ in pairs]):
        return section.execute(apply).op
