"""A function that is traced once does what it does when it is traced for each tower.

The graph optimizer is off where bits are compared: it rewrites sums over the towers of
one graph, and so the last bits of what is traced for each.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tw_core import copy_to_replicas, map_towers, replicate, towers
from tw_core.flat_variables import flatten
from tw_core.internal import call_once, create_slots, meet
from tw_core.synchronized import sum_over_towers
from tw_core.testing import CPUS


@pytest.fixture(autouse=True)
def unoptimised():
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})
    yield
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": False})


def dense():
    layers = [keras.layers.Dense(5, "relu"), keras.layers.Dense(2)]
    return keras.Sequential([keras.Input([4]), *layers])


def recurrent():
    """An embedding, whose gradient is sparse, and a loop of Keras."""
    layers = [keras.layers.Embedding(7, 3), keras.layers.LSTM(3)]
    return keras.Sequential([keras.Input([4]), *layers])


def copies(make, num_towers):
    def seeded(_):
        keras.utils.set_random_seed(3)
        return make()

    return replicate(towers(CPUS[:num_towers]), seeded)


def parts(num_towers, whole=False):
    random = np.random.default_rng(0)
    shapes = [(rows, 4) for rows in (3, 1, 2, 4)[:num_towers]]
    drawn = [
        random.integers(0, 7, s) if whole else random.normal(size=s) for s in shapes
    ]
    return [tf.constant(own, tf.float32) for own in drawn]


def assert_same(got, want):
    leaves = [tf.nest.flatten(own, expand_composites=True) for own in (got, want)]
    for one, other in zip(*leaves, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.slow(by_day=["True"])
@pytest.mark.parametrize("inline", [True, False])
def test_one_trace_of_keras_layers_gives_the_bits_of_a_trace_for_each(inline):
    """Random models are in test_random_programs.py, without loops of Keras."""
    models, ours = copies(recurrent, 3), towers(CPUS[:3])

    def loss_and_gradients(tower, model, x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(model(x, training=True) ** 2)
        return loss, tape.gradient(loss, model.trainable_variables)

    @tf.function(autograph=False)
    def step(xs, **how):
        return map_towers(loss_and_gradients, ours, models, xs, **how)

    xs = parts(3, whole=True)
    assert_same(step(xs, trace="once", inline=inline), step(xs))


def test_python_runs_once_and_variables_are_each_towers_own():
    models, calls = copies(dense, 3), []
    numbers = [tf.constant(k) for k in range(3)]

    def own(tower, model, number):
        calls.append(tower.total)
        return model.variables[0], {"model": model, "n": number * 2, "none": None}

    @tf.function
    def run():
        ours = towers(CPUS[:3])
        results = map_towers(own, ours, models, numbers, trace="once")
        for model, (variable, more) in zip(models, results, strict=True):
            assert variable is model.variables[0] and more["model"] is model
        drawn = map_towers(lambda t: tf.random.uniform([3], seed=4), ours, trace="once")
        return [more["n"] for _, more in results], drawn

    found, drawn = run()
    assert [int(n) for n in found] == [0, 2, 4]
    assert calls == [3]
    assert not np.array_equal(drawn[0], drawn[1])  # random numbers with a seed


def test_the_calls_are_on_the_towers_devices_and_their_operations_on_none():
    def product(tower, x):
        with tf.device("/cpu:3"):
            total = tf.reduce_sum(x)
        return x @ tf.transpose(x) + total

    @tf.function
    def run(xs):
        with tf.device("/cpu:2"):
            return map_towers(product, towers(CPUS[:2]), xs, trace="once")

    graph = run.get_concrete_function([tf.ones([2, 2])] * 2).graph
    calls = [op for op in graph.get_operations() if op.type.endswith("PartitionedCall")]
    assert [call.device[-6:] for call in calls] == [":CPU:0", ":CPU:1"]
    (function,) = graph.as_graph_def().library.function
    devices = {node.op: node.device[-6:] for node in function.node_def}
    assert devices["MatMul"] == "" and devices["Sum"] == ":CPU:3"


def test_shared_and_flat_variables_do_what_they_do_when_traced_for_each():
    def results(trace):
        keras.utils.set_random_seed(1)
        shared = tf.Variable(0.0)
        ours = towers(CPUS[:2])
        flats = replicate(ours, lambda tower: flatten(dense))
        copy_to_replicas([flat.variables for flat in flats])

        def step(tower, model, variable, x):
            variable.assign_add(tf.reduce_sum(x))
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(model(x) ** 2)
            return tape.gradient(loss, model.trainable_variables)

        @tf.function(autograph=False)
        def run(xs):
            return map_towers(step, ours, flats, [shared] * 2, xs, trace=trace)

        return run(parts(2)), shared.numpy()

    assert_same(results("once"), results("each"))


def test_towers_wait_for_an_answer_and_go_on_without_one():
    seen = []

    def combine(place, brought):
        seen.append(
            (place, [[type(own).__name__ for own in all_of] for all_of in brought])
        )
        if place == "told":
            return [None] * len(brought)
        return [tf.add_n([x for x, _ in brought])] * len(brought)

    variables = [tf.Variable(1.0), tf.Variable(10.0)]

    def of_a_tower(variable, x):
        variable.assign_add(x)
        meet("told", [variable.read_value()])
        total = meet("sum", [variable.read_value(), variable], answer=tf.TensorSpec([]))
        variable.assign(total)
        return variable.read_value(), total

    @tf.function(autograph=False)
    def run(xs):
        scopes = [lambda k=k: tf.device(CPUS[k]) for k in range(2)]
        items = list(zip(variables, xs, strict=True))
        return call_once(of_a_tower, items, scopes, combine=combine)

    got = run([tf.constant(1.0), tf.constant(2.0)])
    assert [[float(x) for x in own] for own in got] == [[14.0, 14.0]] * 2
    assert [place for place, _ in seen] == ["told", "sum"]
    assert [float(v) for v in variables] == [14.0, 14.0]


def test_a_call_ends_after_all_that_it_reads():
    """Without that, an inlined call might read what is written after it."""
    variables = [tf.Variable([1.0, 2.0]) for _ in range(2)]

    def read(tower, variable):
        return variable * 2, tf.gather(variable, [1])

    @tf.function
    def run():
        results = map_towers(
            read, towers(CPUS[:2]), variables, trace="once", inline=True
        )
        for variable in variables:
            variable.assign([5.0, 5.0])
        return results

    definition = run.get_concrete_function().graph.as_graph_def()
    (function,) = definition.library.function
    kinds = ("ReadVariableOp", "ResourceGather")
    reads = {node.name for node in function.node_def if node.op in kinds}
    assert len(reads) == 2
    assert reads <= set(function.control_ret.values())


def refused(error, message, fn, *items, function=True):
    def run():
        return map_towers(fn, towers(CPUS[:2]), *items, trace="once")

    with pytest.raises(error, match=message) as caught:
        (tf.function(run, autograph=False) if function else run)()
    return caught.value


OUTSIDE = "writes .*outside.*, which no tower was given"


def test_what_towers_cannot_share_is_refused():
    models = copies(dense, 2)
    outside = tf.Variable(1.0, name="outside")
    xs = [tf.ones([200]), tf.ones([200])]

    def write(tower, model):
        outside.assign_add(1.0)

    refused(ValueError, OUTSIDE, write, models)
    other = models[1].variables[0]
    message = r"belongs to towers \[1\] only"
    refused(ValueError, message, lambda t, m: other + 0, models)
    refused(ValueError, r"belongs to towers \[0\] only", lambda t, x: xs[0] + x, xs)
    for name in ("index", "name", "device", "is_main"):
        message = f"reads tower.{name} while it is traced once"
        refused(ValueError, message, lambda t, name=name: getattr(t, name))
    refused(ValueError, r"sees tower 0's 1 in every tower; got", lambda t, n: n, [1, 2])
    refused(ValueError, "structure", lambda t, n: n, [[xs[0]], [xs[0], xs[1]]])
    both = [tf.constant(1), tf.constant(1.0)]
    refused(TypeError, "of one dtype", lambda t, x: x, both)
    message = "traced once for all towers in a tf.function"
    refused(RuntimeError, message, write, models, function=False)
    with pytest.raises(ValueError, match="trace must be 'each' or 'once'; got 'twice'"):
        map_towers(write, towers(CPUS[:2]), models, trace="twice")
    first, other = tf.Variable(tf.ones([2])), tf.Variable(tf.ones([3]))
    frozen = tf.Variable(tf.ones([2]), trainable=False)
    for items, message in (
        ([dense(), recurrent()], "must have the same variables; got"),
        ([[first], [other]], "agree in shape, dtype and trainability; got nu"),
        ([[first], [frozen]], "not trainable"),
    ):
        refused(ValueError, message, lambda t, x: None, items)


def compiled_by_xla(fn, num_towers, outside):
    """Calls ``fn(x, own)`` per tower, which takes ``outside`` from another device."""
    every = towers(CPUS[1 : 1 + num_towers])
    variables = []
    for tower in every:
        with tf.device(tower.device):
            variables.append(tf.Variable(1.0))

    def step():
        outside.assign_add(tf.ones_like(outside))
        items = [(tf.constant(float(k)), own) for k, own in enumerate(variables)]
        return call_once(
            *(fn, items, [tower.scope for tower in every]),
            combine=lambda place, brought: [None] * len(brought),
            jit_compile=True,
        )

    return tf.function(step, autograph=False)


@pytest.mark.parametrize("num_towers", [1, 3])
def test_xla_is_given_the_value_of_a_variable_on_another_device(num_towers):
    with tf.device(CPUS[0]):
        outside = tf.Variable(2.0)

    def fn(x, own):
        own.assign_add(x * outside)
        meet("half", own, waits=True)
        return own + outside

    step = compiled_by_xla(fn, num_towers, outside)
    # Towers' variables become 1 + 3 k, and 1 + 7 k with the second step.
    got = [[float(own) for own in step()] for _ in range(2)]
    places = range(num_towers)
    assert got == [[4.0 + 3 * k for k in places], [5.0 + 7 * k for k in places]]


def test_what_xla_cannot_do_with_a_variable_of_another_device_is_refused():
    with tf.device(CPUS[0]):
        outside = tf.Variable(tf.ones([3]), name="outside")

    def branch(x, own):
        return tf.cond(x > 0, lambda: outside + x, lambda: outside - x)

    def gather(x, own):
        return tf.gather(outside, tf.cast(x, tf.int32)) + own

    for fn, by in ((branch, "If"), (gather, "ResourceGather")):
        message = rf"devices can only be read.*got outside:0 \(by {by} "
        with pytest.raises(ValueError, match=message):
            compiled_by_xla(fn, 2, outside)()


def test_variables_seeds_and_sums_in_bodies_are_refused():
    xs = [tf.ones([2])] * 2
    refused(ValueError, "would be made in a function", lambda t, x: tf.Variable(x), xs)

    def seeded(tower, x):
        return tf.cond(
            x[0] > 0, lambda: tf.random.uniform([2], seed=1), lambda: tf.ones([2])
        )

    refused(ValueError, "draw the same numbers in every tower", seeded, xs)

    def summed(tower, x):
        return tf.while_loop(lambda x: x[0] < 9, lambda x: [sum_over_towers(x)], [x])

    refused(RuntimeError, "in the body of a branch, a loop", summed, xs)

    def unlike(tower, x):
        return tf.cond(x[0] > 0, lambda: sum_over_towers(x), lambda: (x, x))

    refused(TypeError, "Both branches of a tf.cond must return", unlike, xs)


class Summing(tf.Module):
    """Adds up ``x * w`` of all towers, in bodies, or not at all."""

    def __init__(self, w):
        self.w, self.steps = tf.Variable(float(w)), tf.Variable(0)

    @tf.function
    def in_a_function(self, x):
        return self.squared(x) if self.steps < 9 else (0.0, 0.0)  # by AutoGraph

    def squared(self, x):
        with tf.GradientTape() as tape:
            total = sum_over_towers(x * self.w)
            result = tf.reduce_sum(total**2)
        return result, tape.gradient(result, self.w)

    def __call__(self, tower, x):
        self.steps.assign_add(1)
        outside = x * 2
        return tf.cond(
            self.steps < 2,
            lambda: (*self.in_a_function(outside), [tf.sparse.eye(2), None]),
            lambda: (x[0], self.w * x[0], [tf.sparse.eye(3), None]),
        )


@pytest.mark.parametrize("inline", [True, False])
def test_towers_meet_in_branches_and_functions(inline):
    models, xs = [Summing(1), Summing(2)], [tf.constant([1.0]), tf.constant([5.0])]

    @tf.function
    def run(xs):
        ours = towers(CPUS[:2])
        return map_towers(
            lambda tower, model, x: model(tower, x),
            *(ours, models, xs),
            trace="once",
            inline=inline,
        )

    total = 1 * 2 + 2 * 10  # and the gradient of both towers' losses
    for x, own in zip([2, 10], run(xs), strict=True):
        assert (own[0], own[1]) == (total**2, 2 * 2 * total * x)
        assert own[2][0].dense_shape[0] == 2
        assert own[2][1] is None
    for x, model, own in zip([1, 5], models, run(xs), strict=True):
        assert (own[0], own[1], model.steps.numpy()) == (x, x * model.w, 2)
        assert own[2][0].dense_shape[0] == 3


def test_results_cannot_be_differentiated_from_outside():
    variables = [tf.Variable(1.0), tf.Variable(2.0)]

    def run():
        with tf.GradientTape() as tape:
            results = map_towers(
                lambda tower, v: v * 2, towers(CPUS[:2]), variables, trace="once"
            )
        return tape.gradient(results[0], variables[0])

    with pytest.raises(RuntimeError, match="take the gradients in the function"):
        tf.function(run)()


def test_errors_name_the_line_and_the_tower():
    def broken(tower, x):
        raise ValueError("mine")

    error = refused(ValueError, "mine", broken, [tf.ones([2])] * 2)
    assert any("tower0 of 2, which is traced for all" in n for n in error.__notes__)

    def negative(tower, x):
        return tf.debugging.check_numerics(tf.sqrt(x), "no root")  # the line

    @tf.function
    def run(xs):
        ours = towers(CPUS[:2])
        return tf.add_n(map_towers(negative, ours, xs, trace="once", inline=False))

    with pytest.raises(tf.errors.InvalidArgumentError, match="no root") as caught:
        run([tf.constant([1.0]), tf.constant([-1.0])])
    assert "test_trace_once.py" in str(caught.value)
    assert "tower1/" in str(caught.value)


def test_slots_of_variables_without_names_are_found_in_every_tower():
    # Adam makes 12 in each tower, numbered on: Adam, Adam_1, ... Adam_23.
    shapes = [(3, 2), (2,), (2, 1), (4,), (1,), (5, 2)]
    ends = {}
    for trace in ("once", "each"):
        models = [[tf.Variable(tf.ones(shape)) for shape in shapes] for _ in range(2)]
        optimizers = [tf.compat.v1.train.AdamOptimizer(0.1) for _ in models]
        for own, optimizer in zip(models, optimizers, strict=True):
            create_slots(optimizer, own)

        def update(_, own, optimizer):
            pairs = [(variable * variable, variable) for variable in own]
            optimizer.apply_gradients(pairs)

        @tf.function(autograph=False)
        def step(trace=trace, models=models, optimizers=optimizers, update=update):
            map_towers(update, towers(CPUS[:2]), models, optimizers, trace=trace)

        for _ in range(2):
            step()
        slots = [
            optimizer.get_slot(variable, name)
            for own, optimizer in zip(models, optimizers, strict=True)
            for variable in own
            for name in ("m", "v")
        ]
        ends[trace] = [v.numpy() for v in (*models[0], *models[1], *slots)]
    for once, each in zip(*ends.values(), strict=True):
        np.testing.assert_array_equal(once, each)
