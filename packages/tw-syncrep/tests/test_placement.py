"""Variables go to the servers by their bytes, in every task alike."""

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

import tw_core
import tw_launch
import tw_syncrep
from tw_core.devices import LeastLoadedTask

v1 = tf.compat.v1
DTYPES = [tf.float32, tf.float64, tf.bfloat16, tf.int64, tf.bool, tf.uint8]


def task(ps, job="worker", index=0):
    servers = tuple(f"s:{n + 1}" for n in range(ps))
    return tw_launch.TaskConfig({"ps": servers, "worker": ("w:1", "w:2")}, job, index)


def servers_of(device, made):
    """Makes variables of (shape, dtype) under a device function; their servers."""
    with tf.Graph().as_default(), v1.device(device):
        variables = [make(f"v{n}", *one) for n, one in enumerate(made)]
    return [server_of(variable) for variable in variables]


def make(name, shape, dtype):
    """Makes a variable; None in its shape, or for it, stands for what is unknown."""
    if shape is not None and None not in shape:
        return v1.get_variable(name, shape, dtype, v1.zeros_initializer())
    known = [2 if size is None else size for size in shape or ()]
    value = tf.zeros(known, dtype)
    return tf.Variable(value, shape=tf.TensorShape(shape), name=name)


def server_of(variable):
    return tf.DeviceSpec.from_string(variable.device).task


def floats(*sizes):
    return [((size,), tf.float32) for size in sizes]


SHAPES = st.one_of(
    st.none(), st.lists(st.none() | st.integers(0, 40), max_size=3).map(tuple)
)
MADE = st.lists(st.tuples(SHAPES, st.sampled_from(DTYPES)), max_size=12)


@pytest.mark.slow
@given(made=MADE, ps=st.integers(1, 4))
@settings(max_examples=40)
def test_servers_that_are_alike_get_what_the_least_loaded_task_gives(made, ps):
    theirs = tw_core.replica_device_setter(ps, ps_strategy=LeastLoadedTask(ps))
    want = servers_of(theirs, made)
    assert servers_of(tw_syncrep.device_setter(task(ps)), made) == want
    alike = tw_syncrep.device_setter(task(ps), capacities=[2.5] * ps)
    assert servers_of(alike, made) == want


@given(
    sizes=st.lists(st.integers(0, 1000), min_size=1, max_size=20),
    capacities=st.lists(st.integers(1, 50), min_size=1, max_size=4),
)
@settings(max_examples=60)
def test_no_server_is_fuller_than_another_with_one_more(sizes, capacities):
    setter = tw_syncrep.device_setter(task(len(capacities)), capacities=capacities)
    loads = np.zeros(len(capacities))
    places = servers_of(setter, floats(*sizes))
    np.add.at(loads, places, 4 * np.array(sizes))
    largest = 4 * max(sizes)
    for n, has in enumerate(loads):
        others = np.delete(loads, n), np.delete(capacities, n)
        assert (has / capacities[n] <= (others[0] + largest) / others[1] + 1e-9).all()


def test_servers_in_turn_are_tensorflows_or_a_function_chooses():
    theirs = v1.train.replica_device_setter(3)
    made = floats(100, 1, 1, 1, 7)
    setter = tw_syncrep.device_setter(task(3), strategy="round_robin")
    assert servers_of(setter, made) == servers_of(theirs, made) == [0, 1, 2, 0, 1]
    setter = tw_syncrep.device_setter(task(3), strategy=lambda op: np.int64(2))
    assert servers_of(setter, floats(100, 1)) == [2, 2]


def test_without_servers_there_is_no_setter():
    alone = tw_launch.TaskConfig({"worker": ("w:1",)}, "worker", 0)
    assert tw_syncrep.device_setter(alone) is None
    assert tw_syncrep.device_setter(alone, capacities=[]) is None
    assert tw_syncrep.device_setter(alone, strategy=lambda op: 0) is None


def test_copies_on_the_worker_move_nothing_and_all_tasks_place_alike():
    made = floats(100, 60, 30, 20, 50)
    want = servers_of(tw_syncrep.device_setter(task(2)), made)
    for index in (0, 1):
        own = task(2, index=index)
        with tw_syncrep.pulled_together(own), tf.Graph().as_default():
            assert servers_of(tw_syncrep.device_setter(own), made) == want


def test_slots_count_for_the_server_of_their_variable_and_a_table_counts_nothing():
    with tf.Graph().as_default(), v1.device(tw_syncrep.device_setter(task(2))):
        big = v1.get_variable("big", [100])
        optimizer = v1.train.MomentumOptimizer(0.1, 0.9)
        optimizer.apply_gradients([(tf.ones([100]), big)])
        table = tf.lookup.experimental.MutableHashTable(tf.string, tf.int64, -1)
        rest = [v1.get_variable(f"v{n}", [size]) for n, size in enumerate([199, 10])]
    slot = optimizer.get_slot(big, "momentum")
    places = big, slot, table.resource_handle, *rest
    assert [server_of(v) for v in places] == [0, 0, 1, 1, 1]
