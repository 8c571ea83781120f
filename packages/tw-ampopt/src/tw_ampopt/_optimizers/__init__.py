"""The two optimizers, for session graphs and for ``tf.function``."""
