"""tensorpack's packer: all gradients joined and cut into equal pieces.

Carries on ``GradientPacker`` of tensorpack 0.11
(``tensorpack/graph_builder/utils.py``). Its pieces cross the boundaries of
variables, so that none can travel before all gradients are there; ``packed``
does not wait. Beyond the original: gradients of several dtypes.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import tensorflow as tf

from tw_reduce._flat import cut, join
from tw_reduce._tensor_info import TensorInfo, describe
from tw_reduce._tower_tensors import Tensorlike, TowerTensors, check_tower_tensors

_log = logging.getLogger("tw_reduce")
_LEAST_ELEMENTS = 1024


@dataclass(frozen=True)
class SplitPlan:
    """How the gradients of one dtype are joined and cut.

    Attributes:
      positions: of the gradients, in their order.
      sizes: elements of each piece; equal, but the last holds what is left.
    """

    positions: tuple[int, ...]
    sizes: tuple[int, ...]


def plan_splits(
    infos: Sequence[TensorInfo], *, num_split: int
) -> tuple[SplitPlan, ...]:
    """Plans the pieces of each dtype, the dtypes in the order of first use.

    Args:
      infos: [N] dense, of known sizes.
      num_split: pieces a dtype, at least 1; one piece for a dtype with fewer
        than 1,024 elements a piece, as long as another one is cut.

    Returns:
      A plan a dtype; none where no dtype has enough elements.
    """
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


class GradientPacker:
    """Joins a tower's gradients and cuts them into ``num_split`` equal tensors.

    Args:
      num_split: pieces a dtype.

    Raises:
      ValueError: ``num_split`` below 1.
    """

    def __init__(self, num_split: int = 8) -> None:
        if num_split < 1:
            raise ValueError(
                f"GradientPacker: num_split must be at least 1; got {num_split}."
            )
        self._num_split = num_split
        self._shapes: list[tf.TensorShape] | None = None
        self._plans: tuple[SplitPlan, ...] = ()

    def compute_strategy(self, grads: Sequence[Tensorlike]) -> bool:
        """Decides how to pack; to be called once, before packing.

        Args:
          grads: [N] one tower's gradients.

        Returns:
          Whether they can be packed. False (and a line in the log) for a shape
          that is not fully known, for an ``IndexedSlices``, and for fewer than
          1,024 elements a piece.

        Raises:
          RuntimeError: called before.
          ValueError: a gradient is None.
          TypeError: something that is no tensor.
        """
        if self._shapes is not None:
            raise RuntimeError(
                "GradientPacker.compute_strategy: called a second time; make another "
                "GradientPacker for other gradients."
            )
        check_tower_tensors([grads], caller="GradientPacker.compute_strategy")
        infos = describe(grads)
        self._shapes = [tensor.shape for tensor in grads]
        unfit = [i.index for i in infos if i.is_sparse or i.num_elements is None]
        if unfit:
            _log.warning("GradientPacker: sparse or of unknown shape: %s", unfit)
            return False
        self._plans = plan_splits(infos, num_split=self._num_split)
        if not self._plans:
            _log.info("GradientPacker: fewer than 1,024 elements a piece; not packed.")
        return bool(self._plans)

    def pack(self, grads: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Joins and cuts one tower's gradients.

        Args:
          grads: [N], of the shapes that ``compute_strategy`` saw.

        Returns:
          The pieces: ``num_split`` of rank 1 for each dtype.

        Raises:
          RuntimeError: ``compute_strategy`` was not called, or returned False.
          ValueError: other shapes.
        """
        self._check_ready("pack")
        self._check_shapes(grads)
        pieces: list[tf.Tensor] = []
        with tf.name_scope("GradientPacker"):
            for plan in self._plans:
                flat = join([grads[n] for n in plan.positions])
                pieces.extend(tf.split(flat, plan.sizes))
        return pieces

    def unpack(self, grad_packs: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Puts the gradients together again.

        Args:
          grad_packs: pieces as ``pack`` gives them.

        Returns:
          [N] gradients in their order and shapes.

        Raises:
          RuntimeError: ``compute_strategy`` was not called, or returned False.
          ValueError: another number of pieces.
        """
        shapes = self._check_ready("unpack")
        self._check_count(grad_packs)
        pieces = iter(grad_packs)
        grads: dict[int, tf.Tensor] = {}
        with tf.name_scope("GradientPacker"):
            for plan in self._plans:
                flat = tf.concat([next(pieces) for _ in plan.sizes], axis=0)
                parts = cut(flat, [shapes[n] for n in plan.positions])
                grads.update(zip(plan.positions, parts, strict=True))
        return [grads[n] for n in range(len(shapes))]

    def pack_all(
        self, all_grads: TowerTensors, devices: Sequence[str]
    ) -> list[list[tf.Tensor]]:
        """Packs each tower's gradients on its device; as ``pack``.

        Args:
          all_grads: [K][N].
          devices: [K].
        """
        _check_lengths("pack_all", all_grads, devices)
        packs = []
        for device, grads in zip(devices, all_grads, strict=True):
            with tf.device(device):
                packs.append(self.pack(grads))
        return packs

    def unpack_all(
        self, all_packed: Sequence[Sequence[tf.Tensor]], devices: Sequence[str]
    ) -> list[list[tf.Tensor]]:
        """Unpacks each tower's pieces on its device; as ``unpack``.

        Args:
          all_packed: K lists of pieces.
          devices: [K].
        """
        _check_lengths("unpack_all", all_packed, devices)
        grads = []
        for device, pieces in zip(devices, all_packed, strict=True):
            with tf.device(device):
                grads.append(self.unpack(pieces))
        return grads

    def _check_ready(self, method: str) -> list[tf.TensorShape]:
        if self._shapes is None or not self._plans:
            raise RuntimeError(
                f"GradientPacker.{method}: there is no plan to pack by. Call "
                "compute_strategy first, and pack only if it returns True."
            )
        return self._shapes

    def _check_shapes(self, grads: Sequence[tf.Tensor]) -> None:
        want = [str(shape) for shape in self._shapes or ()]
        got = [str(tensor.shape) for tensor in grads]
        if got != want:
            raise ValueError(
                f"GradientPacker.pack: shapes must be those that compute_strategy saw, "
                f"{want}; got {got}."
            )

    def _check_count(self, grad_packs: Sequence[tf.Tensor]) -> None:
        want = sum(len(plan.sizes) for plan in self._plans)
        if len(grad_packs) != want:
            raise ValueError(
                f"GradientPacker.unpack: expected {want} pieces, as pack gives them; "
                f"got {len(grad_packs)}."
            )


def _cut_evenly(total: int, num_split: int) -> tuple[int, ...]:
    if total / num_split < _LEAST_ELEMENTS:
        return (total,)
    even = total // num_split
    return (*([even] * (num_split - 1)), total - even * (num_split - 1))


def _check_lengths(
    method: str, lists: Sequence[Sequence[tf.Tensor]], devices: Sequence[str]
) -> None:
    if len(lists) != len(devices):
        raise ValueError(
            f"GradientPacker.{method}: one device a tower is needed; got "
            f"{len(devices)} devices for {len(lists)} towers."
        )
