"""Copies of parameters on the worker, refreshed together at the end of a step.

A model that reads its parameters from a server reads them one by one: nothing can be
joined once the reads are in the graph. So the model is built on local copies, which
the training op refreshes in packs, and gradients with respect to a copy count for the
parameter on the server, its *master*. Large parameters have no copy: they would gain
nothing, and rows of an embedding are read one by one.

Which copy belongs to which master is kept in a collection of the graph, as names, so
that it can be exported with the graph.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from tw_core.checks import check_whole_number
from tw_core.renames import renamed_arguments
from tw_syncrep._exact_device_scope import detached_scope, exact_device_scope
from tw_syncrep._transfer.packs import SMALL_BYTES, is_small, plan_packs, with_head
from tw_syncrep.cluster._tf_config import TaskConfig, check_task

_COLLECTION = "tw_syncrep_mirrors"


@dataclass(frozen=True)
class CachedParameter:
    """A parameter and its copy on the worker.

    Attributes:
      master: the parameter on its server.
      copy: a local variable, which the model reads.
    """

    master: tf.Variable
    copy: tf.Variable


@renamed_arguments(below="below_bytes")
def variable_getter(
    task: TaskConfig | str, *, below_bytes: int = SMALL_BYTES
) -> Callable[..., tf.Variable]:
    """Makes a getter under which parameters are pulled in packs.

    Under it, ``get_variable`` returns a copy of a trainable parameter on the
    worker; the training op of ``SyncReplicasOptimizer`` refreshes all copies with
    one transfer per server and dtype. Checkpoints hold the parameters, not the
    copies. To differentiate by hand, use what ``get_variable`` returned.

    Args:
      task: this task, or its device.
      below_bytes: parameters of this size or larger are read where they are.

    Returns:
      A function for ``tf.compat.v1.variable_scope(custom_getter=...)``.

    Raises:
      TypeError: ``task`` is neither, or ``below_bytes`` is not a whole number.
      ValueError: ``task`` is not a device string, or ``below_bytes`` negative.
    """
    return _make_getter("variable_getter", task, below_bytes)


@renamed_arguments(below="below_bytes")
@contextlib.contextmanager
def pulled_together(
    task: TaskConfig | str, *, below_bytes: int = SMALL_BYTES
) -> Iterator[None]:
    """Has the variables of a model pulled in packs; see ``variable_getter``."""
    getter = _make_getter("pulled_together", task, below_bytes)
    scope = tf.compat.v1.get_variable_scope()
    with tf.compat.v1.variable_scope(scope, custom_getter=getter):
        yield


def cached_parameters() -> list[CachedParameter]:
    """Returns the copies in the default graph, in the order they were made."""
    names = tf.compat.v1.get_collection(_COLLECTION)
    if not names:
        return []
    variables = tf.compat.v1.global_variables() + tf.compat.v1.local_variables()
    by_name = {variable.name: variable for variable in variables}
    pairs = [tf.compat.as_text(entry).split("\n") for entry in names]
    return [CachedParameter(by_name[master], by_name[copy]) for master, copy in pairs]


def copies_for(
    variables: Sequence[tf.Variable] | None,
) -> Sequence[tf.Variable] | None:
    """Returns what to differentiate with respect to: copies where there are any.

    Args:
      variables: parameters; None for all that are trainable.

    Returns:
      [N] variables; None where there are no copies and ``variables`` is None.
    """
    copies = {cached.master.ref(): cached.copy for cached in cached_parameters()}
    if not copies:
        return variables
    if variables is None:
        variables = tf.compat.v1.trainable_variables()
    return [copies.get(variable.ref(), variable) for variable in variables]


def with_masters(pairs: Iterable[tuple[Any, Any]]) -> list[tuple[Any, tf.Variable]]:
    """Returns (gradient, variable) pairs with parameters in place of their copies."""
    masters = {cached.copy.ref(): cached.master for cached in cached_parameters()}
    return [(grad, masters.get(var.ref(), var)) for grad, var in pairs]


def refresh(
    cached: Sequence[CachedParameter],
    progress: tf.Tensor,
    *,
    device: str,
    below_bytes: int,
) -> tuple[tf.Tensor, tf.Operation]:
    """Reads the masters in packs and updates their copies.

    Args:
      cached: what to update.
      progress: int64 [P], on a server; the masters are read once it is computed. It
        travels with a pack of that server, where there is one that can take it.
      device: the worker.
      below_bytes: a smaller parameter travels in a pack with others.

    Returns:
      What ``progress`` says, on the worker, and the op that has updated all copies.
    """
    masters = {n: parameter.master for n, parameter in enumerate(cached)}
    packs = with_head(
        plan_packs(masters, below_bytes=below_bytes),
        numbers=progress.shape[0],
        server=progress.device,
    )
    arrived, assigns = None, []
    for pack in packs:
        with exact_device_scope(pack.server), tf.control_dependencies([progress]):
            values = {n: masters[n].read_value() for n in pack.indices}
            joined = pack.join(values, progress if pack.numbers else None)
        with exact_device_scope(device):
            head, values = pack.open(tf.identity(joined))
            arrived = arrived if head is None else head
            for n, value in values.items():
                assigns.append(cached[n].copy.assign(value, read_value=False))
    if arrived is None:
        with exact_device_scope(device):
            arrived = tf.identity(progress)
    return arrived, tf.group(*assigns)


def _make_getter(
    caller: str, task: TaskConfig | str, below_bytes: int
) -> Callable[..., tf.Variable]:
    below_bytes = check_whole_number(caller, below_bytes=below_bytes, at_least=0)
    if not isinstance(task, str):
        check_task(caller, task)
        task = f"/job:{task.job}/task:{task.index}"
    try:
        tf.DeviceSpec.from_string(task)
    except ValueError as error:
        raise ValueError(
            f"{caller}: task {task!r} is not a device string such as "
            "'/job:worker/task:1'."
        ) from error

    def get(
        getter: Callable[..., Any], name: str, *args: Any, **kwargs: Any
    ) -> tf.Variable:
        master = getter(name, *args, **kwargs)
        if not _gains(master, below_bytes):
            return master
        known = [m.copy for m in cached_parameters() if m.master.name == master.name]
        return known[0] if known else _make_copy(master, task)

    return get


def _gains(variable: Any, below_bytes: int) -> bool:
    if not isinstance(variable, tf.Variable) or not variable.trainable:
        return False
    if not variable.shape.is_fully_defined() or not variable.dtype.is_floating:
        return False
    return is_small(variable, below_bytes)


def _make_copy(master: tf.Variable, device: str) -> tf.Variable:
    with detached_scope(), tf.device(device):
        copy = tf.compat.v1.Variable(
            master.read_value(),
            trainable=False,
            collections=[tf.compat.v1.GraphKeys.LOCAL_VARIABLES],
            name=f"{master.op.name}/mirror",
            use_resource=True,
        )
    tf.compat.v1.add_to_collection(_COLLECTION, f"{master.name}\n{copy.name}")
    return copy
