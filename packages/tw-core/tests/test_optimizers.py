"""Every kind of optimizer is known, gets its slots early, and applies as on its own."""

import contextlib
import inspect
import time
from functools import partial

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

from tw_core import OptimizerLike
from tw_core.devices import canonical_device
from tw_core.internal import (
    OptimizerKind,
    apply_pairs,
    call_once,
    check_optimizer,
    create_slots,
    follow_variables,
    keep_repeated_rows,
    kind_of,
    updates_elementwise,
)
from tw_core.testing import CPUS, SparseRows

v1 = tf.compat.v1.train
legacy = tf_keras.optimizers.legacy


class FollowsV1:
    """Plain momentum behind the interface of v1, which only knows dense gradients."""

    def __init__(self):
        self._slots = {}

    def compute_gradients(self, loss, var_list=None):
        return list(zip(tf.gradients(loss, var_list), var_list, strict=True))

    def apply_gradients(self, grads_and_vars, global_step=None, name=None):
        done = []
        with tf.name_scope(name or "FollowsV1"):
            for grad, variable in grads_and_vars:
                slot = self._slot_of(variable)
                speed = slot * 0.5 + tf.convert_to_tensor(grad)
                done.append(slot.assign(speed, read_value=False))
                done.append(variable.assign_sub(0.25 * speed, read_value=False))
        return tf.group(*done)

    def get_slot(self, var, name):
        return self._slots.get(id(var))

    def get_slot_names(self):
        return ["speed"]

    def variables(self):
        return list(self._slots.values())

    def _slot_of(self, variable):
        if id(variable) not in self._slots:
            with tf.init_scope():
                self._slots[id(variable)] = tf.Variable(
                    tf.zeros(variable.shape), trainable=False, name="speed"
                )
        return self._slots[id(variable)]


class Forwards(v1.Optimizer):
    """A v1 optimizer whose state is in another one, which it calls."""

    def __init__(self, inner):
        super().__init__(use_locking=False, name="Forwards")
        self.inner = inner

    def apply_gradients(self, grads_and_vars, global_step=None, name=None):
        return self.inner.apply_gradients(grads_and_vars, global_step, name)

    def variables(self):
        return self.inner.variables()


V1 = {
    "Adadelta": v1.AdadeltaOptimizer,
    "AdagradDA": lambda: v1.AdagradDAOptimizer(0.1, tf.Variable(0, dtype=tf.int64)),
    "Adagrad": lambda: v1.AdagradOptimizer(0.1),
    "Adam": v1.AdamOptimizer,
    "Ftrl": lambda: v1.FtrlOptimizer(0.1),
    "GradientDescent": lambda: v1.GradientDescentOptimizer(0.1),
    "Momentum": lambda: v1.MomentumOptimizer(0.1, 0.9),
    "ProximalAdagrad": lambda: v1.ProximalAdagradOptimizer(0.1),
    "ProximalGradientDescent": lambda: v1.ProximalGradientDescentOptimizer(0.1),
    "RMSProp": lambda: v1.RMSPropOptimizer(0.1),
}
OPTIMIZERS = {
    "v1 Adam": V1["Adam"],
    "v1 Momentum": V1["Momentum"],
    "v1 without slots": V1["GradientDescent"],
    "v1 around another": lambda: Forwards(v1.AdamOptimizer()),
    "like v1": FollowsV1,
    "Keras 3 Adam": keras.optimizers.Adam,
    "Keras 3 SGD": lambda: keras.optimizers.SGD(0.1, momentum=0.5),
    "tf_keras Adam": tf_keras.optimizers.Adam,
    "legacy Adam": legacy.Adam,
    "legacy SGD": lambda: legacy.SGD(0.1, momentum=0.5),
}
IN_SESSIONS = [name for name in OPTIMIZERS if name != "tf_keras Adam"]
each_in_sessions = pytest.mark.parametrize("name", IN_SESSIONS)
each_kind = pytest.mark.parametrize(
    "name", ["v1 Adam", "v1 around another", "like v1", "Keras 3 Adam", "legacy Adam"]
)
METHODS = [
    "compute_gradients",
    "apply_gradients",
    "get_slot",
    "get_slot_names",
    "variables",
]
GRADS = (
    np.array([1, -2, 4], np.float32),
    np.array([[1, 2], [3, 4], [-5, 6]], np.float32),
)
# A lookup may use a row several times; dense it is the second of GRADS.
ROWS = SparseRows(
    np.array([[1, 1], [-5, 6], [0, 1], [3, 4]], np.float32),
    np.array([0, 2, 0, 1], np.int64),
    np.array([3, 2], np.int64),
)


def variables_of(optimizer):
    listed = optimizer.variables
    return list(listed() if callable(listed) else listed)


def two_variables():
    return [tf.Variable(tf.ones([3]), name="a"), tf.Variable(tf.ones([3, 2]), name="b")]


def constants():
    return list(map(tf.constant, GRADS))


def train_eagerly(make, *, steps=3):
    """Calls the optimizer as its documentation has it, with dense gradients."""
    variables, optimizer = two_variables(), make()
    for _ in range(steps):
        optimizer.apply_gradients(list(zip(constants(), variables, strict=True)))
    return [variable.numpy() for variable in variables]


def assert_close(got, want):
    for g, w in zip(got, want, strict=True):
        np.testing.assert_allclose(g, w, rtol=1e-6)


def test_optimizers_of_v1_fit_the_protocol_and_what_lacks_a_method_does_not():
    assert all(isinstance(make(), OptimizerLike) for make in V1.values())
    assert not isinstance(keras.optimizers.SGD(0.1), OptimizerLike)
    for method in METHODS:
        ours = inspect.signature(getattr(OptimizerLike, method)).parameters
        theirs = inspect.signature(getattr(v1.Optimizer, method)).parameters
        assert set(ours) <= set(theirs)
        assert all(theirs[name].default == ours[name].default for name in ours)
        members = {name: lambda self: None for name in METHODS if name != method}
        assert not isinstance(type("Almost", (), members)(), OptimizerLike)


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        *((make, OptimizerKind.V1) for make in V1.values()),
        (lambda: Forwards(None), OptimizerKind.V1),
        (FollowsV1, OptimizerKind.LIKE_V1),
        (keras.optimizers.Adam, OptimizerKind.KERAS_3),
        (type("Own", (keras.optimizers.SGD,), {}), OptimizerKind.KERAS_3),
        (tf_keras.optimizers.Adam, OptimizerKind.TF_KERAS),
        (legacy.Adam, OptimizerKind.TF_KERAS_LEGACY),
        (type("Own", (legacy.SGD,), {}), OptimizerKind.TF_KERAS_LEGACY),
        (object, OptimizerKind.OTHER),
        (lambda: v1.AdamOptimizer, OptimizerKind.OTHER),
    ],
)
def test_an_optimizer_is_of_one_kind(make, kind):
    assert kind_of(make()) is kind


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("mode", ["eager", "function"])
def test_applying_pairs_updates_as_the_optimizer_alone_does(mode, name):
    make = OPTIMIZERS[name]
    variables, optimizer = two_variables(), make()
    variables += [tf.Variable(tf.ones([3, 2])), keras.Variable(np.ones(3, np.float32))]
    if mode == "function":
        create_slots(optimizer, variables)

    def step():
        check_optimizer(optimizer)
        rows = tf.IndexedSlices(*map(tf.constant, ROWS))
        grads = [*constants(), rows, tf.constant(GRADS[0])]
        apply_pairs(optimizer, list(zip(grads, variables, strict=True)))

    run = tf.function(step, autograph=False) if mode == "function" else step
    for _ in range(3):
        run()
    want = train_eagerly(make)
    assert_close([v.numpy() for v in variables], [*want, want[1], want[0]])


@each_in_sessions
@pytest.mark.parametrize("early", [True, False])
def test_a_session_updates_by_running_what_applying_pairs_returns(name, early):
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        optimizer, variables = OPTIMIZERS[name](), two_variables()
        variables.append(tf.Variable(tf.ones([3, 2])))
        if early or name.startswith("Keras 3"):
            create_slots(optimizer, variables)
        grads = [*constants(), tf.IndexedSlices(*map(tf.constant, ROWS))]
        done = apply_pairs(optimizer, list(zip(grads, variables, strict=True)))
        with tf.control_dependencies([done]):
            train_op = tf.no_op()
        session.run(tf.compat.v1.global_variables_initializer())
        for _ in range(3):
            session.run(train_op)
        got = session.run(variables)
    want = train_eagerly(OPTIMIZERS[name])
    assert_close(got, [*want, want[1]])


@pytest.mark.parametrize("dense_shape", [None, ROWS.dense_shape])
@each_kind
def test_gradients_from_outside_of_a_branch_are_applied_in_it(name, dense_shape):
    with tf.Graph().as_default():
        optimizer, variables = OPTIMIZERS[name](), two_variables()
        create_slots(optimizer, variables)
        if name.startswith("Keras 3"):  # which cannot do without
            dense_shape = ROWS.dense_shape
        outside = tf.constant(GRADS[0])
        shape = None if dense_shape is None else tf.constant(dense_shape)
        rows = tf.IndexedSlices(tf.constant(ROWS.values), ROWS.indices, shape)
        if name == "like v1":  # which makes them dense
            rows = tf.constant(GRADS[1])

        def update():
            inside = tf.constant(GRADS[0]) * 0.0 + outside
            pairs = [(inside, variables[0]), (rows, variables[1])]
            with tf.control_dependencies([apply_pairs(optimizer, pairs)]):
                return tf.constant(True)

        updated = tf.cond(tf.constant(True), update, lambda: tf.constant(False))
        with tf.compat.v1.Session() as session:
            session.run(tf.compat.v1.global_variables_initializer())
            assert session.run(updated)
            got = session.run(variables)
    assert_close(got, train_eagerly(OPTIMIZERS[name], steps=1))


def plainly(read):
    return read()


def in_a_branch(read):
    return tf.cond(tf.constant(True), read, lambda: tf.zeros([3, 2]))


def in_a_function(read):  # whose gradient another function computes
    def multiply(factor):
        return tf.reduce_sum(factor * read())

    factor = tf.ones([3, 2])
    product = tf.function(multiply, autograph=False)(factor)
    return tf.gradients(product, [factor])[0]


@pytest.mark.parametrize("place", [plainly, in_a_branch, in_a_function])
@each_kind
def test_a_session_updates_once_all_gradients_are_there(name, place):
    def slowly(value):
        time.sleep(0.2)
        return value

    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        first, second = two_variables()
        optimizer = OPTIMIZERS[name]()
        create_slots(optimizer, [first, second])

        def read():  # long after the gradient of what it reads is there
            waited = tf.numpy_function(slowly, [tf.zeros([3])], tf.float32)
            with tf.control_dependencies([waited]):
                return tf.stack([first.read_value()] * 2, axis=1)

        late = place(read)
        late.set_shape([3, 2])
        grads = [tf.constant(GRADS[0]), late]
        done = apply_pairs(optimizer, list(zip(grads, [first, second], strict=True)))
        session.run(tf.compat.v1.global_variables_initializer())
        seen, _ = session.run([late, done])
    np.testing.assert_array_equal(seen, np.ones([3, 2]))


def test_the_update_gets_the_name_that_is_asked_for_and_copies_nothing(graph):
    variable = tf.Variable(1.0)
    pairs = [(tf.constant(2.0), variable)]
    apply_pairs(FollowsV1(), pairs)
    taken = [op for op in graph.get_operations() if op.type == "Identity"]
    assert [op.inputs[0].op.type for op in taken] == ["ReadVariableOp"] * len(taken)
    assert apply_pairs(v1.AdamOptimizer(), pairs, name="step").name == "step"
    assert apply_pairs(v1.AdamOptimizer(), pairs).name == "Adam"


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_state_is_made_early_once_and_changes_nothing(name):
    variables, optimizer = two_variables(), OPTIMIZERS[name]()
    create_slots(optimizer, variables)
    assert_close([v.numpy() for v in variables], [np.ones(3), np.ones([3, 2])])
    made = [v.name for v in variables_of(optimizer)]
    create_slots(optimizer, variables)
    apply_pairs(optimizer, list(zip(constants(), variables, strict=True)))
    assert [v.name for v in variables_of(optimizer)] == made


# Keras 3 names its state itself, and needs it before the update.
@pytest.mark.parametrize(
    "name", [name for name in IN_SESSIONS if "Keras 3" not in name]
)
def test_state_is_named_as_the_first_update_names_it(name):
    def names(early):
        with tf.Graph().as_default() as graph, tf.name_scope("outer"):
            variables, optimizer = two_variables(), OPTIMIZERS[name]()
            if early:
                create_slots(optimizer, variables)
                made = {o.type for o in graph.get_operations()}
                assert not {t for t in made if t.startswith("ResourceApply")}
            apply_pairs(optimizer, list(zip(constants(), variables, strict=True)))
            return [v.name for v in variables_of(optimizer)]

    assert names(early=True) == names(early=False)


@pytest.mark.parametrize(
    "name", ["SGD", "Adam", "RMSprop", "Nadam", "Adafactor", "Adadelta", "Ftrl", "Lamb"]
)
def test_state_follows_variables_as_if_it_was_made_for_all_of_them(name, tmp_path):
    options = {"SGD": {"momentum": 0.9}, "Adam": {"amsgrad": True}}.get(name, {})
    seen, shapes, path = {}, [(2, 3), (2, 3), (4,)], str(tmp_path / "own")
    for follows in (False, True):
        optimizer = getattr(keras.optimizers, name)(0.1, use_ema=True, **options)
        every = [keras.Variable(np.ones(own, "float32"), name="v") for own in shapes]
        if not follows:
            optimizer.build(every)
        for used in ([0, 2], [0, 1, 2], [2, 1]):
            variables = [every[n] for n in used]
            if follows:
                follow_variables(optimizer, variables)
                fresh = getattr(keras.optimizers, name)(use_ema=True, **options)
                fresh.build(variables)
                saved = [
                    tf.train.list_variables(tf.train.Checkpoint(own=own).write(path))
                    for own in (optimizer, fresh)
                ]
                assert saved[0] == saved[1]
            for step in range(3):
                grads = [tf.fill(every[n].shape, 0.5 + n + step) for n in used]
                optimizer.apply(grads, variables)
            seen.setdefault(follows, []).append([own.numpy() for own in every])
        assert int(optimizer.iterations) == 9
    for got, want in zip(seen[True], seen[False], strict=True):
        for own, wanted in zip(got, want, strict=True):
            np.testing.assert_array_equal(own, wanted)


def test_slots_that_a_session_graph_cannot_name_are_explained():
    with tf.Graph().as_default():
        variable = tf.Variable(tf.ones([3, 2]), name="w")
        with pytest.raises(ValueError, match=r"Adafactor.*'w:0'.*colon"):
            create_slots(keras.optimizers.Adafactor(), [variable])


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (keras.optimizers.Adam, "Adam, a Keras 3 optimizer, does not work in a"),
        (tf_keras.optimizers.SGD, "SGD, an optimizer of tf_keras, updates noth"),
    ],
)
def test_what_a_session_graph_cannot_use_is_refused(make, says, graph):
    with pytest.raises(TypeError, match=says):
        check_optimizer(make())


@pytest.mark.parametrize("scales", [False, True], ids=["plain", "scales the loss"])
def test_keras_3_computes_each_update_on_its_variables_device(scales):
    variables = []
    for device in CPUS[:3]:
        with tf.device(device):
            variables.append(tf.Variable([1.0, 2.0]))
    optimizer = keras.optimizers.AdamW(0.1)
    used = keras.optimizers.LossScaleOptimizer(optimizer) if scales else optimizer
    create_slots(used, variables)

    @tf.function(autograph=False)
    def update():
        with tf.device(CPUS[5]):
            apply_pairs(used, [(tf.constant([1.0, 1.0]), v) for v in variables])

    graph = update.get_concrete_function().graph.as_graph_def()
    nodes = [*graph.node, *(n for f in graph.library.function for n in f.node_def)]
    roots = {canonical_device(n.device) for n in nodes if n.op == "Sqrt"}
    assert roots == {canonical_device(device) for device in CPUS[:3]}
    assert "update_step" not in vars(optimizer)


@pytest.mark.parametrize("scales", [False, True], ids=["plain", "scales the loss"])
def test_an_update_traced_for_all_towers_is_computed_where_each_is(scales):
    of_towers = []
    for device in CPUS[:2]:
        variables = []
        for place in (device, CPUS[5]):
            with tf.device(place):
                variables.append(tf.Variable([1.0, 2.0]))
        used = keras.optimizers.Adam(0.1)
        used = keras.optimizers.LossScaleOptimizer(used) if scales else used
        create_slots(used, variables)
        of_towers.append((used, variables, [tf.constant([1.0, 1.0])] * 2))

    def apply(optimizer, variables, grads):
        apply_pairs(optimizer, list(zip(grads, variables, strict=True)))

    @tf.function(autograph=False)
    def update():
        scopes = [partial(tf.device, device) for device in CPUS[:2]]
        call_once(apply, of_towers, scopes)

    graph = update.get_concrete_function().graph.as_graph_def()
    nodes = [own for f in graph.library.function for own in f.node_def]
    roots = {own.device and canonical_device(own.device) for own in nodes}
    assert roots == {"", canonical_device(CPUS[5])}


def test_keras_3_reads_its_count_as_often_for_many_variables_as_for_two():
    def reads(number):
        variables = [keras.Variable(np.ones(3, "f")) for _ in range(number)]
        optimizer = keras.optimizers.AdamW(0.01)
        create_slots(optimizer, variables)

        @tf.function(autograph=False)
        def step():
            apply_pairs(optimizer, [(tf.ones(3), own) for own in variables])

        graph = step.get_concrete_function().graph
        count = optimizer.iterations.value.handle
        [own] = [inside for outside, inside in graph.captures if outside is count]
        return [op.type for op in own.consumers()].count("ReadVariableOp")

    assert reads(2) == reads(6)


@pytest.mark.parametrize("kept", [True, False])
def test_repeated_rows_are_added_unless_they_are_kept(kept):
    variable = keras.Variable(np.zeros([3, 1], np.float32))
    optimizer = keras.optimizers.RMSprop(1.0, rho=0.0, epsilon=1e-9)
    shape = tf.constant([3, 1])
    values = tf.constant([[3.0], [4.0]])
    rows = tf.IndexedSlices(values, tf.constant([1, 1]), shape)
    with keep_repeated_rows() if kept else contextlib.nullcontext():
        apply_pairs(optimizer, [(rows, variable)])
    # Squared one by one 3^2 + 4^2, and added first (3 + 4)^2.
    want = -7 / 5 if kept else -1.0
    np.testing.assert_allclose(variable.numpy()[:, 0], [0, want, 0], rtol=1e-6)


def test_known_optimizers_may_update_a_variable_by_its_rows():
    excluding = keras.optimizers.AdamW()
    excluding.exclude_from_weight_decay(var_names=["bias"])  # names rows, too
    marked = type("Marked", (keras.optimizers.Lamb,), {"elementwise": True})
    scaling = keras.optimizers.LossScaleOptimizer
    for optimizer in (excluding, marked(), scaling(excluding), v1.AdamOptimizer()):
        assert updates_elementwise(optimizer)
    derived = type("Adam", (keras.optimizers.Adam,), {})
    whole = keras.optimizers.SGD(clipnorm=1.0)
    for optimizer in (derived(), whole, scaling(whole), scaling(marked(clipnorm=1.0))):
        assert not updates_elementwise(optimizer)
