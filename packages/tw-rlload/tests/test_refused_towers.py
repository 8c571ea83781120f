"""The drop-in class in a session graph: which towers and arguments it refuses."""

import pytest
import tensorflow as tf
from rlload_pulled import Loss, descent, make

from tw_rlload import LocalSyncParallelOptimizer

v1 = tf.compat.v1
pytestmark = pytest.mark.usefixtures("graph")


def test_a_gradient_that_some_towers_miss_is_refused():
    class Partial(Loss):
        def gradients(self, optimizer):
            other = v1.get_variable("other", initializer=1.0)
            is_missing = "CPU:1" in self.loss.device
            more = (None if is_missing else tf.ones([]), other)
            return [*super().gradients(optimizer), more]

    with pytest.raises(ValueError, match=r"other has gradient None in towers \[1\]"):
        make(Partial)


def test_towers_that_differ_in_their_variables_are_refused():
    class Uneven(Loss):
        def gradients(self, optimizer):
            pairs = super().gradients(optimizer)
            return pairs * (2 if "CPU:1" in self.loss.device else 1)

    with pytest.raises(ValueError, match=r"w occurs \[1, 2\] times in towers 0..1"):
        make(Uneven)


def test_equally_named_variables_of_two_towers_are_not_taken_for_one():
    class Own(Loss):
        def __init__(self, inputs):
            tower = inputs[0].device[-1:] or "s"
            with tf.name_scope(f"tower{tower}/"):
                self.w = v1.Variable([0.0, 0.0], name="w")
            self.loss = tf.reduce_sum(inputs[0] * self.w)

        def gradients(self, optimizer):
            return optimizer.compute_gradients(self.loss, [self.w])

    message = r"must share their variables; got .*'tower0/w:0', 'tower1/w:0'"
    with pytest.raises(ValueError, match=message):
        make(Own)


def test_gradients_that_want_a_loss_which_nobody_knows_are_refused():
    class NoLoss:
        def gradients(self, optimizer, loss):
            raise NotImplementedError

    message = r"NoLoss.gradients takes a loss as well as .* no scalar tensor `loss`"
    with pytest.raises(TypeError, match=message):
        make(lambda inputs: NoLoss())


def test_gradients_that_are_no_pairs_are_refused():
    message = (
        r"NoPairs.gradients, .* must (be a list of|hold) .gradient, variable. pairs"
    )
    for returned in (None, 3.0, [[1, 2, 3]]):

        class NoPairs(Loss):
            def gradients(self, optimizer, returned=returned):
                return returned

        with tf.Graph().as_default(), pytest.raises(TypeError, match=message):
            make(NoPairs)


def in_older_cond(build):
    v1.disable_control_flow_v2()
    try:
        tf.cond(tf.constant(True), build, lambda: 1.0)
    finally:
        v1.enable_control_flow_v2()


@pytest.mark.parametrize(
    "inside",
    [
        lambda build: tf.cond(tf.constant(True), build, lambda: 1.0),
        lambda build: tf.while_loop(lambda i: i < 1.0, lambda i: i + build(), [0.0]),
        in_older_cond,
        lambda build: tf.function(build, autograph=False)(),
    ],
    ids=["cond", "while_loop", "older cond", "function"],
)
def test_a_part_of_a_session_graph_is_no_place_for_it(inside):
    x = v1.placeholder(tf.float32, [None, 2], "x")

    def build():
        LocalSyncParallelOptimizer(descent(), ["/cpu:0"], [x], [], 4, Loss)
        return 1.0

    with pytest.raises(
        RuntimeError, match=r"function of one. .* outside of tf.cond, tf.while_loop"
    ):
        inside(build)
