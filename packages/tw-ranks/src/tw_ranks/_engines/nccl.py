"""NCCL's test: before it is used, sums of whole numbers must be exact on all ranks."""

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

_DRIVER = "libcuda.so.1"
_PROVEN_LENGTHS = (1, 4_099, 1 << 18)

AddUp = Callable[[Sequence[np.ndarray], str, bool], Sequence[Any]]
"""Adds all ranks' arrays, for a purpose that ranks compare, by NCCL or the ring."""


def find_fault(rank: int, size: int, add_up: AddUp) -> str:
    """Returns why NCCL cannot carry sums, the same on all ranks; "" if it can.

    It is not tried where ranks share a GPU: NCCL refuses that, and TensorFlow then
    refuses all collectives.
    """
    uuids = np.zeros([size, 2], np.int64)
    uuids[rank] = np.frombuffer(identify_gpu().ljust(16, b"\0"), np.int64)
    [told] = add_up([uuids], "GPUs", False)
    if sharing := find_sharers(np.asarray(told)):
        return f"ranks {' and '.join(map(str, sharing))} share a GPU"
    numbers = [np.arange(n, dtype=np.float32) % 251 for n in _PROVEN_LENGTHS]
    sums = add_up([array * np.float32(rank + 1) for array in numbers], "sums", True)
    total = size * (size + 1) // 2
    is_wrong = any(
        not np.array_equal(np.asarray(got), array * total)
        for got, array in zip(sums, numbers, strict=True)
    )
    [count] = add_up([np.array([int(is_wrong)])], "result", False)
    if not (wrong := int(count[0])):
        return ""
    return f"NCCL added whole numbers wrongly on {wrong} of {size} ranks"


def identify_gpu() -> bytes:
    """Returns the UUID, 16 bytes, of the first GPU that TensorFlow uses here.

    A slice of a GPU (MIG) has its own. Empty without a GPU, or if the driver does not
    report it.
    """
    visible = tf.config.get_visible_devices("GPU")
    if not visible:
        return b""
    number = int(visible[0].name.rpartition(":")[2])
    uuid, device = ctypes.create_string_buffer(16), ctypes.c_int()
    try:
        driver = ctypes.CDLL(_DRIVER)
        failed = (
            driver.cuInit(0)
            or driver.cuDeviceGet(ctypes.byref(device), number)
            or driver.cuDeviceGetUuid_v2(uuid, device)
        )
    except (OSError, AttributeError):  # no driver, or an old one
        return b""
    return b"" if failed else uuid.raw


def find_sharers(uuids: np.ndarray) -> list[int]:
    """Returns the first ranks found that use one GPU, or an empty list.

    Takes [size, 2] int64, each rank's UUID; zeros where it is not known.

    >>> find_sharers(np.array([[7, 7], [0, 0], [7, 8], [0, 0], [7, 7]]))
    [0, 4]
    """
    ranks: dict[tuple[int, ...], list[int]] = {}
    for rank, uuid in enumerate(uuids.tolist()):
        if any(uuid):
            ranks.setdefault(tuple(uuid), []).append(rank)
    return next((own for own in ranks.values() if len(own) > 1), [])
