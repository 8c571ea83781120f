"""Copying every variable of tower 0 to the replicas, optimizer state included.

Run it once after the initialisers and after a checkpoint is restored: then all
replicas hold the same values, and equal updates keep them equal.

A graph records which tower made a variable. An imported graph has no such record; there
local variables are matched by name. Global ones are not, since the model itself may
have a scope called ``tower1``.
"""

import logging
import re
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tw_core.internal import plain_name, tf_variables
from tw_core.variables import variable_origins

_log = logging.getLogger("tw_builders")
_COPY_PART = re.compile(r"tower[1-9]\d*")
_TOWER_PART = re.compile(r"tower\d+")


class VariableFacts(NamedTuple):
    """The properties of a variable that decide whether and from where it is copied."""

    name: str  # without ":0"
    kind: Hashable  # shape and dtype
    original: str | None = None  # name of the variable that this one copies


def plan_sync(
    variables: Sequence[VariableFacts],
) -> tuple[list[tuple[int, int]], list[int]]:
    """Finds the original of every copy: positions (from, to), and those without one.

    >>> w, b = VariableFacts("w", "int64"), VariableFacts("b", "int64")
    >>> plan_sync([w, b, VariableFacts("tower1/w", "int64", original="w")])
    ([(0, 2)], [])
    """
    originals = {v.name: i for i, v in enumerate(variables) if v.original is None}
    copies, unmatched = [], []
    for i, facts in enumerate(variables):
        if facts.original is None:
            continue
        source = originals.get(facts.original)
        if source is not None and variables[source].kind == facts.kind:
            copies.append((source, i))
        else:
            unmatched.append(i)
    return copies, unmatched


def originals_by_name(
    global_names: Sequence[str], local_names: Sequence[str]
) -> Mapping[str, str]:
    """Guesses originals where the graph has no record of which tower made a variable.

    A copy is local and has a ``tower<k>`` part, k >= 1, in its name. Its original is
    global and has the same name without that part, or is the only one that has the
    same name without any ``tower<k>``. A copy without an original is mapped to itself.
    Where no local variable is a copy, global ones with such names are treated as copies
    without an original.

    >>> originals_by_name(["w", "tower1/w"], ["tower1/w_1", "tower1/tower1/w"])
    {'tower1/w_1': 'tower1/w_1', 'tower1/tower1/w': 'tower1/w'}
    """
    copies = [name for name in local_names if _copy_part(name) is not None]
    if not copies:
        return {name: name for name in global_names if _copy_part(name) is not None}
    similar: dict[str, list[str]] = {}
    for name in global_names:
        similar.setdefault(_without_towers(name), []).append(name)
    found = {}
    for name in copies:
        parts, others = name.split("/"), similar.get(_without_towers(name), [])
        exact = "/".join(part for i, part in enumerate(parts) if i != _copy_part(name))
        likely = others[0] if len(others) == 1 else name
        found[name] = exact if exact in others else likely
    return found


def _copy_part(name: str) -> int | None:
    parts = name.split("/")
    found = (i for i, part in enumerate(parts) if _COPY_PART.fullmatch(part))
    return next(found, None)


def _without_towers(name: str) -> str:
    return "/".join(p for p in name.split("/") if not _TOWER_PART.fullmatch(p))


def build_sync_op(replicas: Sequence[Sequence[Any]] = ()) -> tf.Operation:
    """Builds the op that copies tower 0's variables in the default graph.

    ``replicas`` are [K][N] variables known to be copies, in this order. Copies without
    a counterpart are logged, or refused if trainable.
    """
    variables = [*tf.compat.v1.global_variables(), *tf.compat.v1.local_variables()]
    originals = _originals_of(variables) | _originals_among(replicas)
    facts = [
        VariableFacts(
            plain_name(v), (str(v.shape), v.dtype.base_dtype), originals.get(id(v))
        )
        for v in variables
    ]
    copies, unmatched = plan_sync(facts)
    _report([variables[i] for i in unmatched])
    values: dict[int, tf.Tensor] = {}
    assigns = []
    # A build that waits for another's update must not make the copying wait for it.
    with tf.control_dependencies(None), tf.name_scope("sync_variables"):
        for source, target in copies:
            if source not in values:
                with tf.device(variables[source].device):
                    values[source] = variables[source].read_value()
            with tf.device(variables[target].device):
                assigns.append(
                    variables[target].assign(values[source], read_value=False)
                )
        return tf.group(*assigns, name="from_tower0")


class SyncVariablesHook(tf.compat.v1.train.SessionRunHook):  # type: ignore[misc]
    """Runs the sync op whenever a session is created or recovered.

    For ``tf.compat.v1.train.MonitoredTrainingSession``, which initialises or
    restores variables first.
    """

    def __init__(self, sync_op: tf.Operation | None) -> None:
        """Makes the hook.

        Args:
          sync_op: the op that ``SyncMultiGPUReplicatedBuilder.build`` returned, or
            None, where there was nothing to copy: the hook then does nothing.

        Raises:
          TypeError: ``sync_op`` is neither an op nor None.
        """
        if sync_op is not None and not isinstance(sync_op, tf.Operation | tf.Tensor):
            raise TypeError(
                "SyncVariablesHook: sync_op must be the op that "
                f"SyncMultiGPUReplicatedBuilder.build returned, or None; got "
                f"{sync_op!r}."
            )
        self._sync_op = sync_op

    def after_create_session(
        self, session: tf.compat.v1.Session, coord: object
    ) -> None:
        """Copies tower 0's variables to the replicas.

        Raises:
          TypeError: ``session`` is not a session.
        """
        if not callable(getattr(session, "run", None)):
            raise TypeError(
                "SyncVariablesHook.after_create_session: session must be a session; "
                f"got {session!r}."
            )
        del coord
        if self._sync_op is not None:
            session.run(self._sync_op)


def _originals_of(variables: Sequence[tf.Variable]) -> dict[int, str]:
    """Maps the id of each copy to its original's name, by the graph's record."""
    origins = zip(variables, variable_origins(variables), strict=True)
    recorded = [(variable, origin) for variable, origin in origins if origin]
    if recorded:
        return {id(v): origin.original for v, origin in recorded if origin.tower != 0}
    known = {plain_name(v): v for v in tf.compat.v1.global_variables()}
    local = {plain_name(v): v for v in tf.compat.v1.local_variables()}
    originals = originals_by_name(list(known), list(local))
    if originals:
        _log.warning(
            "sync_variables: this graph has no record of which tower made a variable "
            "(an imported one has none); replicas are matched by name: %s.",
            dict(originals),
        )
    named = known | local
    return {id(named[name]): original for name, original in originals.items()}


def _originals_among(replicas: Sequence[Sequence[Any]]) -> dict[int, str]:
    plain = [tf_variables(variables) for variables in replicas]
    return {
        id(copy): plain_name(original)
        for copies in plain[1:]
        for original, copy in zip(plain[0], copies, strict=True)
    }


def _report(unmatched: list[tf.Variable]) -> None:
    if not unmatched:
        return
    trainable = {id(variable) for variable in tf.compat.v1.trainable_variables()}
    fatal = [v.name for v in unmatched if id(v) in trainable]
    if fatal:
        raise ValueError(
            f"sync_variables: tower 0 has no counterpart of the trainable variables "
            f"{fatal}, of their shape and dtype; build the same model in every tower."
        )
    _log.warning(
        "sync_variables: tower 0 has no counterpart of %s; they keep their own values.",
        [v.name for v in unmatched],
    )
