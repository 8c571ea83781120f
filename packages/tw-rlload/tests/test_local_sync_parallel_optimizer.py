"""The drop-in class in a session graph: what is built, run, and refused."""

import re
import time
from functools import partial

import numpy as np
import pytest
import tensorflow as tf
from rlload_pulled import Loss, X, descent, make, session

from tw_core import session_config
from tw_core.testing import NUM_CPUS
from tw_reduce import sum_on_device

v1 = tf.compat.v1
pytestmark = pytest.mark.usefixtures("graph")


def test_build_graph_is_called_for_the_whole_and_then_for_each_tower():
    calls = []

    def build(inputs):
        calls.append((inputs[0], inputs[0].device, len(calls)))
        return Loss(inputs)

    optimizer = make(build, devices=3)
    assert calls[0][0] is optimizer.loss_inputs[0]
    assert [device for _, device, _ in calls[1:]] == [
        f"/device:CPU:{k}" for k in range(3)
    ]
    assert optimizer.get_common_loss().inputs[0] is optimizer.loss_inputs[0]
    losses = optimizer.get_device_losses()
    assert [loss.inputs[0] for loss in losses] == [t for t, _, _ in calls[1:]]
    assert all(loss.inputs[0].shape.as_list() == [None, 2] for loss in losses)


def test_data_variables_are_in_no_collection(graph):
    make()
    for name in graph.get_all_collection_keys():
        names = [getattr(item, "name", "") for item in graph.get_collection(name)]
        assert not any("loaded" in name for name in names)
    assert [v.op.name for v in v1.global_variables()] == ["w"]
    held = [op for op in graph.get_operations() if "loaded" in op.name]
    assert {op.device for op in held if op.type == "VarHandleOp"} == {
        "/device:CPU:0",
        "/device:CPU:1",
    }


@pytest.mark.parametrize("num_buffers", [1, 2])
def test_the_batch_is_read_whole_and_never_sparsely(graph, num_buffers):
    """A sparse read of a variable makes each later load copy it."""
    make(num_buffers=num_buffers)
    graph_def = graph.as_graph_def()
    nodes = [
        *graph_def.node,
        *(n for f in graph_def.library.function for n in f.node_def),
    ]
    reads = [node.op for node in nodes if "Resource" in node.op or "ReadVar" in node.op]
    assert set(reads) == {"ReadVariableOp", "ResourceApplyGradientDescent"}


@pytest.mark.slow
def test_it_works_in_a_monitored_session_whose_graph_is_final():
    optimizer = make(num_buffers=2)
    hook = v1.train.StopAtStepHook(num_steps=10**6)
    v1.train.create_global_step()
    config = session_config(num_cpus=NUM_CPUS)
    with v1.train.MonitoredTrainingSession(hooks=[hook], config=config) as sess:
        assert optimizer.load_data(sess, [X], []) == 8
        assert set(optimizer.optimize(sess, 4)) == {"train", "towers"}
        assert optimizer.run_epochs(sess, 2, "rows").losses.shape == (2, 2)
        optimizer.load_next(sess, [X], [])
        assert optimizer.use_next() == 8


class Fetching(Loss):
    """Also feeds a rate and fetches what it sees."""

    def __init__(self, inputs):
        super().__init__(inputs)
        self.rate = v1.placeholder(tf.float32, [])
        self.value = 0.0
        self.loss = self.loss * self.rate

    def extra_compute_grad_feed_dict(self):
        return {self.rate: self.value}

    def extra_compute_grad_fetches(self):
        return {
            "rows": self.inputs[0],
            "stats": {"rate": self.rate, "count": tf.size(self.inputs[0])},
        }


def test_fetches_come_back_and_values_are_fed_anew_in_every_call():
    optimizer = make(Fetching)
    losses = optimizer.get_device_losses()
    for k, loss in enumerate(losses):
        loss.value = 2.0 + k
    with session() as sess:
        optimizer.load_data(sess, [X], [])
        got = optimizer.optimize(sess, 4)
        sess.run(v1.global_variables_initializer())
        for rate in (0.0, 1.0):
            for loss in losses:
                loss.value = rate
            assert optimizer.optimize(sess, 0)["stats"]["rate"] == rate
            result = optimizer.run_epochs(sess, 1)
            np.testing.assert_array_equal(result.fetches["stats/rate"], rate)
            np.testing.assert_array_equal(result.fetches["stats/count"], 8)
            moved = sess.run(optimizer.get_common_loss().w).any()
            assert moved == bool(rate)
        losses[1].value = [1.0, 2.0]
        with pytest.raises(ValueError, match=r"takes values of shape \(\); got shape"):
            optimizer.optimize(sess, 0)
    assert set(got) == {"train", "rows", "stats", "towers"}
    assert got["train"] is None
    np.testing.assert_array_equal(got["towers"][0]["rows"], X[4:8])
    np.testing.assert_array_equal(got["towers"][1]["rows"], X[12:16])
    np.testing.assert_array_equal(got["rows"], X[12:16])
    assert got["stats"] == {"rate": 3.0, "count": 8}
    assert got["towers"][0]["stats"] == {"rate": 2.0, "count": 8}


class OfLaterVersions(Loss):
    """A policy as RLlib has them since it clips gradients."""

    def gradients(self, optimizer, loss):
        assert loss is self._loss
        return optimizer.compute_gradients(loss)

    def __init__(self, inputs):
        super().__init__(inputs)
        self._loss = self.loss
        self.loss = lambda model, batch: None  # a method there

    def extra_compute_grad_fetches(self):
        return {"learner_stats": {}, "td_error": tf.size(self.inputs[0])}

    def _get_grad_and_stats_fetches(self):
        stats = {"total_loss": self._loss, "model": {}}
        return {**self.extra_compute_grad_fetches(), "learner_stats": stats}


def test_a_policy_of_rllib_as_it_is_gets_its_loss_and_gives_its_statistics():
    optimizer = make(OfLaterVersions)
    with session() as sess:
        optimizer.load_data(sess, [X], [])
        wanted = [np.mean(np.square(X[rows])) for rows in (slice(4), slice(8, 12))]
        got = optimizer.optimize(sess, 0)
        for k, loss in enumerate(wanted):
            assert got["towers"][k] == {
                "td_error": 8,
                "learner_stats": {"total_loss": np.float32(loss), "model": {}},
            }
        assert got["learner_stats"]["total_loss"] == np.float32(wanted[1])
        result = optimizer.run_epochs(sess, 1)
        total = result.towers[1]["learner_stats/total_loss"]
        np.testing.assert_array_equal(total, result.tower_losses[..., 1])


class Counting(Loss):
    """Has an update operation, as batch norm has."""

    def __init__(self, inputs):
        super().__init__(inputs)
        count = v1.get_variable("count", initializer=0.0, trainable=False)
        update = count.assign_add(tf.reduce_sum(inputs[0]))
        v1.add_to_collection(v1.GraphKeys.UPDATE_OPS, update)


@pytest.mark.parametrize("scope", ["", "policy"])
def test_the_towers_update_operations_run_and_the_common_one_does_not(scope):
    before = v1.get_variable("before", initializer=0.0)
    update = before.assign_add(1.0)
    v1.add_to_collection(v1.GraphKeys.UPDATE_OPS, update)
    with v1.variable_scope(scope):
        optimizer = make(Counting)
    count = next(v for v in v1.global_variables() if "count" in v.op.name)
    with session() as sess:
        optimizer.load_data(sess, [X], [])
        optimizer.optimize(sess, 0)
        assert sess.run(count) == X[[*range(4), *range(8, 12)]].sum()
        optimizer.run_epochs(sess, 1)
        assert sess.run(count) == X[[*range(4), *range(8, 12)]].sum() + X.sum()
        assert sess.run(before) == 0


def test_operations_among_the_fetches_run_in_every_step():
    class Ticking(Loss):
        def extra_compute_grad_fetches(self):
            ticks = v1.get_variable("ticks", initializer=0.0, trainable=False)
            return {"tick": ticks.assign_add(1.0).op, "train": tf.constant(7)}

    optimizer = make(Ticking, devices=1)
    ticks = next(v for v in v1.global_variables() if "ticks" in v.op.name)
    with session() as sess:
        optimizer.load_data(sess, [X], [])
        # A fetch called train does not keep the step from running.
        assert optimizer.optimize(sess, 0)["train"] is None
        assert sess.run(optimizer.get_common_loss().w).any()
        optimizer.run_epochs(sess, 2)
        assert sess.run(ticks) == 9


def test_towers_that_get_the_same_tensors_are_clipped_once(graph):
    one_place = partial(sum_on_device, device="/cpu:0")
    for reducer, times in ((one_place, 1), (None, 2)):
        before = len(norms(graph))
        make(reducer=reducer, clipping=1.0)
        assert len(norms(graph)) - before == times


def norms(graph):
    named = re.compile("clip_by_global_norm(_[0-9]+)?/Minimum")
    return [op for op in graph.get_operations() if named.fullmatch(op.name)]


def test_a_graph_takes_a_second_one_also_after_a_build_that_failed():
    def fail(inputs):
        Loss(inputs)
        raise OSError("the second tower is not to be had")

    with pytest.raises(OSError, match="not to be had"):
        make(fail)
    with v1.variable_scope("", reuse=v1.AUTO_REUSE):
        made = [make(), make()]
    with session() as sess:
        for optimizer in made:
            optimizer.load_data(sess, [X], [])
            optimizer.run_epochs(sess, 1)
        assert sess.run(made[0].get_common_loss().w).any()


def test_epochs_without_a_loss_to_report_are_refused_and_steps_are_not():
    class Silent:
        def __init__(self, inputs):
            self.hidden = Loss(inputs)

        def gradients(self, optimizer):
            return self.hidden.gradients(optimizer)

    optimizer = make(Silent)
    with session() as sess:
        optimizer.load_data(sess, [X], [])
        optimizer.optimize(sess, 0)
        with pytest.raises(RuntimeError, match="must have a scalar tensor `loss`"):
            optimizer.run_epochs(sess, 1)


def test_rows_are_not_trained_on_after_a_load_that_a_session_refused():
    optimizer = make()
    with session() as sess:
        optimizer.load_data(sess, [X], [])
        few = v1.Session(config=session_config(num_cpus=1))
        with few, pytest.raises(ValueError, match=r"Unknown .*cpu:1"):
            optimizer.load_data(few, [X + 1], [])
        assert optimizer.report is None
        with pytest.raises(RuntimeError, match="the last load was refused"):
            optimizer.optimize(sess, 0)
        optimizer.load_data(sess, [X], [])
        optimizer.optimize(sess, 0)


def test_the_step_may_hold_random_operations_and_functions():
    """What is copied into the loop: stateful operations, branches, functions."""

    class Mixed(Loss):
        def __init__(self, inputs):
            super().__init__(inputs)
            masked = tf.nn.dropout(inputs[0], 0.5, seed=1)
            branch = tf.cond(
                tf.reduce_sum(inputs[0]) > 0.0, lambda: masked, lambda: -masked
            )
            called = tf.function(lambda t: tf.reduce_sum(t**2))(branch - self.w)
            with tf.control_dependencies([called]):
                self.loss = tf.identity(called)

    optimizer = make(Mixed)
    with session() as sess:
        optimizer.load_data(sess, [np.ones((16, 2), np.float32)], [])
        result = optimizer.run_epochs(sess, 20)
    assert np.isfinite(result.losses).all()
    assert len(np.unique(result.tower_losses)) > 20  # another mask each time


class ReadsTwice:
    """A loss that reads ``c`` for ``b``'s gradient alone, long after the others."""

    def __init__(self, inputs):
        self.b = v1.get_variable("b", initializer=np.float32([1, 2, 3]))
        self.c = v1.get_variable("c", initializer=np.float32(2))
        self.d = v1.get_variable("d", initializer=np.float32(4))

        def wait(value):
            time.sleep(0.2)
            return value

        waited = tf.numpy_function(wait, [tf.zeros([])], tf.float32)
        with tf.control_dependencies([waited]):
            late_c, late_d = self.c.read_value(), self.d.read_value()
        loss = tf.reduce_sum(self.b**2) * late_c + self.c.read_value() ** 2
        # No gradient needs d: only the loss, which run_epochs reports, reads it.
        self.loss = loss + late_d + 0 * tf.reduce_sum(inputs[0])

    def gradients(self, optimizer):
        return optimizer.compute_gradients(self.loss, [self.b, self.c, self.d])


def apply_in_each(made, grads, variables, optimizer):
    """Waits for no gradient but each variable's own."""
    towers = zip(grads, variables, strict=True)
    pairs = [pair for own in towers for pair in zip(*own, strict=True)]
    return optimizer.apply_gradients(pairs)


@pytest.mark.parametrize("apply_fn", [None, apply_in_each])
def test_gradients_and_losses_are_read_before_an_update(apply_fn):
    def separately(grads):
        return [[tf.add_n(column) for column in zip(*grads, strict=True)]] * len(grads)

    optimizer = make(
        ReadsTwice, optimizer=descent(0.125), reducer=separately, apply_fn=apply_fn
    )
    with session() as sess:
        sess.run(v1.local_variables_initializer())
        optimizer.load_data(sess, [X[:8]], [])
        result = optimizer.run_epochs(sess, 1)
        for loss in optimizer.get_device_losses():
            b, c, d = sess.run([loss.b, loss.c, loss.d])
            np.testing.assert_array_equal(b, [0.5, 1, 1.5])
            assert (c, d) == (2 - 0.125 * (14 + 4), 4 - 0.125)
    np.testing.assert_array_equal(result.losses, [[36]])
