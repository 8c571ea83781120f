"""Variables go to parameter servers, everything else to a worker.

TensorFlow's function of this name completes every partial device with the worker's:
the read of a variable on ``/job:ps/task:0`` is sent to
``/job:ps/task:0/device:GPU:0``, a device that no parameter server has. Here ops
that use a variable get its device, and a device of another job is left alone.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from tw_core._checks import check_flag, check_list, check_text, check_whole_number
from tw_core._variable_kinds import (
    check_operation,
    device_of_variable,
    refuse_reference_op,
)
from tw_core.devices._least_loaded import ByteLoads
from tw_core.devices._logical import parse_device

# Types of ops whose state the replicas share: variables, tables, accumulators.
_PS_OPS = (
    "AutoReloadVariable",
    "BoostedTreesEnsembleResourceHandleOp",
    "BoostedTreesQuantileStreamResourceHandleOp",
    "DecisionTreeResource",
    "MutableDenseHashTable",
    "MutableDenseHashTableV2",
    "MutableHashTable",
    "MutableHashTableOfTensors",
    "MutableHashTableOfTensorsV2",
    "MutableHashTableV2",
    "ResourceConditionalAccumulator",
    "VarHandleOp",
)


def replica_device_setter(
    ps_tasks: int = 0,
    ps_device: str = "/job:ps",
    worker_device: str = "/job:worker",
    merge_devices: bool = True,
    cluster: Any = None,
    ps_ops: Sequence[str] | None = None,
    ps_strategy: Callable[[tf.Operation], int] | None = None,
) -> Callable[[tf.Operation], str] | None:
    """Makes a device function with variables on ``ps`` and the rest on a worker.

    The arguments are those of ``tf.compat.v1.train.replica_device_setter``.

    Args:
      ps_tasks: number of parameter server tasks; taken from ``cluster`` where
        that is given.
      ps_device: device of variables; if it has a job, ``ps_strategy`` chooses
        the task.
      worker_device: device of everything else.
      merge_devices: whether an op's own partial device is completed, rather
        than left alone.
      cluster: a ``tf.train.ClusterSpec``, ``ClusterDef`` or dictionary.
      ps_ops: op types that belong on the parameter servers; by default
        variables, tables and accumulators.
      ps_strategy: takes such an op and returns a task number; by default
        tasks are taken in turn. ``LeastLoadedTask`` balances bytes.

    Returns:
      A function for ``tf.compat.v1.device``, or None without tasks. It raises
      ValueError for a reference variable.

    Raises:
      TypeError: ``cluster`` is of another type, ``ps_strategy`` is not callable,
        ``ps_tasks`` not a whole number, ``merge_devices`` not a bool, or ``ps_ops``
        not a list of names.
      ValueError: a device string TensorFlow cannot read, or ``ps_tasks`` below 0.
    """
    if cluster is None:
        check_whole_number(ps_tasks=ps_tasks, at_least=0)
    check_flag(merge_devices=merge_devices)
    if ps_ops is not None:
        # TensorFlow documents a list; sets of types are also in use.
        listed = list(ps_ops) if isinstance(ps_ops, set | frozenset) else ps_ops
        for op_type in check_list(ps_ops=listed, of="op types", empty=True):
            check_text(ps_ops=op_type)
    if ps_strategy is not None and not callable(ps_strategy):
        raise TypeError(
            "ps_strategy must be a function from an op to a task number; got "
            f"{ps_strategy!r}."
        )
    ps = parse_device("" if ps_device is None else ps_device)
    worker = parse_device("" if worker_device is None else worker_device)
    if cluster is not None:
        ps_tasks = _count_tasks(cluster, ps.job)
    if ps_tasks == 0:
        return None
    asked = _PS_OPS if ps_ops is None else ps_ops
    types = frozenset(asked if ps_device else ())
    turns = itertools.cycle(range(ps_tasks))
    strategy = ps_strategy or (lambda op: next(turns))
    return _Placer(ps, worker, types, merge_devices, strategy).place


@dataclass(frozen=True)
class _Placer:
    """The parsed arguments of ``replica_device_setter``."""

    ps: tf.DeviceSpec
    worker: tf.DeviceSpec
    ps_ops: frozenset[str]
    merges_devices: bool
    choose_task: Callable[[tf.Operation], int]

    def place(self, op: tf.Operation) -> str:
        """Returns the device of ``op``."""
        refuse_reference_op(op)
        if op.device and not self.merges_devices:
            return str(op.device)
        own = tf.DeviceSpec.from_string(op.device or "")
        ps, worker = self.ps, self.worker
        if op.type in self.ps_ops:
            if ps.job and own.job in (None, ps.job):
                ps = ps.replace(task=self.choose_task(op))
            return str(ps.make_merged_spec(own).to_string())
        if device := device_of_variable(op):
            return device
        if own.job and worker.job and own.job != worker.job:
            return str(own.to_string())
        return str(worker.make_merged_spec(own).to_string())


class LeastLoadedTask:
    """A ``ps_strategy``: each variable to the task with the fewest bytes so far."""

    def __init__(self, ps_tasks: int) -> None:
        """Starts with nothing on any task.

        Raises:
          ValueError: ``ps_tasks`` is below 1.
          TypeError: it is not a whole number.
        """
        check_whole_number(ps_tasks=ps_tasks, at_least=1)
        self._tasks = ps_tasks
        self._loads = ByteLoads(ps_tasks, self._task_of)

    @property
    def bytes_on(self) -> list[int]:
        """Bytes of variables on each task."""
        return self._loads.bytes

    def __call__(self, op: tf.Operation) -> int:
        """Returns the number of a task; only variables count as load."""
        check_operation(op)
        task = self._loads.least()
        if op.type == "VarHandleOp":
            self._loads.note(op)
        return task

    def _task_of(self, device: str) -> int | None:
        task = tf.DeviceSpec.from_string(device).task
        return task if task is not None and task < self._tasks else None


def _count_tasks(cluster: Any, job: str | None) -> int:
    if not isinstance(cluster, tf.train.ClusterSpec | tf.train.ClusterDef | dict):
        raise TypeError(
            "cluster must be a tf.train.ClusterSpec, a ClusterDef or a dictionary; got "
            f"{type(cluster).__name__}."
        )
    return len(tf.train.ClusterSpec(cluster).as_dict().get(job, ()))
