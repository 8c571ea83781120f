"""A Keras model over towers: ``compile``, ``fit`` and all the rest of Keras.

Every tower runs the model's own ``train_step``, which is traced once, for all of them.
They meet wherever all are needed: where an optimizer applies, or a metric is updated.
"""

from tw_keras._following import on_rank_0
from tw_keras._model import TowerModel

__all__ = ["TowerModel", "on_rank_0"]
