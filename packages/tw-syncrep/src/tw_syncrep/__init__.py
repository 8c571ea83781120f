"""Synchronous replicas over a cluster, in graph mode, with bounded waits.

Importing this package does not import TensorFlow: the names that ``__init__.pyi`` lists
are loaded when they are first used (PEP 562).
"""

import lazy_loader

from tw_core.renames import answer_renamed

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
__getattr__ = answer_renamed(__name__, {}, __getattr__)
