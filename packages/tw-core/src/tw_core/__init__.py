"""Towers: one copy of a model per device, and the parts that all packages share.

The names that most programs need are here; the rest are in the sub-modules
``contexts``, ``devices``, ``flat_variables``, ``gradients``, ``ranks``,
``synchronized`` and ``variables``. Names that only the packages on top need are in
``internal``. Importing this package does not import TensorFlow: the names that
``__init__.pyi`` lists are loaded when they are first used (PEP 562).
"""

import lazy_loader

from tw_core._checks import refusing_unknown

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
__getattr__ = refusing_unknown(__name__, __getattr__)
