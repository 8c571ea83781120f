"""Reducers: callables that give every tower the sums of all towers' gradients.

Importing this package does not import TensorFlow: the names that ``__init__.pyi`` lists
are loaded when they are first used (PEP 562).
"""

import lazy_loader

from tw_core.internal import refusing_unknown

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
__getattr__ = refusing_unknown(__name__, __getattr__)
