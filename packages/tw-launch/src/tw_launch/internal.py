"""Addresses, channels and servers, for the packages on top of tw-launch.

For the packages of this repository alone: any of it may change in a minor version.
"""

import lazy_loader

from tw_core.internal import refusing_unknown

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__package__, __file__)
__getattr__ = refusing_unknown(__name__, __getattr__)
