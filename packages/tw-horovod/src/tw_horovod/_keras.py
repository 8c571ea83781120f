"""The Keras that ``tf.keras`` is: Keras 2 with TF_USE_LEGACY_KERAS=1, else Keras 3."""

import importlib
import os
from typing import Any

IS_KERAS_2 = os.environ.get("TF_USE_LEGACY_KERAS") in ("true", "True", "1")
keras: Any = importlib.import_module("tf_keras" if IS_KERAS_2 else "keras")
