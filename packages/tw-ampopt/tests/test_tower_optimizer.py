"""The counterpart for ``tf.function``: models, sharing, the protocol, refusals."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tw_ampopt import (
    SimpleAdam,
    StaticLossScale,
    TowerOptimizer,
)
from tw_core import OptimizerLike, towers
from tw_core.testing import CPUS

SGD = {"tf_optimizer": "tf.train.GradientDescentOptimizer", "learning_rate": 1.0}


def variables_on(*devices):
    made = []
    for device in devices:
        with tf.device(device):
            made.append([tf.Variable([1.0, 2.0], name="w"), tf.Variable(3.0, name="b")])
    return made


@pytest.mark.parametrize("num_towers", [1, 2])
def test_the_reducer_runs_once_per_update_and_not_for_every_micro_batch(
    make_trainer, num_towers
):
    in_graph = make_trainer.mode == "graph"
    runs = [] if in_graph else [tf.Variable(0)]

    def counting(grads):
        if in_graph:
            with tf.init_scope():
                runs.append(tf.Variable(0, trainable=False))
        with tf.control_dependencies([runs[-1].assign_add(1, read_value=False)]):
            sums = [tf.identity(tf.add_n(c)) for c in zip(*grads, strict=True)]
        return [sums for _ in grads]

    trainer = make_trainer(
        [np.zeros(2, np.float32)],
        num_towers,
        reducer=counting,
        accumulation_steps=3,
        **SGD,
    )
    for _ in range(7):
        trainer.step(*[[np.ones(2, np.float32)]] * num_towers)
    [count] = runs
    assert (trainer.session.run(count) if in_graph else count.numpy()) == 2
    np.testing.assert_array_equal(trainer.values()[0][0], [-2, -2])


@pytest.mark.parametrize("times", [1, 2])
def test_towers_may_share_their_variables(times):
    [shared] = variables_on("/cpu:0")
    lists = [shared] * times if times > 1 else shared
    optimizer = TowerOptimizer(lists, towers=towers(CPUS[:2]), **SGD)
    assert len(optimizer.devices) == 2

    @tf.function
    def step(a, b):
        return optimizer.apply([[a, None], [b, None]])

    assert step(tf.constant([1.0, 0.0]), tf.constant([3.0, 0.0]))
    np.testing.assert_array_equal(shared[0], [-1, 2])


def test_a_learning_rate_variable_is_read_at_every_update():
    rate = tf.Variable(1.0)
    [variables] = variables_on("/cpu:0")
    optimizer = TowerOptimizer(variables, **(SGD | {"learning_rate": rate}))
    step = tf.function(lambda g: optimizer.apply([g, None]))
    step(tf.ones(2))
    rate.assign(0.25)
    step(tf.ones(2))
    np.testing.assert_array_equal(variables[0], [-0.25, 0.75])
    assert optimizer.statistics()["learning_rate"] == 0.25


@pytest.mark.parametrize("master_copies", [False, True])
def test_slots_are_in_the_order_of_variables_of_one_name(master_copies):
    dtype = tf.float16 if master_copies else tf.float32
    variables = [tf.Variable(tf.ones([n + 1], dtype)) for n in range(12)]
    optimizer = TowerOptimizer(
        variables,
        tf_optimizer="tf.train.RMSPropOptimizer",
        momentum=0.5,
        master_copies=master_copies,
    )
    _, _, *listed = (v.shape for v in optimizer.variables())  # counts come first
    assert listed[:24] == [v.shape for v in variables for _ in range(2)]
    optimizer.apply([tf.ones(v.shape) for v in variables])
    optimizer.reset_optimizer_state()
    for variable in variables:
        for name, value in (("rms", 1), ("momentum", 0)):
            slot = optimizer.get_slot(variable, name)
            np.testing.assert_array_equal(slot, np.full(variable.shape, value))


def test_bad_gradients_are_named_per_tower():
    lists = variables_on("/cpu:0", "/cpu:1")
    optimizer = TowerOptimizer(lists, **SGD)

    @tf.function
    def look(a, b):
        return optimizer.nonfinite_gradients([[a, None], [a, b]])

    flags = look(tf.ones(2), tf.constant(np.nan))
    np.testing.assert_array_equal(flags, [[False, False], [False, True]])
    assert optimizer.nonfinite_names(flags) == [[], ["b:0"]]


def test_it_is_an_optimizer_by_the_protocol():
    [variables] = variables_on("/cpu:0")
    optimizer = TowerOptimizer(variables, loss_scale=StaticLossScale(8), **SGD)
    assert isinstance(optimizer, OptimizerLike)
    count = tf.Variable(0, dtype=tf.int64)

    @tf.function
    def step(factor):
        loss = tf.reduce_sum(variables[0]) * factor
        pairs = optimizer.compute_gradients(loss)
        return pairs[0][0], optimizer.apply_gradients(pairs, global_step=count)

    grad, updated = step(tf.constant(0.5))
    np.testing.assert_array_equal(grad, [0.5, 0.5])
    assert updated
    assert not step(tf.constant(np.inf))[1]
    assert count.numpy() == 1
    np.testing.assert_array_equal(variables[0], [0.5, 1.5])


def test_pairs_of_all_towers_are_taken_in_any_order():
    lists = variables_on("/cpu:0", "/cpu:1")
    optimizer = TowerOptimizer(lists, **SGD)
    optimizer.apply_gradients(
        [
            [(tf.constant(2.0), b), (tf.constant([k + 1.0, 0.0]), w)]
            for k, (w, b) in enumerate(lists)
        ]
    )
    for w, b in lists:
        np.testing.assert_array_equal(w, [-0.5, 2])
        assert b.numpy() == 1


@pytest.mark.parametrize("master_copies", [False, True])
@pytest.mark.parametrize("kind", ["keras.optimizers.Adam", "tf.train.AdamOptimizer"])
def test_a_keras_variable_is_the_tensorflow_variable_in_it(kind, master_copies):
    dtype = "float16" if master_copies else "float32"
    keras_variables = [
        keras.Variable([1.0, 2.0], name=name, dtype=dtype) for name in ("w", "b")
    ]
    optimizer = TowerOptimizer(
        keras_variables,
        tf_optimizer=kind,
        learning_rate=0.5,
        master_copies=master_copies,
    )
    grad = tf.constant([1.0, -1.0])
    raw = [variable.value for variable in keras_variables]
    assert optimizer.apply_gradients([(grad, v) for v in raw])
    assert optimizer.apply_gradients([(grad, raw[1]), (grad, keras_variables[0])])
    for variable in keras_variables:
        np.testing.assert_allclose(variable.numpy(), [0, 3], atol=1e-2)
    name = optimizer.get_slot_names()[0]
    for variable, tf_variable in zip(keras_variables, raw, strict=True):
        slot = optimizer.get_slot(tf_variable, name)
        assert slot is optimizer.get_slot(variable, name) is not None
    assert optimizer.get_slot(raw[0], name) is not optimizer.get_slot(raw[1], name)
    with pytest.raises(ValueError, match=r"holds .* more than once"):
        optimizer.apply_gradients([(grad, raw[0]), (grad, keras_variables[0])])


@pytest.mark.parametrize(
    ("kind", "mine", "sharers"),
    [
        ("keras.optimizers.Adam", "az", "a"),
        ("tf.train.AdamOptimizer", "z", "az"),
        ("tf_keras.optimizers.legacy.Adam", "z", "a"),
        ("tf.train.RMSPropOptimizer", "az", "a"),
        (SimpleAdam, "z", "az"),
    ],
)
@pytest.mark.parametrize("master_copies", [False, True])
def test_a_reset_by_either_sharer_resets_the_slots_of_both(
    kind, mine, sharers, master_copies
):
    dtype = tf.float16 if master_copies else tf.float32
    variables = {
        "a": tf.Variable([1.0, 2.0], name="a", dtype=dtype),
        "z": tf.Variable([[3.0]], name="z", dtype=dtype),
    }
    arguments = {"tf_optimizer": kind, "master_copies": master_copies}
    mine, sharers = ([variables[name] for name in names] for names in (mine, sharers))
    main = TowerOptimizer(mine, name="Zebra", **arguments)
    other = TowerOptimizer(sharers, name="Ape", share=main, **arguments)
    both = [v for optimizer in (main, other) for v in optimizer.variables()]
    shared = [v for v in both if "global_norm" not in v.name]
    start = [variable.numpy() for variable in shared]
    for resets in (main, other):
        for optimizer, own in ((main, mine), (other, sharers)):
            optimizer.apply([tf.ones(v.shape) for v in own])
        name = main.get_slot_names()[0]
        for variable in variables.values():
            assert (main.get_slot(variable, name).numpy() != 0).all()
        resets.reset_optimizer_state()
        for got, want in zip(shared, start, strict=True):
            np.testing.assert_array_equal(got, want, err_msg=got.name)


def test_a_reset_reaches_the_slots_of_towers_that_only_a_sharer_has():
    lists = variables_on("/cpu:0", "/cpu:1")
    main = TowerOptimizer(lists)
    other = TowerOptimizer(lists[0], share=main)
    main.apply([[tf.ones(2), None]] * 2)
    other.reset_optimizer_state()
    assert main.get_slot(lists[1][0], "m").numpy().any() == np.False_


# Bad input.


def recorded(name):
    made = keras.Variable([0.0], name=name)
    made.overwrite_with_gradient = True
    return made


def test_in_a_function_or_graph_it_is_refused():
    [variables] = variables_on("/cpu:0")
    optimizer = TowerOptimizer(variables)
    with pytest.raises(RuntimeError, match=r"outside of the tf\.function"):
        tf.function(lambda: TowerOptimizer(variables).variables())()
    with pytest.raises(RuntimeError, match=r"must be called outside of a tf\.function"):
        tf.function(optimizer.reset_optimizer_state)()
    with pytest.raises(RuntimeError, match="needs a graph"):
        optimizer.compute_gradients(tf.constant(1.0))
    with (
        tf.Graph().as_default(),
        pytest.raises(RuntimeError, match=r"use tw_ampopt\.Optimizer"),
    ):
        TowerOptimizer(variables)


@pytest.mark.parametrize(
    ("lists_of", "count", "message"),
    [
        (lambda a, b: [a, a], None, r"holds one list 2 times.*tw_core\.towers\(devic"),
        (
            lambda a, b: [a, [tf.Variable(1.0, name="x")]],
            None,
            r"\['w', 'b'\], \['x'\]",
        ),
        (lambda a, b: [a, [b[0], a[1]]], None, r"holds \['b:0'\] more than once"),
        (lambda a, b: [a, b], 3, "got 2 lists for 3 towers"),
        (
            lambda a, b: [tf.Variable([1.0], shape=[None], name="loose")],
            *(None, r"known shapes.* got loose:0 \(None,\)"),
        ),
        (lambda a, b: [a[0], recorded("r")], None, r"the records of float8.*got r"),
    ],
)
def test_lists_of_variables_that_do_not_fit_are_refused(lists_of, count, message):
    lists = lists_of(*variables_on(*CPUS[:2]))
    made = None if count is None else towers(CPUS[:count])
    with pytest.raises(ValueError, match=message):
        TowerOptimizer(lists, towers=made)


def test_pairs_of_other_variables_are_named():
    [variables] = variables_on("/cpu:0")
    stranger = tf.Variable(1.0, name="stranger")
    with pytest.raises(
        ValueError, match=r"got unknown \['stranger:0'\], and missing \['b:0'\]"
    ):
        TowerOptimizer(variables).apply_gradients(
            [(tf.ones(2), variables[0]), (tf.constant(1.0), stranger)]
        )


@pytest.mark.parametrize("num_lists", [1, 2])
def test_pairs_of_more_towers_than_there_are_are_refused(num_lists):
    lists = variables_on(*CPUS[:num_lists])
    optimizer = TowerOptimizer(lists, towers=towers(CPUS[:2]), **SGD)
    pairs = [(tf.ones(2), lists[0][0]), (tf.constant(1.0), lists[0][1])]
    for count in (1, 3):
        with pytest.raises(
            ValueError, match=f"each of 2 towers; got pairs from {count}"
        ):
            optimizer.apply_gradients([pairs] * count)
    np.testing.assert_array_equal(lists[0][0], [1, 2])
