"""A tower: one copy of a model on one device.

Session graphs and ``tf.function`` use the same names.
"""

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from numbers import Integral
from typing import Any, Literal, TypeGuard, TypeVar, cast

import tensorflow as tf

from tw_core._checks import check_flag, check_function, check_list, check_whole_number
from tw_core._modes import without_autograph
from tw_core._records.collections import leave_no_summaries
from tw_core._records.losses import own_losses
from tw_core._records.origins import build_in_progress, record_scope
from tw_core.devices._logical import (
    canonical_device,
    check_known_devices,
    device_name,
    first_gpus,
    parse_device,
)
from tw_core.synchronized import joined_towers
from tw_core.synchronized._traced import call_towers_once

_T = TypeVar("_T")
_log = logging.getLogger("tw_core")


@dataclass(frozen=True)
class Tower:
    """One copy of a model on one device of this process.

    Attributes:
      index: 0 for the first tower, which owns everything that exists only once.
      device: TensorFlow device string.
      total: number of towers, at least 1.

    Raises:
      ValueError: not 0 <= index < total, or a device string that TensorFlow cannot
        read.
      TypeError: index or total is not a whole number.
    """

    index: int
    device: str
    total: int

    def __post_init__(self) -> None:
        check_whole_number(index=self.index)
        check_whole_number(total=self.total)
        object.__setattr__(self, "device", device_name(self.device))
        parse_device(self.device)
        if not 0 <= self.index < self.total:
            raise ValueError(
                f"Tower: index must be 0 or more and below total; got index="
                f"{self.index}, total={self.total}. Make towers with tw_core.towers."
            )

    @property
    def name(self) -> str:
        """``"tower0"``, ``"tower1"``, …: the name scope and the variables' prefix."""
        return f"tower{self.index}"

    @property
    def is_main(self) -> bool:
        """Whether this is tower 0."""
        return self.index == 0

    @contextmanager
    def scope(self) -> Iterator["Tower"]:
        """Places ops built inside on the tower's device, under its name."""
        with (
            tf.device(self.device),
            tf.name_scope(self.name) as ns_name,
            record_scope(
                self.index,
                ns_name=ns_name.rstrip("/"),
                vs_name="",
                total=self.total,
            ),
            own_losses((build_in_progress(), self.index)),
        ):
            yield self


def towers(
    devices: Sequence[int | str | Tower] | int | None = None,
) -> tuple[Tower, ...]:
    """Makes one tower per device, in the order given.

    Args:
      devices: None for all GPUs of this process, whole or divided, as ``tf.config``
        has them; a number K for the first K. Of a list, an int k means ``"/gpu:k"``;
        a string is used as it is; a logical or physical device of ``tf.config``
        stands for its string. A device may occur several times, which is logged as
        a warning. Towers from an earlier call are returned as they are, so that
        functions that take devices can take towers too.

    Returns:
      K towers.

    Raises:
      ValueError: no device, fewer GPUs than asked for, a negative int, a string
        TensorFlow cannot read, a physical device that is hidden or divided, or an
        earlier call's towers, incomplete or reordered.
      TypeError: neither a list nor a number, or an item of another kind.

    >>> towers([0, "/cpu:0"])[0]
    Tower(index=0, device='/gpu:0', total=2)
    """
    if _is_number(devices) or devices is None:
        devices = first_gpus(devices)
    if isinstance(devices, str) or not isinstance(devices, Sequence):
        raise TypeError(
            "devices must be a number of GPUs, or a list of ints and device strings; "
            f"got {devices!r}. Write e.g. 2, [0, 1] or ['/cpu:0', '/cpu:1']."
        )
    if not devices:
        raise ValueError(
            "devices is empty; at least one tower is needed, e.g. ['/cpu:0']. Leave "
            "devices out to use all GPUs."
        )
    if any(isinstance(device, Tower) for device in devices):
        return _whole(devices)
    names = [_device_name(device) for device in devices]
    made = tuple(Tower(k, name, len(names)) for k, name in enumerate(names))
    counts = Counter(canonical_device(name) for name in names)
    shared = [f"{device} ({n} towers)" for device, n in counts.items() if n > 1]
    if shared:
        _log.warning("towers: several towers on one device: %s", ", ".join(shared))
    return made


def map_towers(
    fn: Callable[..., _T],
    towers: Sequence[Tower],
    *per_tower: Sequence[Any],
    trace: Literal["each", "once"] = "each",
    inline: bool | None = None,
    jit_compile: bool = False,
) -> list[_T]:
    """Calls ``fn(tower, ...)`` for each tower, on its device and under its name.

    In a graph, ``fn`` may sum over towers (``tw_core.synchronized``).

    With ``trace="once"``, in a ``tf.function``, TensorFlow traces ``fn`` for tower 0
    alone, and each tower calls that trace with its own tensors and variables: a step of
    many towers starts as fast as one of few. The variables of tower k are found in item
    k of ``per_tower``: in Keras models and optimizers, ``tf.Module``s, variables, and
    nests of them. Python code of ``fn`` runs once; values that differ between towers,
    such as ``tower.index``, must be passed as tensors. Take gradients inside ``fn``.

    Args:
      fn: takes the tower, then one item of each of ``per_tower``.
      towers: K towers.
      *per_tower: sequences of length K; item k goes to tower k.
      trace: ``"each"`` or ``"once"``.
      inline: with ``trace="once"``, whether TensorFlow may inline the towers' calls,
        which shortens the step of small functions and lengthens the start of large
        ones; None to decide by the number of operations.
      jit_compile: with ``trace="once"``, whether XLA compiles each tower's call for its
        device. Variables of other devices are read before the call.

    Returns:
      The K results, tower 0 first.

    Raises:
      ValueError: no tower; a sequence whose length is not K; in eager mode, in
        ``tf.function`` and where the graph has a default session, a device this
        process does not have; or towers whose sums over towers do not match. With
        ``trace="once"`` also variables that differ in number, shape, dtype or
        trainability, other Python values that differ, a variable that ``fn`` writes
        and no tower was given, a tensor from outside that belongs to only some towers,
        or if ``fn`` reads a tower's index or name. ``jit_compile`` without it, or with
        variables of other devices that ``fn`` does not only read.
      TypeError: an item of ``towers`` is not a ``Tower``, ``fn`` is not a function,
        or an item of ``per_tower`` is not a sequence.
      RuntimeError: ``trace="once"`` outside of ``tf.function``.

    >>> import tensorflow as tf
    >>> def mean_of(tower, part):
    ...     return tower.name, float(tf.reduce_mean(part))
    >>> map_towers(mean_of, towers(["/cpu:0"] * 2), [[1.0, 3.0], [5.0]])
    [('tower0', 2.0), ('tower1', 5.0)]
    """
    # Not marked without_autograph: fn may need AutoGraph.
    _check_calls(fn, towers, per_tower, trace, inline, jit_compile)
    if trace == "once":
        context = tf.__internal__.autograph.control_status_ctx()
        converted = tf.__internal__.autograph.tf_convert(fn, context)

        def call(*arguments: Any) -> _T:
            # A lambda of a converted function counts as converted itself, and its
            # callees are converted only if AutoGraph is on.
            with context:
                return cast(_T, converted(*arguments))

        return _call_once(call, towers, per_tower, inline, jit_compile)
    results = []
    with joined_towers(len(towers)) as joined:
        for k, (tower, *items) in enumerate(zip(towers, *per_tower, strict=True)):
            with tower.scope(), joined.tower(k):
                results.append(fn(tower, *items))
    return results


@contextmanager
def placing_calls(tower: Tower) -> Iterator[None]:
    """Places calls, which make no variables, on a tower's device, under its name."""
    with tf.device(tower.device), tf.name_scope(tower.name):
        yield


@without_autograph
def _call_once(
    fn: Callable[..., _T],
    towers: Sequence[Tower],
    per_tower: Sequence[Sequence[Any]],
    inline: bool | None,
    jit_compile: bool,
) -> list[_T]:
    return call_towers_once(
        partial(fn, _AnyTower(len(towers))),
        [list(items) for items in zip(*per_tower, strict=True)] or [[]] * len(towers),
        [partial(placing_calls, tower) for tower in towers],
        inline=inline,
        jit_compile=jit_compile,
    )


class _AnyTower(Tower):
    """The tower that a function sees while it is traced for all towers."""

    def __init__(self, total: int) -> None:
        object.__setattr__(self, "total", total)

    def __getattribute__(self, name: str) -> Any:
        if name in ("index", "device", "name", "is_main", "scope"):
            raise ValueError(
                f"map_towers: the function reads tower.{name} while it is traced once "
                "for all towers; pass values that differ between towers as tensors: "
                "[tf.constant(tower.index) for tower in towers], or use trace='each'."
            )
        return super().__getattribute__(name)

    def __repr__(self) -> str:
        return f"(any of {self.total} towers)"


@contextmanager
def record_variables(tower: Tower, *, are_copies: bool = False) -> Iterator[None]:
    """Records the variables made inside as ``tower``'s own.

    For code that makes variables for a tower outside of its context, such as an
    optimizer's state. Names are compared with tower 0's without the ``tower<k>/``.

    Args:
      tower: the owner.
      are_copies: whether the variables are copies of tower 0's. From tower 1 on they
        are then local, as in ``override_to_local_variable``, and no summaries stay.

    Raises:
      TypeError: ``tower`` is not a ``Tower``, or ``are_copies`` not a bool.
      ValueError: a copy is a reference variable.
    """
    check_tower(tower)
    check_flag(are_copies=are_copies)
    scope = "" if tower.is_main else tower.name
    is_copy = are_copies and not tower.is_main
    with (
        leave_no_summaries() if is_copy else nullcontext(),
        record_scope(tower.index, ns_name=scope, vs_name=scope, are_local=is_copy),
    ):
        yield


@without_autograph
def check_towers(towers: Sequence[Tower]) -> None:
    """Refuses anything but a list of towers, and devices that are known not to exist.

    Args:
      towers: K towers, at least one.

    Raises:
      TypeError: not a list, or an item that is not a ``Tower``.
      ValueError: an empty list; or, in eager mode, in ``tf.function`` and where the
        graph has a default session, a device this process does not have.
    """
    check_list(towers=towers, of="tw_core.Tower", empty=True)
    if not towers:
        raise ValueError("towers is empty; make some with tw_core.towers(devices).")
    others = [tower for tower in towers if not isinstance(tower, Tower)]
    if others:
        raise TypeError(
            f"towers must hold tw_core.Tower; got {others}. Make them with "
            "tw_core.towers(devices)."
        )
    check_known_devices([tower.device for tower in towers])


@without_autograph
def _check_calls(
    fn: object,
    towers: Sequence[Tower],
    per_tower: Sequence[Sequence[Any]],
    trace: object,
    inline: bool | None,
    jit_compile: bool,
) -> None:
    check_towers(towers)
    check_function(fn=fn)
    if trace not in ("each", "once"):
        raise ValueError(f"map_towers: trace must be 'each' or 'once'; got {trace!r}.")
    if inline is not None:
        check_flag(inline=inline)
    check_flag(jit_compile=jit_compile)
    if jit_compile and trace != "once":
        raise ValueError(
            "map_towers: jit_compile=True compiles a trace for all towers only; add "
            "trace='once', or have fn call tf.function(..., jit_compile=True) itself."
        )
    others = [items for items in per_tower if not _has_items(items)]
    if others:
        raise TypeError(
            "map_towers: per_tower must hold sequences with one item per tower; got "
            f"{others!r}."
        )
    lengths = [len(items) for items in per_tower]
    if any(length != len(towers) for length in lengths):
        raise ValueError(
            f"map_towers: every sequence must hold one item per tower; got lengths "
            f"{lengths} for {len(towers)} towers."
        )


def _has_items(items: object) -> bool:
    rank = getattr(getattr(items, "shape", None), "rank", None)
    return rank != 0 and hasattr(items, "__len__") and not isinstance(items, str)


def check_tower(tower: object) -> None:
    """Refuses anything but a ``Tower``."""
    if not isinstance(tower, Tower):
        raise TypeError(
            f"tower must be a tw_core.Tower; got {tower!r}. Make them with "
            "tw_core.towers(devices)."
        )


def _whole(towers: Sequence[Any]) -> tuple[Tower, ...]:
    """Returns an earlier call's towers, which must be complete and in order."""
    if not all(isinstance(tower, Tower) for tower in towers):
        raise TypeError(
            "devices must hold ints and device strings, or only towers; got "
            f"{list(towers)}."
        )
    if [(t.index, t.total) for t in towers] != [
        (k, len(towers)) for k in range(len(towers))
    ]:
        raise ValueError(
            "towers must be all that one call of tw_core.towers made, in their order; "
            f"got {list(towers)}."
        )
    return tuple(towers)


def _device_name(device: int | str | Tower) -> str:
    device = device_name(device)
    if not isinstance(device, str) and not _is_number(device):
        raise TypeError(
            "A device is an int (GPU number), a string, or one of "
            f"tf.config.list_logical_devices(); got {device!r}."
        )
    if isinstance(device, str):
        return device
    if device < 0:
        raise ValueError(f"A GPU number is 0 or more; got {device}.")
    return f"/gpu:{int(device)}"


def _is_number(value: object) -> TypeGuard[int]:
    return isinstance(value, Integral) and not isinstance(value, bool)
