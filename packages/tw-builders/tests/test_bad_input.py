"""What builders refuse, and how they say it."""

from functools import partial

import pytest
import tensorflow as tf
from session_builders import BUILDERS, pairs_of

from tw_builders import apply_gradients, make_optimizers
from tw_core import towers
from tw_core.testing import CPUS

v1 = tf.compat.v1
TWO = list(CPUS[:2])
each_builder = pytest.mark.parametrize("make", BUILDERS.values(), ids=BUILDERS)
descend = partial(v1.train.GradientDescentOptimizer, 0.1)


def tower_pairs():
    w = v1.get_variable("w", [2])
    return pairs_of(tf.reduce_sum(w**2), [w])


@each_builder
def test_several_towers_may_share_a_device_that_is_there(make, caplog):
    with tf.Graph().as_default():
        built = make(["/cpu:1", "/cpu:1"])
        grads = built.call_for_each_tower(tower_pairs)
        assert built.build(grads, descend) is not None
    assert "several towers on one device: /device:CPU:1 (2 towers)" in caplog.text
    with (
        tf.Graph().as_default(),
        v1.Session(config=v1.ConfigProto(device_count={"CPU": 2})),
        pytest.raises(ValueError, match=r"Unknown devices \['/cpu:5'\].*CPU:1"),
    ):
        make(["/cpu:0", "/cpu:5"]).call_for_each_tower(tower_pairs)


@each_builder
def test_what_is_not_a_session_graph_is_refused(make):
    def in_towers():
        make(TWO).call_for_each_tower(tower_pairs)

    for build in (in_towers, lambda: make(TWO).build([[], []], descend)):
        with pytest.raises(RuntimeError, match="session graph; got eager mode"):
            build()
    with pytest.raises(RuntimeError, match="session graph"):
        tf.function(in_towers)()


def test_towers_on_devices_that_are_not_there_are_refused():
    ours = towers(["/cpu:0", "/cpu:99"])
    with pytest.raises(ValueError, match=r"Unknown devices .*cpu:99"):
        apply_gradients(ours, [[], []], [[], []], [descend(), descend()])
    with pytest.raises(ValueError, match=r"Unknown devices .*cpu:99"):
        make_optimizers(ours, descend)
