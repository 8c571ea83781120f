"""Copies of parameters on the worker, refreshed together at the end of a step.

A model that reads its parameters from a server reads them one by one: nothing can be
joined once the reads are in the graph. So the model is built on local copies, which
the training op refreshes in packs, and gradients with respect to a copy count for the
parameter on the server, its *master*. Large parameters have no copy: they would gain
nothing, and rows of an embedding are read one by one.

Pairs of masters and copies are kept in a collection of the graph, by name, so that they
can be exported with the graph.
"""

import contextlib
import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from tw_core.internal import check_whole_number
from tw_launch import TaskConfig
from tw_launch.internal import check_task
from tw_syncrep._parameters.packs import SMALL_BYTES, Pack, is_small, with_head
from tw_syncrep._parameters.placement import detached_scope, exact_device_scope

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


def variable_getter(
    task: TaskConfig | str, *, below_bytes: int = SMALL_BYTES
) -> Callable[..., tf.Variable]:
    """Returns a variable getter that makes a worker pull parameters in packs.

    Under it, ``get_variable`` returns a copy of a trainable parameter on the
    worker; the training op of ``SyncReplicasOptimizer`` refreshes all copies with
    one transfer per server and dtype. Checkpoints hold the parameters, not the
    copies. To differentiate by hand, use the variables ``get_variable`` returned.

    Args:
      task: this task, or its device.
      below_bytes: parameters of this size or larger are read from their server.

    Returns:
      A function for ``tf.compat.v1.variable_scope(custom_getter=...)``.

    Raises:
      TypeError: ``task`` is neither, or ``below_bytes`` is not a whole number.
      ValueError: ``task`` is not a device string, or ``below_bytes`` is negative.
    """
    below_bytes = check_whole_number(below_bytes=below_bytes, at_least=0)
    if not isinstance(task, str):
        check_task(task)
        task = f"/job:{task.job}/task:{task.index}"
    try:
        tf.DeviceSpec.from_string(task)
    except ValueError as error:
        raise ValueError(
            f"task {task!r} is not a device string such as '/job:worker/task:1'."
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


@contextlib.contextmanager
def pulled_together(
    task: TaskConfig | str, *, below_bytes: int = SMALL_BYTES
) -> Iterator[None]:
    """Pulls the variables of a model in packs; see ``variable_getter``."""
    getter = variable_getter(task, below_bytes=below_bytes)
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
    """Replaces variables (None: all trainable ones) by their copies, if any."""
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


@dataclass(frozen=True)
class Pulling:
    """Refreshes a worker's copies.

    The chief joins the parameters of each pack at the end of a round and *publishes*
    the result in a variable on their server that is in no collection and no checkpoint.
    So a round joins them once for all workers, and a slow worker gets the state after
    one round or the next, never a mixture. Before anything is published, and where the
    chief has no such copies, the parameters are read directly.
    """

    cached: tuple[CachedParameter, ...]
    packs: tuple[Pack, ...]  # by index into ``cached``
    shared_name: str  # prefix of the published variables' names

    def publish(self, after: tf.Operation) -> tf.Operation:
        """Returns the op that publishes the parameters, once ``after`` is done."""
        published = []
        for pack in filter(_is_joined, self.packs):
            changes = _changes_on(pack.server, after)
            with exact_device_scope(pack.server), tf.control_dependencies(changes):
                published.append(
                    tf.raw_ops.AssignVariableOp(
                        resource=self._published(pack), value=self._join(pack)
                    )
                )
        return tf.group(after, *published)

    def pull(
        self, progress: tf.Tensor, *, is_published: bool
    ) -> tuple[tf.Tensor, tf.Operation]:
        """Returns ``progress``, and an op that updates all copies.

        Call it on the worker's device, where both results are.

        ``progress``, int64 [P] on a server, is computed before parameters are read. It
        is sent with a small pack of that server, if any; a large one would be copied.
        """
        arrived, assigns = None, []
        carriers = with_head(
            self.packs,
            numbers=progress.shape[0],
            server=progress.device,
            below_bytes=SMALL_BYTES,
        )
        for pack, carrier in zip(self.packs, carriers, strict=True):
            head = progress if carrier.numbers else None
            with exact_device_scope(pack.server), tf.control_dependencies([progress]):
                if is_published and _is_joined(pack):
                    joined = carrier.prepend(head, self._read(pack))
                else:
                    joined = self._join(carrier, head)
            head, values = carrier.open(tf.identity(joined))
            arrived = arrived if head is None else head
            for n, value in values.items():
                assigns.append(self.cached[n].copy.assign(value, read_value=False))
        if arrived is None:
            arrived = tf.identity(progress)
        return arrived, tf.group(*assigns)

    def _join(self, pack: Pack, head: tf.Tensor | None = None) -> tf.Tensor:
        """Reads and joins the parameters, on the current device."""
        masters = {n: self.cached[n].master for n in pack.indices}
        return pack.join({n: m.read_value() for n, m in masters.items()}, head)

    def _read(self, pack: Pack) -> tf.Tensor:
        """Reads the published pack, or else the parameters, on the current device."""
        dtype, handle = tf.as_dtype(pack.dtype), self._published(pack)
        masters = {n: self.cached[n].master for n in pack.indices}

        def join() -> tf.Tensor:
            # New handles: capturing the outer ones would cost an op each in every call.
            handles = {n: _remade_handle(master) for n, master in masters.items()}
            return pack.join(
                {
                    n: tf.raw_ops.ReadVariableOp(resource=own, dtype=dtype)
                    for n, own in handles.items()
                }
            )

        return tf.cond(
            tf.raw_ops.VarIsInitializedOp(resource=handle),
            lambda: tf.raw_ops.ReadVariableOp(resource=handle, dtype=dtype),
            join,
        )

    def _published(self, pack: Pack) -> tf.Tensor:
        """Returns the handle of the published pack, on the current device."""
        names = "\n".join(self.cached[n].master.name for n in pack.indices)
        digest = hashlib.sha256(names.encode()).hexdigest()[:16]
        return tf.raw_ops.VarHandleOp(
            dtype=tf.as_dtype(pack.dtype),
            shape=pack.shape,
            shared_name=f"{self.shared_name}/{digest}",
        )


def _is_joined(pack: Pack) -> bool:
    """Returns whether there is anything to join; one parameter is read as it is."""
    return len(pack.indices) > 1


def _remade_handle(variable: tf.Variable) -> tf.Tensor:
    """Returns another handle to a variable, on the current device."""
    made = variable.handle.op
    return tf.raw_ops.VarHandleOp(
        dtype=variable.dtype.base_dtype,
        shape=variable.shape,
        container=made.get_attr("container"),
        shared_name=made.get_attr("shared_name") or made.name.encode(),
    )


def _changes_on(server: str, after: tf.Operation) -> list[tf.Operation]:
    """Returns the ops up to ``after`` that use a server's resources, or ``after``.

    Waiting for the rest too would cost a round trip between servers.
    """
    if not tf.compat.v1.control_flow_v2_enabled():  # An op may be inside a loop.
        return [after]
    return [
        op
        for op in ops_up_to([after])
        if any(i.dtype == tf.resource and i.op.device == server for i in op.inputs)
    ]


def ops_up_to(last: Iterable[tf.Operation]) -> Iterator[tf.Operation]:
    """Yields ops and all that run before them, each once."""
    todo = list(last)
    seen = set(todo)
    while todo:
        op = todo.pop()
        yield op
        before = {*(given.op for given in op.inputs), *op.control_inputs} - seen
        todo += before
        seen |= before


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
