"""Towers are made from devices, and a function runs once on each."""

from dataclasses import FrozenInstanceError

import numpy as np
import pytest
import tensorflow as tf

from tw_core import map_towers, towers
from tw_core.devices import canonical_device
from tw_core.testing import run_eagerly, run_in_function, run_in_graph


def test_towers_are_of_devices_or_all_of_one_call_and_several_may_share_one(caplog):
    own = "/job:worker/task:1/gpu:0"
    made = towers([1, "/cpu:0", own, np.int64(3)])
    assert [t.device for t in made] == ["/gpu:1", "/cpu:0", own, "/gpu:3"]
    assert [t.index for t in made] == [0, 1, 2, 3]
    assert {t.total for t in made} == {4}
    assert [t.name for t in made[:2]] == ["tower0", "tower1"]
    assert [t.is_main for t in made[:2]] == [True, False]
    assert [t.device for t in towers(range(2))] == ["/gpu:0", "/gpu:1"]
    with pytest.raises(FrozenInstanceError):
        made[0].index = 1
    assert len(towers(["/cpu:0", "/cpu:1"])) == 2
    assert caplog.messages == []
    assert len(towers(["/cpu:0", "/device:CPU:0", "/cpu:1"])) == 3
    assert caplog.messages == [
        "towers: several towers on one device: /device:CPU:0 (2 towers)"
    ]
    made = towers(["/cpu:0", "/cpu:1"])
    assert towers(made) == towers(list(made)) == made
    for pick in [(0,), (1, 0), (0, 0), (0, 1, 1)]:
        with pytest.raises(ValueError, match="towers must be all that one call of tw_"):
            towers([made[k] for k in pick])
    with pytest.raises(TypeError, match="or only towers; got"):
        towers([*made, "/cpu:1"])


@pytest.mark.parametrize("run", [run_in_graph, run_in_function, run_eagerly])
@pytest.mark.parametrize("num_towers", [1, 2, 4])
def test_each_tower_gets_its_item_of_every_sequence(run, num_towers):
    made = towers([f"/cpu:{k}" for k in range(num_towers)])
    x = [np.full([2], k, np.float32) for k in range(num_towers)]
    y = [np.float32(10 * k) for k in range(num_towers)]
    got = run(
        lambda x, y: map_towers(lambda t, x, y: x + y + t.index, made, x, y), x, y
    )
    np.testing.assert_array_equal(got, [[12.0 * k] * 2 for k in range(num_towers)])


@pytest.mark.parametrize("run", [run_in_graph, run_in_function])
def test_ops_lie_on_the_towers_device_under_its_name(run):
    made = towers(["/cpu:2", "/cpu:5"])
    seen = []

    def build(x):
        def add(tower):
            y = x + 1.0
            seen.append((tower.name, y.name, canonical_device(y.device)))
            return y

        with tf.name_scope("model"):
            return map_towers(add, made)

    run(build, np.float32(1))
    assert seen[:2] == [
        ("tower0", "model/tower0/add:0", "/device:CPU:2"),
        ("tower1", "model/tower1/add:0", "/device:CPU:5"),
    ]
    eager = map_towers(lambda _: tf.constant(1.0) + 1.0, made)
    assert [canonical_device(x.device)[-1] for x in eager] == ["2", "5"]


UNKNOWN = r"Unknown devices \['/cpu:99'\]"


@pytest.mark.parametrize("run", [run_eagerly, run_in_function])
def test_an_unknown_device_is_refused_before_anything_is_built(run):
    called = []
    made = towers(["/cpu:0", "/cpu:99"])
    with pytest.raises(ValueError, match=UNKNOWN):
        run(lambda: map_towers(called.append, made))
    assert called == []


def test_a_session_graph_checks_devices_where_its_session_is_at_hand(graph):
    made = towers(["/cpu:0", "/cpu:99"])

    def build():
        return map_towers(lambda t: t.index, made)

    assert build() == [0, 1]
    with tf.compat.v1.Session():
        for call in (build, tf.function(build, autograph=False)):
            with pytest.raises(ValueError, match=UNKNOWN):
                call()
        with tf.Graph().as_default():  # will run in another session
            assert build() == [0, 1]
