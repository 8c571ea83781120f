"""Many small tensors as one flat tensor, and back.

The cost of a small tensor is its dispatch or its message, not its bytes: joined, many
cost no more than one. The caller, who knows the cost of a copy, decides which tensors
to join; ``PackPlan`` holds the decision as plain data.

Joining all parts of a flat tensor again returns that tensor. So a pack that is joined
in one function and cut in another is passed between them whole, even where its parts
are used. The operations that cut it are then unused, and TensorFlow removes them.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import tensorflow as tf

from tw_core._modes import without_autograph

# Elements; above this, a pack costs more than the message or the op that it saves.
PACKED_BELOW = 4_096
_PACKED_BELOW_ON_GPUS = 65_536  # measured once, on an H100 as two logical GPUs
# On a GPU TensorFlow joins this many tensors or more at once, fewer one by one.
_JOINED_AT_ONCE = 16
_UNEVEN = 1.25  # Parts are padded to the longest, which is sent in vain.
_FEWEST_REPEATED = 4  # Joining this few at once would take as many launches.


def packed_below(devices: Sequence[str]) -> int:
    """Returns the size in elements from which tensors on these devices stay alone.

    >>> from tw_core.internal import packed_below
    >>> packed_below(["/gpu:0", "/gpu:1"]), packed_below(["/cpu:0"]), packed_below([])
    (65536, 4096, 4096)
    """
    on_gpus = bool(devices) and all(map(_is_gpu, devices))
    return _PACKED_BELOW_ON_GPUS if on_gpus else PACKED_BELOW


@dataclass(frozen=True)
class PackPlan:
    """Which of N tensors are packed together.

    Attributes:
      packs: positions of the tensors in each pack, in order.
      alone: positions that stay as they are.
    """

    packs: tuple[tuple[int, ...], ...]
    alone: tuple[int, ...]

    @property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """The packs, and each position that stays alone as a group of one.

        In the order of their first positions.
        """
        return tuple(sorted([*self.packs, *((n,) for n in self.alone)]))

    def packed_shapes(
        self, shapes: Sequence[Sequence[int]]
    ) -> tuple[tuple[int, ...], ...]:
        """Returns the shapes of the tensors that ``pack`` makes from ``shapes``.

        >>> PackPlan(packs=((0, 2),), alone=(1,)).packed_shapes([(2,), (7, 5), ()])
        ((3,), (7, 5))
        """
        flat = tuple((sum(prod(shapes[n]) for n in own),) for own in self.packs)
        return flat + tuple(tuple(shapes[n]) for n in self.alone)


def plan_packing(keys: Sequence[Hashable | None]) -> PackPlan:
    """Groups tensors with equal keys into packs.

    Args:
      keys: [N]; tensors with equal keys, such as a dtype, or dtype and server, share a
        pack; None for a tensor that stays alone.

    Returns:
      The plan, in which every position occurs once. Packs are in the order of their
      first positions; a tensor whose key is unique stays alone.

    >>> from tw_core.internal import plan_packing
    >>> plan_packing(["float32", None, "float16", "float32"])
    PackPlan(packs=((0, 3),), alone=(1, 2))
    """
    groups: dict[Hashable, list[int]] = {}
    for n, key in enumerate(keys):
        if key is not None:
            groups.setdefault(key, []).append(n)
    packs = tuple(tuple(group) for group in groups.values() if len(group) > 1)
    packed = {n for own in packs for n in own}
    return PackPlan(packs, tuple(n for n in range(len(keys)) if n not in packed))


def plan_buckets(
    num_bytes: Sequence[Sequence[int]], bucket_bytes: int | None
) -> tuple[tuple[int, ...], ...]:
    """Groups gradients for exchanges that begin while others are still computed.

    Args:
      num_bytes: [N][R] of the gradients, in the order of their variables, by the rank
        that gets them, or [N][1] if all do; 0 if unknown.
      bucket_bytes: how many complete a bucket, if no rank gets much more of it than the
        others; None for one bucket.

    Returns:
      The buckets, in which every position occurs once. A backward pass computes the
      last gradients first, so they are in the first bucket.

    >>> from tw_core.internal import plan_buckets
    >>> plan_buckets([[1], [1], [1], [9], [1], [2]], 3)
    ((4, 5), (3,), (0, 1, 2))
    >>> plan_buckets([[4, 0], [0, 4], [4, 0], [0, 4]], 3)
    ((2, 3), (0, 1))
    """
    every = tuple(range(len(num_bytes)))
    if not (bucket_bytes and every):
        return (every,) if every else ()
    buckets, end = list[tuple[int, ...]](), len(every)
    of_ranks = [0] * len(num_bytes[0])
    for n in reversed(every):
        of_ranks = [
            held + own for held, own in zip(of_ranks, num_bytes[n], strict=True)
        ]
        total, longest = sum(of_ranks), max(of_ranks) * len(of_ranks)
        if n == 0 or (total >= bucket_bytes and longest <= _UNEVEN * total):
            buckets.append(every[n:end])
            of_ranks, end = [0] * len(of_ranks), n
    return tuple(buckets)


def narrow_source(tensor: tf.Tensor) -> tf.Tensor:
    """Returns the narrower float that a tensor was cast from, or the tensor itself.

    A cast to a wider float is exact: repeated where the tensor is used, it lets half
    the bytes cross between devices.
    """
    if tf.executing_eagerly() or tensor.graph is not tf.compat.v1.get_default_graph():
        return tensor
    if tensor.op.type != "Cast":
        return tensor
    source = tensor.op.inputs[0]
    widened = source.dtype.is_floating and source.dtype.size < tensor.dtype.size
    return source if widened and tensor.dtype.is_floating else tensor


@without_autograph
def join_flat(tensors: Sequence[tf.Tensor], *, narrow: bool = False) -> tf.Tensor:
    """Joins dense tensors, in their order, into one of rank 1.

    Args:
      tensors: of one dtype and of any shapes, known or not; at least one.
      narrow: whether tensors that were all widened from one dtype are joined in that
        dtype and widened afterwards, so that fewer bytes reach the device in scope.

    Returns:
      [total number of elements], on the device in scope. A single tensor of rank 1 is
      returned as it is; so is a tensor that ``cut_flat`` cut into exactly these.

    Raises:
      ValueError: no tensor.
    """
    if not tensors:
        raise ValueError("tensors is empty; pass at least one tensor.")
    own = [narrow_source(tensor) for tensor in tensors] if narrow else tensors
    if len({tensor.dtype for tensor in own}) > 1:
        own = tensors
    flat = _pieces(own)
    joined = flat[0] if len(flat) == 1 else _concat(flat)
    return tf.cast(joined, tensors[0].dtype) if narrow else joined


def _concat(flat: Sequence[tf.Tensor]) -> tf.Tensor:
    """Concatenates; on a GPU, few tensors with the smallest repeated, then cut off."""
    sizes = [tensor.shape.num_elements() for tensor in flat]
    filled = [size for size in sizes if size]
    is_few = _FEWEST_REPEATED < len(filled) < _JOINED_AT_ONCE
    if not is_few or None in sizes or not _joins_on_gpu(flat[0]):
        return tf.concat(flat, axis=0)
    repeated = [flat[sizes.index(min(filled))]] * (_JOINED_AT_ONCE - len(filled))
    return tf.slice(tf.concat([*flat, *repeated], axis=0), [0], [sum(sizes)])


def _joins_on_gpu(tensor: tf.Tensor) -> bool:
    """Whether an op made here on a tensor of a graph is placed on a GPU."""
    if tf.executing_eagerly() or not _is_gpu(tensor.device):
        return False
    return _is_gpu(tf.no_op().device)


def _is_gpu(device: str) -> bool:
    return bool(tf.DeviceSpec.from_string(device).device_type == "GPU")


@without_autograph
def cut_flat(flat: tf.Tensor, shapes: Sequence[Any]) -> list[tf.Tensor]:
    """Cuts a flat tensor into tensors of given shapes; undoes ``join_flat``.

    Args:
      flat: of rank 1, with as many elements as the shapes; its static size may be
        unknown.
      shapes: fully known, in the order in which the tensors were joined; tuples or
        ``tf.TensorShape``.

    Returns:
      One tensor per shape, on the device in scope.

    Raises:
      ValueError: no shapes, or some that are not fully known; these are named.
    """
    known = [tf.TensorShape(shape) for shape in shapes]
    unknown = [f"{n} is {s}" for n, s in enumerate(known) if not s.is_fully_defined()]
    if unknown or not known:
        raise ValueError(
            f"shapes must be known, and at least one; got {len(known)}, unknown: "
            f"{', '.join(unknown) or 'none'}. Leave tensors of unknown shape alone."
        )
    sizes = [shape.num_elements() for shape in known]
    parts = [flat] if len(known) == 1 else tf.split(flat, sizes)
    return [
        part if shape.rank == 1 and len(known) > 1 else tf.reshape(part, shape)
        for part, shape in zip(parts, known, strict=True)
    ]


def _pieces(tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Flattens tensors; consecutive parts of one flat tensor become a slice of it."""
    runs: list[list[tf.Tensor]] = []
    last = None
    for tensor in tensors:
        part = _part(tensor)
        if part is None or last is None or last.op is not part.op:
            runs.append([tensor if part is None else part])
        elif last.value_index + 1 == part.value_index:
            runs[-1].append(part)
        else:
            runs.append([part])
        last = part
    return list(map(_piece, runs))


def _piece(run: Sequence[tf.Tensor]) -> tf.Tensor:
    first = run[0]
    if len(run) == 1:
        return first if first.shape.rank == 1 else tf.reshape(first, [-1])
    whole, parts = first.op.inputs[0], first.op.outputs
    if len(run) == len(parts):
        return whole
    before = sum(own.shape[0] for own in parts[: first.value_index])
    return tf.slice(whole, [before], [sum(own.shape[0] for own in run)])


def _part(tensor: tf.Tensor) -> Any:
    """Returns the output of a flat tensor's split that a tensor is, or None."""
    graph = getattr(tensor, "graph", None)  # An eager tensor has none.
    if graph is None or graph is not tf.compat.v1.get_default_graph():
        return None
    part = tensor
    if part.op.type == "Reshape" and not part.op.control_inputs:
        part = part.op.inputs[0]
    is_part = part.op.type == "SplitV" and part.op.inputs[0].shape.rank == 1
    is_known = is_part and all(own.shape.is_fully_defined() for own in part.op.outputs)
    return part if is_known and not part.op.control_inputs else None


@without_autograph
def whole_of_parts(
    rows: Sequence[Sequence[tf.Tensor]],
) -> tuple[list[list[tf.Tensor]], Callable[[Sequence[Any]], list[Any]]]:
    """Replaces parts by the flat tensors that ``cut_flat`` cut into exactly these.

    Returns [K][M] tensors for [K][N], if all rows consist of parts in the same way, and
    a function that makes N of M again, in the scope in which it is called.
    """
    parts = [list(map(_part, row)) for row in rows]
    places = [_places(own) for own in parts]
    if any(own != places[0] for own in places):
        return [list(row) for row in rows], list
    firsts = {own[0]: n for n, own in reversed([*enumerate(places[0])]) if own}
    alone = [n for n, own in enumerate(places[0]) if own is None]
    wholes = [
        [*(own[n].op.inputs[0] for n in firsts.values()), *(row[n] for n in alone)]
        for own, row in zip(parts, rows, strict=True)
    ]

    def undo(tensors: Sequence[Any]) -> list[Any]:
        found = dict(zip(alone, tensors[len(firsts) :], strict=True))
        for (number, first), whole in zip(firsts.items(), tensors, strict=False):
            cut = cut_flat(whole, [own.shape for own in parts[0][first].op.outputs])
            for n, own in enumerate(places[0]):
                if own is not None and own[0] == number:
                    found[n] = tf.reshape(cut[own[1]], rows[0][n].shape)
        return [found[n] for n in range(len(found))]

    return wholes, undo


def _places(parts: Sequence[Any]) -> list[tuple[int, ...] | None]:
    """Returns [N] (number of the flat tensor, number of the part, its size), or None.

    None for a tensor that is not a part, and where other parts of its flat tensor are
    missing.
    """
    used: dict[tf.Operation, set[int]] = {}
    for part in parts:
        if part is not None:
            used.setdefault(part.op, set()).add(part.value_index)
    whole = [op for op, own in used.items() if len(own) == len(op.outputs) > 1]
    return [
        None
        if part is None or part.op not in whole
        else (whole.index(part.op), part.value_index, part.shape.num_elements())
        for part in parts
    ]


def map_flat(
    fn: Callable[[tf.Tensor], tf.Tensor], tensors: Sequence[tf.Tensor]
) -> list[tf.Tensor]:
    """Applies an elementwise function to tensors of one device, on that device.

    The parts of a pack are mapped together.
    """
    if not tensors:
        return []
    [wholes], undo = whole_of_parts([tensors])
    with tf.device(wholes[0].device):
        return undo([fn(whole) for whole in wholes])


def is_small(tensor: Any, device: str = "") -> bool:
    """Returns whether a tensor on a device is known to be small enough for packs."""
    count = tensor.shape.num_elements()
    return count is not None and count < packed_below([device])


@without_autograph
def pack_tensors(tensors: Sequence[Any], plan: PackPlan) -> list[Any]:
    """Joins tensors according to a plan.

    Args:
      tensors: [N]; those in packs are dense.
      plan: which tensors to join.

    Returns:
      The packs, then the tensors that stay alone, in the plan's order; packs are on
      the device in scope.
    """
    joined = [join_flat([tensors[n] for n in own]) for own in plan.packs]
    return [*joined, *(tensors[n] for n in plan.alone)]


@without_autograph
def unpack_tensors(
    packed: Sequence[Any], plan: PackPlan, shapes: Sequence[Any]
) -> list[Any]:
    """Cuts packs up again; undoes ``pack_tensors``.

    Args:
      packed: the result of ``pack_tensors``, or tensors of the same shapes.
      plan: the plan that ``pack_tensors`` was given.
      shapes: [N] of all tensors; those in packs are fully known.

    Returns:
      [N] tensors in their original order.

    Raises:
      ValueError: ``packed`` does not have as many tensors as the plan makes, or the
        shape of a packed tensor is not fully known.
    """
    expected = len(plan.packs) + len(plan.alone)
    if len(packed) != expected:
        raise ValueError(
            f"packed must hold {len(plan.packs)} packs and {len(plan.alone)} other "
            f"tensors; got {len(packed)}."
        )
    found: dict[int, Any] = {}
    for own, flat in zip(plan.packs, packed, strict=False):
        found.update(zip(own, cut_flat(flat, [shapes[n] for n in own]), strict=True))
    found.update(zip(plan.alone, packed[len(plan.packs) :], strict=True))
    return [found[n] for n in range(len(found))]
