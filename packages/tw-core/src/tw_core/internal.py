"""What the packages on top need of tw-core: checks, modes, gradients, traces, packs.

For the packages of this repository alone: any of it may change in a minor version.
"""

import lazy_loader

from tw_core._checks import refusing_unknown

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__package__, __file__)
__getattr__ = refusing_unknown(__name__, __getattr__)
