"""AutoGraph converts the user's step and leaves the package alone."""

import sys
from contextlib import contextmanager

import pytest
import tensorflow as tf

from tw_ampopt import DynamicLossScale, SimpleAdam, TowerOptimizer

GENERATED = "__autograph_generated_file"


@contextmanager
def converted():
    """Collects the names of the functions that run as AutoGraph wrote them."""
    names = set()

    def note(frame, event, arg):
        code = frame.f_code
        if GENERATED in code.co_filename and code.co_name.startswith("tf__"):
            names.add(code.co_name)

    sys.setprofile(note)
    try:
        yield names
    finally:
        sys.setprofile(None)


def grads_of(lists):
    return [[tf.ones(2), tf.constant(1.0)] for _ in lists]


def pairs_of(lists):
    grads = grads_of(lists)
    return [list(zip(g, v, strict=True)) for g, v in zip(grads, lists, strict=True)]


CALLS = {
    "apply": lambda o, lists: o.apply(grads_of(lists)),
    "apply_gradients": lambda o, lists: o.apply_gradients(pairs_of(lists)),
    "compute_gradients": lambda o, lists: o.compute_gradients(
        tf.reduce_sum(lists[0][0]) * lists[0][1]
    )[0][0],
    "nonfinite_gradients": lambda o, lists: o.nonfinite_gradients(grads_of(lists)),
    "statistics": lambda o, lists: o.statistics(),
    "apply_loss_scaling": lambda o, lists: o.apply_loss_scaling(tf.constant(1.0)),
    "undo_loss_scaling": lambda o, lists: o.undo_loss_scaling(tf.constant(1.0)),
}


@pytest.mark.slow
def test_a_plain_function_has_no_method_converted():
    lists = []
    for k in range(2):
        with tf.device(f"/cpu:{k}"):
            lists.append([tf.Variable([1.0, 2.0]), tf.Variable(3.0)])
    optimizer = TowerOptimizer(
        lists,
        loss_scale=DynamicLossScale(),
        clip_by_global_norm=1.0,
        accumulation_steps=2,
        on_nonfinite="drop_micro_batch",
    )

    @tf.function
    def plain(x):
        if x > 0.0:  # only AutoGraph can trace this
            x = x + 1.0
        return x

    @tf.function
    def step():
        return [call(optimizer, lists) for call in CALLS.values()]

    with converted() as names:
        plain(tf.constant(1.0))
    assert names == {"tf__plain"}, "the probe sees what is converted"
    with converted() as names:
        step()
    assert "tf__step" in names
    assert names <= {"tf__step", "tf__lam", "tf__grads_of", "tf__pairs_of"}


def test_simple_adam_is_not_converted():
    w = tf.Variable([1.0, 2.0])
    adam = SimpleAdam(learning_rate=0.5)
    adam.apply_gradients([(tf.zeros(2), w)])

    @tf.function
    def step():
        pairs = adam.compute_gradients(tf.reduce_sum(w), [w])
        adam.apply_gradients(pairs)

    with converted() as names:
        step()
    assert names == {"tf__step"}
