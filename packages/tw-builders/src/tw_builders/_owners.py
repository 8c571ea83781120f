"""Owners: the tower that updates each variable, of which all towers have copies.

A variable of a sharded model has a copy in every tower. One tower owns it: it adds and
applies the gradients, holds the slots, and gives the other towers the new value.
Variables that an optimizer makes for an owner's copy are named as if they were tower
0's, so that a checkpoint does not depend on which tower owned which variable.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import tensorflow as tf

from tw_core import Tower
from tw_core.devices import canonical_device
from tw_core.internal import (
    call_once,
    cut_flat,
    is_small,
    join_flat,
    orders_effects,
    plain_name,
    plan_packing,
    tf_variables,
)
from tw_reduce.internal import balanced

_KEYS = tf.compat.v1.GraphKeys
# The ops inside cannot be seen from outside, and a control edge from an If or a call
# does not wait for them: once inlined, it fires as soon as the branch is chosen.
_PASSES_ON = frozenset(
    {
        *("Switch", "Enter", "Identity", "Merge"),  # control flow of TensorFlow 1
        *("If", "StatelessIf", "Case", "StatelessCase", "While", "StatelessWhile"),
        *("PartitionedCall", "StatefulPartitionedCall"),
    }
)
_READS = frozenset({"ReadVariableOp", "ResourceGather", "VariableShape"})


def plan_owners(num_bytes: Sequence[int | None], total: int) -> tuple[int, ...]:
    """Gives each variable, largest first, to the tower with the fewest bytes so far.

    Deterministic. Loads differ by at most the bytes of the largest variable, which
    tower 0 owns. None is an unknown size.

    >>> plan_owners([10, 40, 30, 10], 2)
    (1, 0, 1, 0)
    """
    return balanced(num_bytes, [f"/cpu:{k}" for k in range(total)]).device_of


def owned(columns: Sequence[Sequence[Any]], optimizer: Any = None) -> list[Any]:
    """Returns the owner's copy of each variable; ``columns`` is [K][N].

    Owners are planned over all variables that an ``optimizer`` of Keras 3 was built
    for, which may include others: a variable's state stays in one place.
    """
    planned = list(getattr(optimizer, "_trainable_variables", ()))
    place = {id(own): n for n, own in enumerate(tf_variables(planned))}
    plain = [tf_variables(own) for own in columns]
    places = [
        [place[id(v)] for v in column if id(v) in place][:1]
        for column in zip(*plain, strict=True)
    ]
    if [] in places:  # It is not built, or for others.
        planned, places = list(columns[0]), [[n] for n in range(len(columns[0]))]
    owners = owners_of(planned, len(columns))
    return [
        column[owners[n]]
        for [n], column in zip(places, zip(*columns, strict=True), strict=True)
    ]


def owners_of(variables: Sequence[Any], total: int) -> tuple[int, ...]:
    """Returns the tower that owns each variable, of ``total`` towers."""
    num_bytes: list[int | None] = []
    for variable in tf_variables(variables):
        count = variable.shape.num_elements()
        num_bytes.append(None if count is None else count * variable.dtype.size)
    return plan_owners(num_bytes, total)


def check_homes(towers: Sequence[Tower], columns: Sequence[Sequence[Any]]) -> None:
    """Refuses variables that are not on the device of their tower.

    Otherwise an owner might not hold the variable that it owns.
    """
    held = [
        (variable.name, plain.device, tower)
        for tower, own in zip(towers, columns, strict=True)
        for variable, plain in zip(own, tf_variables(own), strict=True)
    ]
    places = places_of(at for _, device, tower in held for at in (device, tower.device))
    elsewhere = [
        f"{name} of {tower.name} is on {device!r}"
        for name, device, tower in held
        if device and places[device] != places[tower.device]
    ]
    if elsewhere:
        raise ValueError(
            "Every tower's variables must be on its device, here "
            f"{[tower.device for tower in towers]}; got {', '.join(elsewhere)}. Make "
            "them without a tf.device of their own, or share them, as with a parameter "
            "server."
        )


def places_of(devices: Iterable[str]) -> dict[str, str]:
    """Returns devices' canonical names; in eager mode all are this process's."""
    places = {own: canonical_device(own) for own in dict.fromkeys(devices)}
    if not orders_effects():
        return places
    # A process that is a task of a cluster names its devices by its task.
    return {k: f"/device:{own.rpartition('device:')[2]}" for k, own in places.items()}


@contextmanager
def state_as_of(
    originals: Sequence[tf.Variable], copies: Sequence[tf.Variable]
) -> Iterator[None]:
    """Names an optimizer's state for N copies after the originals, and makes it global.

    ``originals`` are tower 0's variables, ``copies`` the owners' copies of them.
    """
    if orders_effects():  # checkpoints are object-based there
        yield
        return
    names = [
        (plain_name(copy), plain_name(original))
        for original, copy in zip(originals, copies, strict=True)
        if copy is not original
    ]
    made: list[tf.Variable] = []

    def rename(next_creator: Callable[..., tf.Variable], **kwargs: Any) -> tf.Variable:
        if kwargs.get("name"):
            kwargs["name"] = _renamed(kwargs["name"], names)
        variable = next_creator(**kwargs)
        if _KEYS.LOCAL_VARIABLES not in (kwargs.get("collections") or ()):
            made.append(variable)
        return variable

    with tf.variable_creator_scope(rename):
        yield
    _make_global(made)


def copy_from_owners(
    columns: Sequence[Sequence[Any]],
    owners: Sequence[Any],
    updates: Sequence[Sequence[tf.Operation]] | None = None,
    *,
    jit_compile: bool = False,
) -> list[Any]:
    """Copies the owners' values to every tower; ``columns`` is [K][N].

    In a session, a variable's copy waits only for its ``updates``. Without these, a
    function's order of effects applies, and an owner's small values are sent as one
    tensor; with ``jit_compile`` XLA joins and cuts it.
    """
    sources = tf_variables(owners)
    groups = [[n] for n in range(len(sources))] if updates else _packs(sources)
    assigns = []
    for places in groups:
        own = [sources[n] for n in places]
        done = [op for n in places for op in (updates[n] if updates else ())]
        run = _compiled if jit_compile and len(own) > 1 else _plain
        with tf.control_dependencies(done):
            pack = run(_read, own)
        for copies in (tf_variables(row[n] for n in places) for row in columns):
            if copies[0] is not own[0]:
                assigns += run(_assign, copies, pack)
    return assigns


def _read(own: Sequence[tf.Variable]) -> tf.Tensor:
    values = [source.read_value() for source in own]
    return join_flat(values) if len(own) > 1 else values[0]


def _assign(copies: Sequence[tf.Variable], pack: tf.Tensor) -> list[Any]:
    # A variable alone may be of unknown shape.
    is_pack = len(copies) > 1
    values = cut_flat(pack, [own.shape for own in copies]) if is_pack else [pack]
    pairs = zip(copies, values, strict=True)
    return [copy.assign(value, read_value=False) for copy, value in pairs]


def _plain(fn: Callable[..., Any], own: Sequence[tf.Variable], *more: Any) -> Any:
    with tf.device(own[0].device):
        return fn(own, *more)


def _compiled(fn: Callable[..., Any], own: Sequence[tf.Variable], *more: Any) -> Any:
    place = partial(tf.device, own[0].device)
    return call_once(fn, [[own, *more]], [place], outside="", jit_compile=True)[0]


def _packs(sources: Sequence[tf.Variable]) -> Sequence[Sequence[int]]:
    """Groups variables of one device that are worth joining."""
    keys = [
        (own.device, own.dtype) if is_small(own, own.device) else None
        for own in sources
    ]
    return plan_packing(keys).groups


class UpdateWatch:
    """Finds, for each variable, the ops of a session graph that update it."""

    def __init__(self, variables: Sequence[tf.Variable]) -> None:
        """Records which ops use the variables before the update is built."""
        self._handles = [variable.handle for variable in variables]
        self._before = [_users(handle) for handle in self._handles]

    def updates(self, whole: tf.Operation) -> list[list[tf.Operation]]:
        """Returns [N] lists of updating ops added since; ``whole`` if hidden."""
        return [
            _writing(_users(handle) - before) or [whole]
            for handle, before in zip(self._handles, self._before, strict=True)
        ]


def _users(handle: tf.Tensor) -> set[tf.Operation]:
    # In a branch, or in the graph of wrap_function, the handle comes from outside.
    graph = tf.compat.v1.get_default_graph()
    is_here = getattr(handle, "graph", None) is graph
    return set(handle.consumers()) if is_here else set()


def _writing(new: set[tf.Operation]) -> list[tf.Operation]:
    if any(op.type in _PASSES_ON for op in new):
        return []
    return sorted(
        (op for op in new if op.type not in _READS), key=lambda op: str(op.name)
    )


def _make_global(variables: Sequence[tf.Variable]) -> None:
    """Makes slots global that are local because the variable they belong to is."""
    for variable in variables:
        graph = getattr(variable, "graph", None)
        if graph is None:
            continue
        local = graph.get_collection_ref(_KEYS.LOCAL_VARIABLES)
        kept = [other for other in local if other is not variable]
        if len(kept) < len(local):
            local[:] = kept
            graph.add_to_collection(_KEYS.GLOBAL_VARIABLES, variable)


def _renamed(name: str, names: Sequence[tuple[str, str]]) -> str:
    """Names a slot (``copy/Adam``) or a master (``_`` for ``/``) after the original.

    >>> _renamed("tower1/a/w/Adam", [("tower1/a", "a"), ("tower1/a/w", "a/w")])
    'a/w/Adam'
    >>> _renamed("tower1_a_w_master", [("tower1/a/w", "a/w")])
    'a_w_master'
    """
    for copy, original in sorted(names, key=lambda pair: len(pair[0]), reverse=True):
        for separator in "/_":
            prefix = copy.replace("/", separator)
            if name == prefix or name.startswith(f"{prefix}{separator}"):
                return original.replace("/", separator) + name.removeprefix(prefix)
    return name
