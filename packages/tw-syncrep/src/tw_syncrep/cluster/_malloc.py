"""Keeps memory that was freed, for the buffers of the next step.

The packs of a step are megabytes that are allocated, sent and freed. The C
library gives such memory back to the system, and touching it again, a page at a
time, can take twenty times as long as copying into memory that was kept. This
setting is the process's: memory once used stays with it.
"""

import ctypes

_M_TRIM_THRESHOLD = -1
_M_TOP_PAD = -2
_M_MMAP_THRESHOLD = -3
_LARGEST_MMAP_THRESHOLD = 32 << 20
_NEVER = 2**31 - 1
_SIZE_OF_A_HEAP = 64 << 20


def keep_freed_memory() -> bool:
    """Has the C library keep what is freed; only glibc can.

    Returns:
      Whether it does.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return False
    settings = (
        (_M_TRIM_THRESHOLD, _NEVER),
        (_M_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD),
        # A thread's heap that is free as a whole goes back unless this is as large.
        (_M_TOP_PAD, _SIZE_OF_A_HEAP),
    )
    return all(mallopt(name, value) for name, value in settings)
