"""Synchronous training with one set of variables that all towers share."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import tensorflow as tf

from tw_builders._apply import reduce_shared
from tw_builders._base import (
    DataParallelBuilder,
    Device,
    check_session_graph,
    check_tower_count,
)
from tw_core import Tower
from tw_core.checks import check_function, naming
from tw_core.devices import LeastLoadedDeviceSetter, replica_device_setter
from tw_core.gradients import GradList, check_shared_grad_list
from tw_core.optimizers import apply_pairs, check_optimizer

_T = TypeVar("_T")


class SyncMultiGPUParameterServerBuilder(DataParallelBuilder):
    """Towers share variables; their mean gradient is applied once.

    Attributes:
      ps_device: ``"cpu"`` (variables and updates on ``/cpu:0``) or ``"gpu"``
        (spread over the towers' devices by bytes).
      grads: after ``build``, [N] (mean gradient, variable) pairs.
    """

    def __init__(self, towers: Sequence[int | str | Tower], ps_device: str) -> None:
        """Chooses where variables live.

        Args:
          towers: ints (GPU numbers) and device strings, or what ``tw_core.towers``
            gives.
          ps_device: ``"cpu"`` or ``"gpu"``.

        Raises:
          ValueError: another ``ps_device``, or as ``DataParallelBuilder``.
        """
        super().__init__(towers)
        if ps_device not in ("cpu", "gpu"):
            raise ValueError(
                "SyncMultiGPUParameterServerBuilder: ps_device must be 'cpu' (all "
                "variables on /cpu:0) or 'gpu' (spread over the towers' devices); got "
                f"{ps_device!r}."
            )
        self.ps_device = ps_device
        self.grads: list[tuple[Any, tf.Variable]] | None = None

    def call_for_each_tower(  # type: ignore[override]
        self, tower_fn: Callable[[], _T]
    ) -> list[_T]:
        """Calls ``tower_fn()`` in every tower; the variables are tower 0's.

        Args:
          tower_fn: builds one tower; usually returns (gradient, variable) pairs.

        Returns:
          The K results.
        """
        check_function(
            "SyncMultiGPUParameterServerBuilder.call_for_each_tower", tower_fn=tower_fn
        )
        devices = shared_variable_devices(self.devices, self.ps_device)
        return DataParallelBuilder.build_on_towers(self.towers, tower_fn, devices)

    def build(
        self,
        grad_list: GradList,
        get_opt_fn: Callable[[], Any],
    ) -> tf.Operation:
        """Builds the update from the towers' gradients.

        Args:
          grad_list: [K][N] (gradient, variable) pairs.
          get_opt_fn: returns the optimizer; called once.

        Returns:
          The training op.

        Raises:
          ValueError: towers that bring different gradients or variables, or None.
          TypeError: something that is not an optimizer, or a Keras 3 one.
          RuntimeError: in eager mode or a ``tf.function``.
        """
        caller = "SyncMultiGPUParameterServerBuilder.build"
        check_session_graph(caller)
        check_tower_count(grad_list, len(self.towers), caller=caller)
        with naming(caller):
            check_shared_grad_list(grad_list)
        check_function(caller, get_opt_fn=get_opt_fn)
        self.grads = reduce_shared(grad_list, average=True, caller=caller)
        optimizer = get_opt_fn()
        check_optimizer(caller, optimizer)
        with tf.device("/cpu:0" if self.ps_device == "cpu" else None):
            return apply_pairs(optimizer, self.grads, name="train_op")


def shared_variable_devices(devices: Sequence[str], ps_device: str) -> list[Device]:
    """Makes one device function per tower, for variables that all towers share.

    Args:
      devices: the towers' devices.
      ps_device: ``"cpu"``: variables on ``/cpu:0``; ``"gpu"``: each on the device
        with the fewest bytes so far.
    """
    if ps_device == "gpu":
        return [LeastLoadedDeviceSetter(device, devices) for device in devices]
    setters = [
        replica_device_setter(ps_tasks=1, ps_device="/cpu:0", worker_device=device)
        for device in devices
    ]
    return [setter for setter in setters if setter is not None]
