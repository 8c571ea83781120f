"""All-reduce by adding each gradient on one device, in a fixed order.

A sum must have the same bits in every run. TensorFlow's memory pass would
rewrite an ``AddN`` of three or more inputs into one accumulation per input,
in the order in which they finish, if it believes that four fifths of a device's
memory are used; a CPU device claims 256 MB, so this happens to every large model,
and takes twice the time. The pass skips tensors whose shape it cannot infer. So
the tensors are added in a shape that is known only at run time: flat, by a ``[-1]``
that no pass folds. ``docs/design/reduce.md`` has the measurements.

The sum of sparse gradients is the list of all their rows: an index may occur
twice, and in any order, unless it is known to occur once in each tower
(``tw_core.internal.add_rows``). ``tw_core.gradients.sum_duplicate_rows`` adds rows for
code that needs one per index, as ten of Keras 3's optimizers do.

``sum_balanced`` places the largest gradient first, each on the device with the fewest
bytes so far (longest processing time first): the largest load <= 4/3 of the optimum.
Source: R. L. Graham, "Bounds on multiprocessing timing anomalies", 1969.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import tensorflow as tf

from tw_core.internal import (
    Gradients,
    add_rows,
    check_list,
    check_text,
    check_whole_number,
    compiles_with_xla,
    device_name,
    elementwise,
    host_of,
    narrow_source,
    without_autograph,
)
from tw_reduce._checks import addable, check_device_strings, check_devices
from tw_reduce._reducer import Tensorlike, TowerTensors
from tw_reduce._tensor_info import describe_columns


@dataclass(frozen=True)
class BalancePlan:
    """The device that adds each gradient.

    Attributes:
      devices: as given.
      device_of: [N] index into ``devices`` for each gradient.
      loads: bytes that each device adds per tower.
    """

    devices: tuple[str, ...]
    device_of: tuple[int, ...]
    loads: tuple[int, ...]


def plan_balanced(
    num_bytes: Sequence[int | None], devices: Sequence[str]
) -> BalancePlan:
    """Spreads gradients over devices, the largest first onto the least loaded.

    Args:
      num_bytes: [N] bytes of each gradient of one tower; None where unknown:
        counted as the mean of the known ones (as 1 byte if none is known).
      devices: at least one.

    Returns:
      The plan; the same for the same input, ties going to the earlier device.

    Raises:
      TypeError: something other than whole numbers and strings.
      ValueError: no device, or a negative size.

    >>> plan_balanced([10, 40, 30, 10], ["/cpu:0", "/cpu:1"]).device_of
    (1, 0, 1, 0)
    """
    check_list(num_bytes=num_bytes, of="whole numbers", empty=True)
    devices = check_device_strings(devices)
    for size in num_bytes:
        if size is not None:
            check_whole_number(num_bytes=size, at_least=0)
    return balanced(num_bytes, devices)


def balanced(num_bytes: Sequence[int | None], devices: Sequence[str]) -> BalancePlan:
    """As ``plan_balanced``, for checked arguments."""
    known = [size for size in num_bytes if size is not None]
    usual = max(1, sum(known) // len(known)) if known else 1
    sizes = [usual if size is None else size for size in num_bytes]
    device_of = [0] * len(sizes)
    loads = [0] * len(devices)
    for n in sorted(range(len(sizes)), key=sizes.__getitem__, reverse=True):
        lightest = min(range(len(devices)), key=loads.__getitem__)
        device_of[n] = lightest
        loads[lightest] += sizes[n]
    return BalancePlan(tuple(devices), tuple(device_of), tuple(loads))


@elementwise
@without_autograph
def sum_on_device(grads: TowerTensors, *, device: str) -> list[list[Tensorlike]]:
    """Adds the gradients of all towers on ``device``.

    Args:
      grads: [K][N], K >= 1; ``grads[k][n]`` is tower k's gradient for variable
        n, of one shape and dtype across towers.
      device: where to add.

    Returns:
      [K][N] sums, not means, on ``device``. Sparse stays sparse.

    Raises:
      ValueError: no tower, towers of unequal length, None, differing dtypes or
        shapes, an unknown device.
      TypeError: something that is not a tensor.
    """
    grads = addable(grads)
    device = device_name(device)
    check_text(device=device)
    check_devices([device])
    return add_on_device(grads, device=device)


@elementwise
def add_on_device(grads: Gradients, *, device: str) -> list[list[Tensorlike]]:
    """As ``sum_on_device``, for checked arguments."""
    return _add(grads, [device] * len(grads[0]), "sum_on_device")


@elementwise
@without_autograph
def sum_round_robin(
    grads: TowerTensors, *, devices: Sequence[str]
) -> list[list[Tensorlike]]:
    """Adds gradient n of every tower on ``devices[n % len(devices)]``.

    Args:
      grads: [K][N]; as for ``sum_on_device``.
      devices: where to add; at least one.

    Returns:
      [K][N] sums, not means. A sum stays on the device that added it. Sparse
      stays sparse.

    Raises:
      ValueError: as ``sum_on_device``; no device.
      TypeError: something that is not a tensor.
    """
    grads = addable(grads)
    devices = check_devices(devices)
    turns = [devices[n % len(devices)] for n in range(len(grads[0]))]
    return _add(grads, turns, "sum_round_robin")


@elementwise
@without_autograph
def sum_balanced(
    grads: TowerTensors, *, devices: Sequence[str]
) -> list[list[Tensorlike]]:
    """Adds each gradient on one device, with the bytes spread evenly over devices.

    Args:
      grads: [K][N]; as for ``sum_on_device``.
      devices: where to add; at least one.

    Returns:
      [K][N] sums, not means. A sum stays on the device that added it. Sparse
      stays sparse.

    Raises:
      ValueError: as ``sum_on_device``; no device.
      TypeError: something that is not a tensor.
    """
    grads = addable(grads)
    devices = check_devices(devices)
    plan = balanced([own.num_bytes for own in describe_columns(grads)], devices)
    return _add(grads, [devices[index] for index in plan.device_of], "sum_balanced")


def add_columns(
    columns: Iterable[Sequence[Tensorlike]], devices: Sequence[str | None]
) -> list[Tensorlike]:
    """Adds the K tensors of column n on ``devices[n]``; None for the caller's scope.

    Widened tensors (float16 cast to float32, say) are sent narrow. A sum of sparse
    tensors has all of their rows, including duplicates; a mixed sum is dense.
    """
    hosts = {device: host_of(device) for device in dict.fromkeys(devices)}
    flat_shapes: dict[str, tf.Tensor | None] = {}
    sums = []
    for column, device in zip(columns, devices, strict=True):
        if len(column) == 1:
            sums.append(column[0])
            continue
        host = hosts[device]
        if host not in flat_shapes:
            flat_shapes[host] = _flat_shape(host)
        with tf.device(device):
            sums.append(_add_column(column, flat_shapes[host]))
    return sums


def densify_column(column: Sequence[Tensorlike]) -> list[tf.Tensor]:
    """Makes the sparse tensors of a column dense, each on its own device."""
    if not any(isinstance(tensor, tf.IndexedSlices) for tensor in column):
        return list(column)
    num_rows = _num_dense_rows(column)
    dense = []
    for tensor in column:
        with tf.device(tensor.device):
            dense.append(_to_dense(tensor, num_rows=num_rows))
    return dense


def _add(grads: Gradients, places: Sequence[str], scope: str) -> list[list[Tensorlike]]:
    with tf.name_scope(scope):
        sums = add_columns(zip(*grads, strict=True), places)
    return [list(sums) for _ in grads]


def _flat_shape(host: str) -> tf.Tensor | None:
    # No memory pass runs eagerly or under XLA, and XLA refuses Unique.
    if tf.executing_eagerly() or compiles_with_xla():
        return None
    # Constant folding stops at the placeholder, shape inference at Unique.
    with tf.device(host):
        hidden = tf.raw_ops.PlaceholderWithDefault(input=[-1], shape=[1])
        return tf.raw_ops.Unique(x=hidden).y


def _add_column(
    column: Sequence[Tensorlike], flat_shape: tf.Tensor | None
) -> Tensorlike:
    sparse = [tensor for tensor in column if isinstance(tensor, tf.IndexedSlices)]
    if len(sparse) == len(column):
        values = _arrived([item.values for item in sparse])
        return add_rows(
            [
                tf.IndexedSlices(own, item.indices, item.dense_shape)
                for own, item in zip(values, sparse, strict=True)
            ]
        )
    dense = list(column)
    if sparse:
        num_rows = _num_dense_rows(column)
        dense = [_to_dense(tensor, num_rows=num_rows) for tensor in column]
    if flat_shape is None:
        return tf.add_n(dense)
    return _add_dense(_arrived(dense), flat_shape)


def _add_dense(tensors: Sequence[tf.Tensor], flat_shape: tf.Tensor) -> tf.Tensor:
    shape = tf.TensorShape(None)
    for tensor in tensors:
        shape = shape.merge_with(tensor.shape)
    if shape.is_fully_defined():
        flat = [tf.reshape(tensor, flat_shape) for tensor in tensors]
        return tf.reshape(tf.raw_ops.AddN(inputs=flat), shape)
    # Not flat: AddN itself must detect shapes that differ only at run time.
    hidden = [
        tf.reshape(tensor, tf.slice(tf.shape(tensor), [0], flat_shape))
        for tensor in tensors
    ]
    return tf.ensure_shape(tf.raw_ops.AddN(inputs=hidden), shape)


def _arrived(tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Repeats widening casts on the current device, so that half the bytes cross."""
    narrow = [narrow_source(tensor) for tensor in tensors]
    return [
        tf.cast(own, tensor.dtype) for own, tensor in zip(narrow, tensors, strict=True)
    ]


def _to_dense(tensor: Tensorlike, *, num_rows: int | tf.Tensor) -> tf.Tensor:
    if not isinstance(tensor, tf.IndexedSlices):
        return tensor
    return tf.math.unsorted_segment_sum(tensor.values, tensor.indices, num_rows)


def _num_dense_rows(column: Sequence[Tensorlike]) -> int | tf.Tensor:
    for tensor in column:
        if tensor.shape.rank is None:
            continue
        rows = tf.compat.dimension_value(tensor.shape[0])
        if rows is not None:
            return int(rows)
    for tensor in column:
        if not isinstance(tensor, tf.IndexedSlices):
            return tf.shape(tensor)[0]
        if tensor.dense_shape is not None:
            return tensor.dense_shape[0]
    raise ValueError(
        "An IndexedSlices must become dense here, but no tower's has a dense_shape. "
        "Give it one, or use a reducer that keeps it sparse, such as sum_balanced."
    )
