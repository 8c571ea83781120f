"""Names that siblings need: measurements, reducers of any kind, thresholds of packs.

For the packages of this repository only: any name may change in a minor version.
"""

import lazy_loader

from tw_core.internal import refusing_unknown

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__package__, __file__)
__getattr__ = refusing_unknown(__name__, __getattr__)
