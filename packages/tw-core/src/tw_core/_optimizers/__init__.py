"""Optimizers of every kind: telling them apart, making their state, applying gradients.

Programs use TensorFlow's v1 optimizers, tf_keras's new and legacy ones, Keras 3's,
and classes that follow the v1 interface. They differ in the variables they take, in
whether they sum rows of a sparse gradient that share an index, in how they make their
slots, and in whether their update is an op that a session can run.
"""
