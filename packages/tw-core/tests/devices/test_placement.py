"""What lives on which device of a graph, and what moves between devices."""

from collections import Counter

import keras
import tensorflow as tf

from tw_core import map_towers, placement, replicate, towers
from tw_core.devices import Placement, Transfer, canonical_device
from tw_core.testing import NUM_CPUS

v1 = tf.compat.v1
CPU0, CPU1, CPU2 = (f"/device:CPU:{i}" for i in range(3))


def two_device_graph():
    """A variable on device 1, used on device 2, and the loss on device 1 again."""
    with tf.device("/cpu:1"), v1.variable_scope("layer"):
        w = v1.get_variable("w", [3, 4], initializer=v1.ones_initializer())
    with tf.device("/cpu:2"):
        x = v1.placeholder(tf.float32, [2, 3])
        y = x @ w
        z = tf.nn.relu(y)
    with tf.device("/job:localhost/replica:0/task:0/device:CPU:1"):
        loss = tf.reduce_sum(z + y)
    return w, loss


def test_variables_and_transfers_are_told_by_device_with_their_bytes(graph):
    _, loss = two_device_graph()
    with tf.device("/cpu:2"):
        v1.get_variable("b", [10], tf.float64)
    placed = placement(graph, fetches=[loss])
    assert placed.variables == {CPU1: {"layer/w": 48}, CPU2: {"b": 80}}
    assert placed.bytes_on == {CPU1: 48, CPU2: 80}
    assert placed.transfers == (
        Transfer(CPU1, CPU2, tensors=1, num_bytes=48),  # the variable's value
        Transfer(CPU2, CPU1, tensors=2, num_bytes=2 * 32),  # y and z
    )
    # Read, add, sum; multiply, relu.
    assert placed.operations == {CPU1: 3, CPU2: 2}


def test_device_10_follows_device_2(graph):
    for number in (10, 2):
        with tf.device(f"/cpu:{number}"):
            w = v1.get_variable(f"w{number}", [number])
        with tf.device("/cpu:1"):
            tf.exp(w)
    placed, later = placement(graph), ["/device:CPU:2", "/device:CPU:10"]
    assert list(placed.variables) == later
    assert list(filter(None, placed.operations)) == ["/device:CPU:1", *later]
    assert [moved.source for moved in placed.transfers] == later


def test_a_tensor_moves_once_to_a_device_and_a_constant_not_at_all(graph):
    assert placement(graph) == Placement(variables={}, operations={}, transfers=())
    assert placement(graph).bytes_on == {}
    with tf.device("/cpu:1"):
        x, unknown = tf.random.uniform([5]), v1.placeholder(tf.float32, [None]) + 1.0
        constant = tf.constant([1.0, 2.0])
    with tf.device("/cpu:2"):
        tf.exp(x), tf.sin(x), tf.exp(unknown), tf.exp(constant)
    with tf.device("/cpu:0"):
        tf.exp(x)
    tf.exp(x)  # on no device
    placed = placement(graph)
    assert placed.transfers == (
        Transfer(CPU1, CPU0, tensors=1, num_bytes=20),
        Transfer(CPU1, CPU2, tensors=2, num_bytes=20),  # no bytes of the unknown
    )
    assert placed.operations[""] == 1


def test_an_op_on_a_variable_counts_where_the_variable_is_but_for_conditions(graph):
    with tf.device("/cpu:1"):
        w = v1.get_variable("w", [3])
    with tf.device("/cpu:2"):
        update = w.assign_add(tf.exp(tf.zeros([3])), read_value=False)
        rows = tf.gather(w, [0])
        maybe = tf.less(tf.random.uniform([]), 0.5)
        out = tf.cond(maybe, lambda: w + 1.0, lambda: w - 1.0)
    # Assign and gather; exp.
    assert placement(graph, fetches=[update, rows]).operations == {CPU1: 2, CPU2: 1}
    assert set(placement(graph, fetches=[out]).operations) == {CPU2}


def test_fetches_leave_initialisers_and_savers_out(graph):
    w, loss = two_device_graph()
    v1.train.Saver()
    everything, step = placement(graph), placement(graph, fetches=[loss, loss.op])
    assert sum(everything.operations.values()) > sum(step.operations.values())
    assert everything.variables == step.variables
    with tf.control_dependencies([loss]):
        needs_control = tf.no_op()
    assert placement(graph, fetches=[needs_control]).operations == step.operations
    assert placement(graph, fetches=[w]).transfers == ()


# Of a function.


class Model(tf.Module):
    """A weight and a counter that is not trained."""

    def __init__(self, tower=None):
        super().__init__()
        self.w = tf.Variable(tf.ones([3, 4]), name="w")
        self.steps = tf.Variable(0.0, trainable=False, name="steps")


def function_graph(replicas, made):
    @tf.function(autograph=False)
    def step(x):
        def in_tower(tower, model):
            model.steps.assign_add(1.0, read_value=False)
            return tf.reduce_sum(x @ model.w)

        losses = map_towers(in_tower, made, replicas)
        with tf.device("/cpu:0"):
            return tf.add_n(losses)

    return step.get_concrete_function(tf.TensorSpec([2, 3])).graph


def test_a_functions_variables_are_those_it_reads_on_their_devices():
    made = towers(["/cpu:1", "/cpu:2"])
    replicas = replicate(made, Model)
    graph = function_graph(replicas, made)
    variables = [v for model in replicas for v in model.variables]
    named = placement(graph, variables=variables)  # that the graph does not know
    assert named.variables == {d: {"w": 48, "steps": 4} for d in (CPU1, CPU2)}
    placed = placement(graph)
    assert placed.variables == {CPU1: {"w": 48}, CPU2: {"w": 48}}
    assert placed.transfers == (Transfer(CPU1, CPU0, 1, 4), Transfer(CPU2, CPU0, 1, 4))
    # Read, add one, multiply, sum in each tower.
    assert placed.operations[CPU1] == placed.operations[CPU2] == 4


def test_variables_of_one_name_on_a_device_are_all_listed():
    made = towers(["/cpu:1", "/cpu:1", "/cpu:1"])
    replicas = replicate(made, Model)
    placed = placement(function_graph(replicas, made))
    assert placed.variables == {CPU1: {"w": 48, "w#2": 48, "w#3": 48}}


def test_variables_of_keras_and_of_the_graph_around_a_function_are_listed(graph):
    with tf.device("/cpu:1"):
        w = v1.get_variable("w", [3])
    inner = tf.function(lambda: w + 1.0, autograph=False).get_concrete_function().graph
    assert placement(inner).variables == {CPU1: {"w": 12}}
    with tf.device("/cpu:2"):
        model = keras.Sequential([keras.Input([3]), keras.layers.Dense(4, name="out")])
    graph = tf.function(model).get_concrete_function(tf.TensorSpec([2, 3])).graph
    (sizes,) = placement(graph, variables=model.variables).variables.values()
    assert sorted(sizes.values()) == [16, 48]
    assert all("out/" in name for name in sizes)


# Compared with what TensorFlow makes of the graph.


def sends(fetch, feeds, init):
    """Counts what TensorFlow sends between devices in a run: (source, target) -> n."""
    config = v1.ConfigProto(device_count={"CPU": NUM_CPUS})
    config.graph_options.rewrite_options.disable_meta_optimizer = True
    metadata = v1.RunMetadata()
    options = v1.RunOptions(output_partition_graphs=True)
    with v1.Session(config=config) as sess:
        sess.run(init)
        sess.run(fetch, feeds, options=options, run_metadata=metadata)
    ends = [
        [
            canonical_device(node.attr[end].s.decode())
            for end in ("send_device", "recv_device")
        ]
        for part in metadata.partition_graphs
        for node in part.node
        if node.op == "_Send"
    ]
    return Counter((source, target) for source, target in ends)


def test_transfers_are_the_sends_that_tensorflow_makes(graph):
    made = towers(["/cpu:1", "/cpu:2", "/cpu:3"])
    with tf.device("/cpu:4"):
        w = v1.get_variable("w", [3, 4], initializer=v1.ones_initializer())
        x = tf.random.stateless_uniform([2, 3], [1, 2])

    def in_tower(tower):
        y = tf.matmul(x, w) * (tower.index + 1.0)
        return tf.reduce_sum(tf.nn.relu(y) + y)

    losses = map_towers(in_tower, made)
    with tf.device("/cpu:5"):
        update = w.assign_add(tf.add_n(losses) * tf.ones([3, 4]), read_value=False)
    counted = {
        (t.source, t.target): t.tensors
        for t in placement(graph, fetches=[update]).transfers
    }
    assert sends(update, {}, w.initializer) == counted
    assert len(counted) == 3 + 3 + 1
