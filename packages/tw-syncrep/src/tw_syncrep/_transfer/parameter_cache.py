"""Copies of the parameters on the worker, refreshed together at a step's end.

A model that reads its parameters from a server reads them one by one: nothing
can be joined once the reads are in the graph. So the model is built on local
copies, which the training op refreshes in packs, and gradients with respect to
a copy count for the parameter on the server, its *master*. Large parameters
have no copy: they gain nothing, and rows of an embedding are read one by one.

Which copy belongs to which master stands in a collection of the graph, as
names, so that it can be exported with the graph.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from tw_syncrep._exact_device_scope import apart_from_the_caller, on_device
from tw_syncrep._transfer.packing import join, take_apart
from tw_syncrep._transfer.packs import Piece, plan_packs

MIRRORS = "tw_syncrep_mirrors"
SMALL = 1 << 20
"""Bytes; from here on joining costs more than it saves."""


@dataclass(frozen=True)
class Mirror:
    """A parameter and its copy on the worker."""

    master: tf.Variable
    copy: tf.Variable


def variable_getter(
    worker_device: str, *, below: int = SMALL
) -> Callable[..., tf.Variable]:
    """Makes a getter under which ``get_variable`` returns copies on the worker.

    Args:
      worker_device: where the copies live, e.g. "/job:worker/task:1".
      below: bytes; a larger variable stays where it is and is returned itself.

    Returns:
      A function for ``tf.compat.v1.variable_scope(custom_getter=...)``.
    """

    def get(
        getter: Callable[..., Any], name: str, *args: Any, **kwargs: Any
    ) -> tf.Variable:
        master = getter(name, *args, **kwargs)
        if not _gains(master, below):
            return master
        known = copy_of(master)
        return _make_copy(master, worker_device) if known is None else known

    return get


def mirrors() -> list[Mirror]:
    """Returns the copies in the graph in force, in the order they were made."""
    names = tf.compat.v1.get_collection(MIRRORS)
    if not names:
        return []
    variables = tf.compat.v1.global_variables() + tf.compat.v1.local_variables()
    by_name = {variable.name: variable for variable in variables}
    pairs = [_as_text(entry).split("\n") for entry in names]
    return [Mirror(by_name[master], by_name[copy]) for master, copy in pairs]


def mirrors_of(variables: Sequence[tf.Variable]) -> tuple[Mirror, ...]:
    """Returns the copies of some variables."""
    names = {variable.name for variable in variables}
    return tuple(mirror for mirror in mirrors() if mirror.master.name in names)


def copy_of(master: tf.Variable) -> tf.Variable | None:
    """Returns the copy of a variable, or None."""
    found = [m.copy for m in mirrors() if m.master.name == master.name]
    return found[0] if found else None


def copies_for(
    variables: Sequence[tf.Variable] | None,
) -> Sequence[tf.Variable] | None:
    """Returns what to differentiate with respect to: copies where there are any.

    Args:
      variables: parameters; None for all that are trainable.

    Returns:
      [N] variables; None where there are no copies and nothing was named.
    """
    copies = {mirror.master.ref(): mirror.copy for mirror in mirrors()}
    if not copies:
        return variables
    if variables is None:
        variables = tf.compat.v1.trainable_variables()
    return [copies.get(variable.ref(), variable) for variable in variables]


def with_masters(pairs: Iterable[tuple[Any, Any]]) -> list[tuple[Any, tf.Variable]]:
    """Returns (gradient, variable) pairs with parameters in place of their copies."""
    masters = {mirror.copy.ref(): mirror.master for mirror in mirrors()}
    return [(grad, masters.get(var.ref(), var)) for grad, var in pairs]


def refresh(found: Sequence[Mirror], *, after: tf.Tensor, below: int) -> tf.Operation:
    """Returns the op that reads the masters in packs and renews their copies.

    Args:
      found: what to renew.
      after: a tensor on a server; the masters are read when it is there.
      below: bytes of a parameter that travels in a pack.
    """
    pieces = [_piece(index, mirror) for index, mirror in enumerate(found)]
    assigns = []
    for pack in plan_packs(pieces, below=below):
        with on_device(pack.server), tf.control_dependencies([after]):
            values = {p.index: found[p.index].master.read_value() for p in pack.pieces}
            joined = join(pack, values)
        with on_device(found[pack.pieces[0].index].copy.device):
            for index, value in take_apart(pack, tf.identity(joined)).items():
                assigns.append(found[index].copy.assign(value, read_value=False))
    return tf.group(*assigns)


def _gains(variable: Any, below: int) -> bool:
    if not isinstance(variable, tf.Variable) or not variable.trainable:
        return False
    if not variable.shape.is_fully_defined() or not variable.dtype.is_floating:
        return False
    return bool(variable.shape.num_elements() * variable.dtype.size < below)


def _make_copy(master: tf.Variable, device: str) -> tf.Variable:
    with apart_from_the_caller(), tf.device(device):
        copy = tf.compat.v1.Variable(
            master.read_value(),
            trainable=False,
            collections=[tf.compat.v1.GraphKeys.LOCAL_VARIABLES],
            name=f"{master.op.name}/mirror",
            use_resource=True,
        )
    tf.compat.v1.add_to_collection(MIRRORS, f"{master.name}\n{copy.name}")
    return copy


def _piece(index: int, mirror: Mirror) -> Piece:
    master = mirror.master
    return Piece(
        index=index,
        server=master.device,
        dtype=master.dtype.base_dtype.name,
        shape=tuple(master.shape.as_list()),
        itemsize=master.dtype.size,
    )


def _as_text(entry: str | bytes) -> str:
    return entry.decode() if isinstance(entry, bytes) else entry
