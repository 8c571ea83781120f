"""``tw-doctor`` checks and measures these packages on a machine's devices.

Its own process never imports TensorFlow: code that can hang or crash runs in another.
"""

from tw_doctor._machine.command import main

__all__ = ["main"]
