"""Sums keep their AddN, and so their bits, where TensorFlow would rewrite them.

The memory pass acts when it believes a device's memory to be four fifths used;
a CPU device claims 256 MB. Each test shows first that a plain AddN of the same
size is rewritten: else it would prove nothing.
"""

from collections import Counter
from functools import partial

import numpy as np
import pytest
import tensorflow as tf

from tw_core.testing import CPUS
from tw_reduce import (
    auto,
    hierarchical,
    packed,
    sum_balanced,
    sum_on_device,
    sum_round_robin,
)
from tw_reduce.tensorpack import aggregate_grads_colocate, allreduce_grads_naive

LARGE = 16_000_000  # float32: four of them fill a device


def on_first(grads):
    return sum_on_device(grads, device=CPUS[0])


# All add on the first device, where all towers' gradients are made.
OURS = {
    "sum_on_device": on_first,
    "sum_round_robin": partial(sum_round_robin, devices=CPUS[:1]),
    "sum_balanced": partial(sum_balanced, devices=CPUS[:1]),
    "hierarchical": hierarchical([[0, 1, 2, 3]], devices=CPUS[:1] * 4),
    "packed": packed(on_first, below_bytes=4 * (LARGE + 1)),
    "auto": auto(CPUS[:1] * 4),
    "naive": lambda grads: [allreduce_grads_naive(grads, average=False)],
}


def plain(grads):
    return [[tf.raw_ops.AddN(inputs=column) for column in zip(*grads, strict=True)]]


def two_by_two(grads):
    first, *others = [tower[0] for tower in grads]
    for other in others:
        first = first + other
    return [[first]]


def inputs(factor):
    with tf.device(CPUS[0]):
        return [[tf.fill([LARGE], factor * k)] for k in (1.0, 2.0, 3.0, 4.0)]


def ops_in_session(reducer):
    """Sums once in a session; returns the result's head and the optimised graph."""
    with tf.Graph().as_default():
        factor = tf.compat.v1.placeholder(tf.float32, [])
        head = reducer(inputs(factor))[0][0][:3]
        metadata = tf.compat.v1.RunMetadata()
        config = tf.compat.v1.ConfigProto(device_count={"CPU": len(CPUS)})
        options = tf.compat.v1.RunOptions(output_partition_graphs=True)
        with tf.compat.v1.Session(config=config) as session:
            value = session.run(head, {factor: 1.0}, options, metadata)
    graphs = metadata.partition_graphs
    return value, Counter(node.op for graph in graphs for node in graph.node)


def ops_in_function(reducer, tmp_path):
    """The same in a tf.function, whose graph the summary writer records.

    What other functions of the process run meanwhile is recorded too: the name of the
    argument tells ours.
    """

    @tf.function(autograph=False)
    def fn(factor_of_columns):
        return reducer(inputs(factor_of_columns))[0][0][:3]

    folder = tmp_path / str(len(list(tmp_path.iterdir())))
    writer = tf.summary.create_file_writer(str(folder))
    with writer.as_default():
        tf.summary.trace_on(graph=True)
        value = fn(tf.constant(1.0))
        tf.summary.trace_export("ops", step=0)
    writer.close()
    return value.numpy(), Counter(
        node.op
        for record in tf.data.TFRecordDataset(list(map(str, folder.iterdir())))
        for value in tf.compat.v1.Event.FromString(record.numpy()).summary.value
        for traced in metadata_of(value).function_graphs
        if "factor_of_columns" in {n.name for n in traced.pre_optimization_graph.node}
        for node in traced.post_optimization_graph.node
    )


def metadata_of(value):
    return tf.compat.v1.RunMetadata.FromString(value.tensor.string_val[0])


@pytest.fixture(params=["session", "function"])
def optimised(request, tmp_path):
    """Runs a reducer, and counts the operations that TensorFlow made of it."""
    if request.param == "session":
        return ops_in_session
    return partial(ops_in_function, tmp_path=tmp_path)


@pytest.mark.parametrize("written", [plain, two_by_two])
def test_sums_written_plainly_are_rewritten(optimised, written):
    _, ops = optimised(written)
    assert ops["TemporaryVariable"] == 1
    assert ops["AssignAdd"] == 4
    assert ops["AddN"] == 0


@pytest.mark.parametrize("name", OURS)
def test_our_sums_are_not(optimised, name):
    value, ops = optimised(OURS[name])
    np.testing.assert_array_equal(value, [10, 10, 10])
    assert ops["TemporaryVariable"] == ops["AssignAdd"] == 0
    assert ops["AddN"] == 1


def test_sums_at_a_variables_device_are_not_rewritten(optimised):
    variables = [tf.Variable(1.0, shape=tf.TensorShape(None))]

    def reducer(grads):
        pairs = [list(zip(tower, variables, strict=True)) for tower in grads]
        return [[grad for grad, _ in aggregate_grads_colocate(pairs, average=False)]]

    _, ops = optimised(reducer)
    assert ops["TemporaryVariable"] == 0
    assert ops["AddN"] == 1


def test_adds_before_and_after_a_sum_of_two_are_not_drawn_into_it(optimised):
    # Left to itself, TensorFlow makes one AddN of neighbouring adds, and of three
    # inputs and more it makes accumulations.
    def neighbours(add):
        def reducer(grads):
            a, b, c, d = (tower[0] for tower in grads)
            with tf.device(CPUS[0]):
                return [[add([[a + b], [c]])[0][0] + d]]

        return reducer

    _, ops = optimised(neighbours(plain))
    assert ops["TemporaryVariable"] == 1
    value, ops = optimised(neighbours(on_first))
    np.testing.assert_array_equal(value, [10, 10, 10])
    assert ops["TemporaryVariable"] == 0
