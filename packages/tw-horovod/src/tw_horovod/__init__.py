"""The names of ``horovod.tensorflow``: a program needs to change only its import.

.. code-block:: python

    import tw_horovod as hvd

Processes that ``tw-launch`` starts are its ranks. Names, arguments and meaning are
those of Horovod 0.28. Unsupported names (process sets, Adasum, the elastic module,
timelines) raise a ``NotImplementedError`` that says so. Functions that need the
ranks raise ``ValueError`` before ``init``, and ``RankTimeoutError`` if a rank is
missing.
"""

import lazy_loader

from tw_core.internal import refusing_unknown

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
__getattr__ = refusing_unknown(__name__, __getattr__)
