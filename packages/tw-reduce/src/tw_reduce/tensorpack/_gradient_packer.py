"""tensorpack's packer: all gradients joined and cut into equal pieces.

The successor of ``GradientPacker`` of tensorpack 0.11
(``tensorpack/graph_builder/utils.py``). Its pieces cross the boundaries of
variables, so that none can be sent before all gradients are ready; ``packed``
does not wait. Unlike the original, it packs gradients of several dtypes.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import tensorflow as tf

from tw_core.internal import (
    check_gradients,
    check_list,
    check_whole_number,
    cut_flat,
    join_flat,
)
from tw_reduce._checks import check_devices, check_items
from tw_reduce._reducer import Tensorlike, TowerTensors
from tw_reduce._tensor_info import TensorInfo, check_infos, describe_columns

_log = logging.getLogger("tw_reduce")
_LEAST_ELEMENTS = 1024
_Spec: TypeAlias = tuple[tf.TensorShape, tf.DType]
_SOURCES = {
    "pack": "those that compute_strategy saw",
    "unpack": "pieces as pack gives them",
}


@dataclass(frozen=True)
class SplitPlan:
    """How the gradients of one dtype are joined and cut.

    Attributes:
      positions: of the gradients, in their order.
      sizes: elements of each piece; equal, but the last also holds the remainder.
    """

    positions: tuple[int, ...]
    sizes: tuple[int, ...]


def plan_splits(
    infos: Sequence[TensorInfo], *, num_split: int
) -> tuple[SplitPlan, ...]:
    """Plans the pieces of each dtype, in the order of first use.

    Args:
      infos: [N] dense, of known sizes.
      num_split: pieces per dtype, at least 1; one piece for a dtype with fewer
        than 1,024 elements per piece, provided that another one is cut.

    Returns:
      A plan per dtype; none where no dtype has enough elements.

    Raises:
      TypeError: ``num_split`` is not a whole number, or an info not a ``TensorInfo``.
      ValueError: ``num_split`` below 1.
    """
    check_infos(infos)
    check_whole_number(num_split=num_split, at_least=1)
    return _plan(infos, num_split)


class GradientPacker:
    """Joins a tower's gradients and cuts them into ``num_split`` equal tensors.

    Args:
      num_split: pieces per dtype.

    Raises:
      TypeError: ``num_split`` is not a whole number.
      ValueError: ``num_split`` below 1.
    """

    def __init__(self, num_split: int = 8) -> None:
        check_whole_number(num_split=num_split, at_least=1)
        self._num_split = num_split
        self._specs: list[_Spec] | None = None
        self._plans: tuple[SplitPlan, ...] = ()

    def compute_strategy(self, grads: Sequence[Tensorlike]) -> bool:
        """Decides how to pack; to be called once, before packing.

        Args:
          grads: [N] one tower's gradients.

        Returns:
          Whether they can be packed. False (and a line in the log) for a shape
          that is not fully known, for an ``IndexedSlices``, and for fewer than
          1,024 elements per piece.

        Raises:
          RuntimeError: called a second time.
          ValueError: a gradient is None.
          TypeError: something that is not a tensor.
        """
        if self._specs is not None:
            raise RuntimeError(
                "GradientPacker.compute_strategy: called a second time; make another "
                "GradientPacker for other gradients."
            )
        check_gradients([grads])
        infos = describe_columns([grads])
        self._specs = [(tensor.shape, tensor.dtype) for tensor in grads]
        unfit = [i.index for i in infos if i.is_sparse or i.num_elements is None]
        if unfit:
            _log.warning("GradientPacker: sparse or of unknown shape: %s", unfit)
            return False
        self._plans = _plan(infos, self._num_split)
        if not self._plans:
            _log.info(
                "GradientPacker: fewer than 1,024 elements per piece; not packed."
            )
        return bool(self._plans)

    def pack(self, grads: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Joins and cuts one tower's gradients.

        Args:
          grads: [N] dense, of the shapes and dtypes that ``compute_strategy``
            saw. Unknown dimensions are compared at run time.

        Returns:
          The pieces: ``num_split`` of rank 1 for each dtype.

        Raises:
          RuntimeError: ``compute_strategy`` was not called, or returned False.
          ValueError: other shapes or dtypes, or another number.
          TypeError: something that is not a dense tensor.
        """
        grads = _settled("pack", grads, self._check_ready())
        pieces: list[tf.Tensor] = []
        with tf.name_scope("GradientPacker"):
            for plan in self._plans:
                flat = join_flat([grads[n] for n in plan.positions], narrow=True)
                pieces.extend(tf.split(flat, plan.sizes))
        return pieces

    def unpack(self, grad_packs: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Restores the gradients from their pieces.

        Args:
          grad_packs: pieces as ``pack`` returns them.

        Returns:
          [N] gradients in their order and shapes.

        Raises:
          RuntimeError: ``compute_strategy`` was not called, or returned False.
          ValueError: pieces of other sizes or dtypes, or another number.
          TypeError: something that is not a dense tensor.
        """
        specs = self._check_ready()
        specs_of_pieces = [
            (tf.TensorShape([size]), specs[plan.positions[0]][1])
            for plan in self._plans
            for size in plan.sizes
        ]
        pieces = iter(_settled("unpack", grad_packs, specs_of_pieces))
        grads: dict[int, tf.Tensor] = {}
        with tf.name_scope("GradientPacker"):
            for plan in self._plans:
                flat = tf.concat([next(pieces) for _ in plan.sizes], axis=0)
                parts = cut_flat(flat, [specs[n][0] for n in plan.positions])
                grads.update(zip(plan.positions, parts, strict=True))
        return [grads[n] for n in range(len(specs))]

    def pack_all(
        self, all_grads: TowerTensors, devices: Sequence[str]
    ) -> list[list[tf.Tensor]]:
        """Packs each tower's gradients on its device; as ``pack``.

        Args:
          all_grads: [K][N].
          devices: [K].
        """
        return _on_devices(self.pack, all_grads, devices)

    def unpack_all(
        self, all_packed: Sequence[Sequence[tf.Tensor]], devices: Sequence[str]
    ) -> list[list[tf.Tensor]]:
        """Unpacks each tower's pieces on its device; as ``unpack``.

        Args:
          all_packed: K lists of pieces.
          devices: [K].
        """
        return _on_devices(self.unpack, all_packed, devices)

    def _check_ready(self) -> list[_Spec]:
        if self._specs is None or not self._plans:
            raise RuntimeError(
                "There is no plan for packing. Call compute_strategy first, and pack "
                "only if it returns True."
            )
        return self._specs


def _plan(infos: Sequence[TensorInfo], num_split: int) -> tuple[SplitPlan, ...]:
    groups: dict[str, list[TensorInfo]] = {}
    for info in infos:
        groups.setdefault(info.dtype, []).append(info)
    totals = [
        sum(info.num_elements or 0 for info in group) for group in groups.values()
    ]
    if not any(total / num_split >= _LEAST_ELEMENTS for total in totals):
        return ()
    return tuple(
        SplitPlan(tuple(info.index for info in group), _cut_evenly(total, num_split))
        for group, total in zip(groups.values(), totals, strict=True)
    )


def _cut_evenly(total: int, num_split: int) -> tuple[int, ...]:
    if total / num_split < _LEAST_ELEMENTS:
        return (total,)
    even = total // num_split
    return (*([even] * (num_split - 1)), total - even * (num_split - 1))


def _settled(
    method: str, tensors: Sequence[tf.Tensor], specs: Sequence[_Spec]
) -> list[tf.Tensor]:
    """Refuses tensors other than planned; checks unknown dimensions at run time."""
    check_items(tf.Tensor, "dense tensors", "be dense", tensors=tensors)
    problems = [
        f"{n} is {tensor.dtype.name} {tensor.shape} instead of {dtype.name} {shape}"
        for n, (tensor, (shape, dtype)) in enumerate(zip(tensors, specs, strict=False))
        if tensor.dtype != dtype or not shape.is_compatible_with(tensor.shape)
    ]
    if len(tensors) != len(specs):
        problems.insert(0, f"there are {len(tensors)} instead of {len(specs)}")
    if problems:
        raise ValueError(f"tensors must be {_SOURCES[method]}; {', '.join(problems)}.")
    settled = list(tensors)
    for n, (tensor, (shape, _)) in enumerate(zip(tensors, specs, strict=True)):
        if not tensor.shape.is_fully_defined():
            name = f"check_gradient_shape/{method}_position{n}"
            with tf.device(tensor.device):
                settled[n] = tf.ensure_shape(tensor, shape, name=name)
    return settled


def _on_devices(
    change: Callable[[Any], list[tf.Tensor]],
    lists: Sequence[Sequence[Tensorlike]],
    devices: Sequence[str],
) -> list[list[tf.Tensor]]:
    check_list(towers=lists, of="lists of tensors")
    devices = check_devices(devices)
    if len(lists) != len(devices):
        raise ValueError(
            f"One device per tower is needed; got {len(devices)} devices for "
            f"{len(lists)} towers."
        )
    changed = []
    for device, tensors in zip(devices, lists, strict=True):
        with tf.device(device):
            changed.append(change(tensors))
    return changed
