"""``tw-doctor`` checks and measures what a machine's devices make of these packages.

Its own process never imports TensorFlow: what can hang or crash runs in another one.
"""

from tw_reduce.doctor._command import main

__all__ = ["main"]
