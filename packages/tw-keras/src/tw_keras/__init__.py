"""A Keras model over towers: ``compile``, ``fit`` and all the rest of Keras.

Every tower runs the model's own ``train_step``, traced once for all of them. Towers
synchronise where an optimizer applies or a metric is updated.
"""

import lazy_loader

from tw_core.internal import refusing_unknown

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
__getattr__ = refusing_unknown(__name__, __getattr__)
