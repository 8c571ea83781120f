"""Which GPU carries this process's collectives: its UUID, as CUDA's driver tells it."""

import ctypes

import numpy as np
import tensorflow as tf

_DRIVER = "libcuda.so.1"


def identify_gpu() -> bytes:
    """Returns the UUID, 16 bytes, of the first GPU that TensorFlow uses here.

    Of a part of a GPU (MIG) it is the part's own. Empty where there is no GPU, and
    where the driver does not tell.
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
