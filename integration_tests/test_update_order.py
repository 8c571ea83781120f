"""No update of a session graph begins before all gradients are there.

A loss may read a variable twice, where one read is for another variable's gradient
alone. TensorFlow lets the update overtake that read: rarely, in a session's first step.
Here such reads are slow, so that an update that can overtake one does; and in the
graphs of random losses every read and every write of a variable must be ordered.
"""

import time
from collections import defaultdict
from functools import partial

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import tw_ampopt
import tw_builders
import tw_horovod as hvd
from tw_core.testing import CPUS

pytestmark = pytest.mark.slow

v1 = tf.compat.v1
TOWERS, RATE = 2, 0.125
# Too large a variable for a pack, which would have gradients wait for each other.
START = {"b": np.full([20_000], 1 / 128, np.float32), "c": np.float32(2.0)}
# sum(b**2) * c + c * c, by hand.
STEPPED = {
    "b": START["b"] - RATE * 2 * START["b"] * START["c"],
    "c": START["c"] - RATE * (np.sum(START["b"] ** 2) + 2 * START["c"]),
}


def sgd():
    return v1.train.GradientDescentOptimizer(RATE)


def slow_read(variable):
    """Reads a variable long after the others have been read."""

    def wait():
        time.sleep(0.2)
        return np.float32(0.0)

    waited = tf.numpy_function(wait, [], tf.float32)
    waited.set_shape([])
    with tf.control_dependencies([waited]):
        return variable.read_value()


def loss_of(b, c, read=slow_read):
    # Of the reads of c the first is for b's gradient alone.
    return tf.reduce_sum(b.read_value() ** 2) * read(c) + c.read_value() ** 2


def make_variables():
    return [v1.get_variable(name, initializer=start) for name, start in START.items()]


def pairs_of(variables, loss):
    return list(zip(tf.gradients(loss, variables), variables, strict=True))


def built_by(make_builder, *, build="build", make=sgd, **options):
    """Returns a function that builds a step of a loss of variables."""

    def step_of(variables_of, loss_of):
        builder = make_builder(CPUS[:TOWERS])

        def tower():
            variables = variables_of()
            return pairs_of(variables, loss_of(*variables))

        grads = builder.call_for_each_tower(tower)
        built = getattr(builder, build)(grads, make, **options)
        step, *sync = built if isinstance(built, tuple) else (built,)
        return step, sync, [[v for _, v in own] for own in grads]

    return step_of


def ampopt_step(variables_of, loss_of, **options):
    options = {"tf_optimizer": v1.train.GradientDescentOptimizer, **options}
    optimizer = tw_ampopt.Optimizer(learning_rate=RATE, **options)
    towers = []

    def tower():
        variables = variables_of()
        towers.append(variables)
        optimizer.register_gradients(loss_of(*variables), variables)

    tw_builders.DataParallelBuilder.call_for_each_tower(
        CPUS[:TOWERS], tower, use_vs=[k > 0 for k in range(TOWERS)]
    )
    return optimizer.apply_updates(), [optimizer.copy_to_replicas()], towers


def wrapped_step(wrap, variables_of, loss_of):
    """A step on one device, of an optimizer that is wrapped."""
    with tf.device(CPUS[1]):
        variables = variables_of()
        optimizer = wrap()
        grads = optimizer.compute_gradients(loss_of(*variables), variables)
        return optimizer.apply_gradients(grads), [], [variables]


def horovod():
    hvd.init()
    return hvd.DistributedOptimizer(sgd())


def of_one(make_builder):
    """Takes one tower: others of an asynchronous builder may read what it updates."""
    return lambda devices: make_builder(devices[:1])


B = tw_builders
STEPS = {
    "replicated": built_by(B.SyncMultiGPUReplicatedBuilder),
    "sharded": built_by(partial(B.SyncMultiGPUShardedBuilder, average=True)),
    "server": built_by(partial(B.SyncMultiGPUParameterServerBuilder, ps_device="cpu")),
    "spread server": built_by(
        partial(B.SyncMultiGPUParameterServerBuilder, ps_device="gpu")
    ),
    "flat": built_by(partial(B.SyncMultiGPUReplicatedBuilder, flat_below_bytes=999)),
    "asynchronous": built_by(of_one(B.AsyncMultiGPUBuilder)),
    "each tower": built_by(of_one(B.AsyncMultiGPUBuilder), build="build_tower_ops"),
    "one optimizer": built_by(
        of_one(B.AsyncMultiGPUBuilder), build="build_tower_ops", share_optimizer=True
    ),
    "ampopt in replicated": built_by(
        B.SyncMultiGPUReplicatedBuilder,
        make=lambda: tw_ampopt.Optimizer(
            tf_optimizer=v1.train.GradientDescentOptimizer, learning_rate=RATE
        ),
    ),
    "ampopt": ampopt_step,
    "ampopt, scaled": partial(ampopt_step, loss_scale=tw_ampopt.DynamicLossScale()),
    "ampopt, Keras 3": partial(ampopt_step, tf_optimizer="keras.optimizers.SGD"),
    "ampopt, accumulating": lambda *functions: ampopt_step(
        *functions, minibatch_multiplier=tf.constant(1)
    ),
    "horovod": partial(wrapped_step, horovod),
}
each_step = pytest.mark.parametrize("name", STEPS)


def initialize(session, sync):
    session.run([v1.global_variables_initializer(), v1.local_variables_initializer()])
    session.run([op for op in sync if op is not None])


@each_step
def test_an_update_waits_for_reads_that_other_gradients_need(name):
    with tf.Graph().as_default(), v1.Session() as session:
        step, sync, towers = STEPS[name](make_variables, loss_of)
        initialize(session, sync)
        session.run(step)
        for got in session.run(towers):
            for value, want in zip(got, STEPPED.values(), strict=True):
                np.testing.assert_allclose(value, want, rtol=1e-6)


def ancestors(ops):
    found, waiting = set(), list(ops)
    while waiting:
        op = waiting.pop()
        if op not in found:
            found.add(op)
            waiting += [*(tensor.op for tensor in op.inputs), *op.control_inputs]
    return found


def only_reads(op, functions):
    """Tells whether an op leaves the variables that it gets as they are."""
    called = [functions[a.func.name] for a in op.node_def.attr.values() if a.func.name]
    waiting, types = [f for f in called], {op.type} if not called else set()
    while waiting:
        for node in waiting.pop().node_def:
            types.add(node.op)
            waiting += [
                functions[a.func.name] for a in node.attr.values() if a.func.name
            ]
    writes = ("Assign", "ResourceApply", "ResourceSparseApply", "ResourceScatter")
    return not any(kind.startswith(writes) for kind in types)


def unordered(targets):
    """Lists reads and writes of one variable of which neither waits for the other."""
    ops = ancestors(
        target if hasattr(target, "type") else target.op for target in targets
    )
    graph = next(iter(ops)).graph
    functions = {f.signature.name: f for f in graph.as_graph_def().library.function}
    reads, writes = defaultdict(list), defaultdict(list)
    for op in ops:
        for tensor in op.inputs:
            if tensor.dtype == tf.resource and tensor.op.type == "VarHandleOp":
                kind = reads if only_reads(op, functions) else writes
                kind[tensor.op].append(op)
    before = {op: ancestors([op]) for found in writes.values() for op in found}
    return [
        (read.name, write.name)
        for handle, found in writes.items()
        for write in found
        for read in reads[handle]
        if read not in before[write] and write not in ancestors([read])
    ]


TERMS = {
    "product": lambda one, other: tf.reduce_sum(one) * tf.reduce_mean(other),
    "square": lambda one, other: tf.reduce_sum(one**2) * tf.reduce_mean(other),
    "wave": lambda one, other: tf.reduce_sum(tf.sin(one)) + tf.reduce_mean(other),
}
SHAPES = [(), (3,), (20_000,)]


@st.composite
def programs(draw):
    """Shapes of variables, and terms of two of them that make a loss."""
    shapes = draw(st.lists(st.sampled_from(SHAPES), min_size=2, max_size=4))
    places = st.integers(0, len(shapes) - 1)
    term = st.tuples(st.sampled_from(sorted(TERMS)), places, places)
    return shapes, draw(st.lists(term, min_size=2, max_size=5))


def starts_of(shapes):
    random = np.random.default_rng(len(shapes))
    return [random.uniform(-0.1, 0.1, shape).astype(np.float32) for shape in shapes]


def make_starting(starts):
    return [v1.get_variable(f"v{n}", initializer=s) for n, s in enumerate(starts)]


def loss_of_terms(terms, *variables):
    # Each use converts its variable, and so is a read of its own.
    read = [lambda v=v: tf.convert_to_tensor(v) for v in variables]
    return tf.add_n([TERMS[kind](read[one](), read[two]()) for kind, one, two in terms])


def stepped_eagerly(starts, terms):
    variables = [tf.constant(start, tf.float64) for start in starts]
    with tf.GradientTape() as tape:
        tape.watch(variables)
        loss = loss_of_terms(terms, *variables)
    zero = tf.UnconnectedGradients.ZERO
    grads = tape.gradient(loss, variables, unconnected_gradients=zero)
    return [(v - RATE * g).numpy() for v, g in zip(variables, grads, strict=True)]


@each_step
@settings(max_examples=2, suppress_health_check=list(HealthCheck))
@given(program=programs())
def test_reads_and_writes_of_random_programs_are_ordered(name, program):
    shapes, terms = program
    # All variables count, so that none has no gradient.
    terms = [*terms, *(("wave", n, n) for n in range(len(shapes)))]
    starts = starts_of(shapes)
    wanted = stepped_eagerly(starts, terms)
    with tf.Graph().as_default():
        step, sync, towers = STEPS[name](
            partial(make_starting, starts), partial(loss_of_terms, terms)
        )
        assert unordered(step if isinstance(step, list) else [step]) == []
        with v1.Session() as session:
            initialize(session, sync)
            session.run(step)
            for got in session.run(towers):
                for value, want in zip(got, wanted, strict=True):
                    np.testing.assert_allclose(value, want, rtol=1e-4, atol=1e-5)
