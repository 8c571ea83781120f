"""``DeviceBatch`` and ``EpochFunction``: eager loads, training in ``tf.function``."""
