"""``get_variable`` code whose small variables lie in flat ones, in session graphs."""

from functools import partial

import numpy as np
import pytest
import tensorflow as tf

from tw_core import Replicated, Shared, towers
from tw_core.flat_variables import FlatVariables, flat_variable_of, pack_gradients
from tw_core.internal import apply_pairs, create_slots
from tw_core.testing import CPUS
from tw_core.variables import variable_origin

v1 = tf.compat.v1
BELOW = 4_096
X = np.random.default_rng(0).standard_normal((6, 8)).astype(np.float32)
OPTIMIZERS = {
    "descent": partial(v1.train.GradientDescentOptimizer, 0.1),
    "momentum": partial(v1.train.MomentumOptimizer, 0.05, 0.9, use_nesterov=True),
    "adam": partial(v1.train.AdamOptimizer, 0.01),
    "adagrad": partial(v1.train.AdagradOptimizer, 0.1),
    "adadelta": partial(v1.train.AdadeltaOptimizer, 0.5),
    "rmsprop": partial(v1.train.RMSPropOptimizer, 0.01, centered=True),
    "ftrl": partial(v1.train.FtrlOptimizer, 0.1),
    "proximal": partial(v1.train.ProximalAdagradOptimizer, 0.1),
}


def constant(seed, shape):
    return 0.3 * np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def loss_of(x):
    """Small and large variables, a sparse gradient, a loop, a branch, regularizers."""
    with v1.variable_scope("net"):
        w = v1.get_variable(
            "w",
            initializer=constant(1, (8, 8)),
            regularizer=lambda v: 0.01 * tf.nn.l2_loss(v),
        )
        b = v1.get_variable("b", [8], initializer=v1.zeros_initializer())
        _, x = tf.while_loop(
            lambda i, _: i < 3, lambda i, x: (i + 1, tf.tanh(x @ w + b)), (0, x)
        )
        rows = v1.get_variable("rows", initializer=constant(2, (300, 8)))
        x += tf.gather(rows, [1, 5, 5, 7, 299, 0])
        scale = v1.get_variable("scale", initializer=0.5)
        x = tf.cond(tf.reduce_sum(x) > -1e9, lambda: x * scale, lambda: x)
        wide = v1.get_variable("wide", initializer=constant(3, (8, 400)))
    averages = tf.Variable(tf.zeros([8]), trainable=False, name="averages")
    with tf.control_dependencies([averages.assign_add(tf.reduce_mean(x, axis=0))]):
        x = tf.identity(x)
    extra = tf.Variable([0.1, 0.2], name="extra")
    return tf.reduce_mean((x @ wide) ** 2) + tf.reduce_sum(extra**2)


class Built:
    """A step of the model, flat or not, and a session for it."""

    def __init__(self, make_optimizer, *, below):
        self.graph = tf.Graph()
        with self.graph.as_default():
            flat = FlatVariables(below)
            with flat.scope():
                self.loss = loss_of(tf.constant(X)) + tf.add_n(
                    [0.0, *v1.losses.get_regularization_losses()]
                )
            optimizer = make_optimizer()
            pairs = pack_gradients(optimizer.compute_gradients(self.loss))
            self.variables = [v for _, v in pairs]
            if below:  # early, they are the same
                create_slots(optimizer, self.variables)
            self.step = apply_pairs(optimizer, pairs)
            self.saver = v1.train.Saver()
            self.init = v1.global_variables_initializer()
            self.unready = v1.report_uninitialized_variables()
        self.session = v1.Session(graph=self.graph)

    def train(self, steps):
        return [self.session.run([self.loss, self.step])[0] for _ in range(steps)]

    def save(self, path):
        with self.graph.as_default():
            return self.saver.save(self.session, str(path))

    def restore(self, path):
        with self.graph.as_default():
            self.saver.restore(self.session, path)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_it_trains_and_is_saved_as_a_model_without(name, tmp_path):
    plain, flat = (Built(OPTIMIZERS[name], below=below) for below in (0, BELOW))
    assert len(flat.variables) == 3 < len(plain.variables)
    listed = []
    for built in (plain, flat):
        with built.graph.as_default():
            variables, known = v1.trainable_variables(), v1.global_variables()
        listed.append([(v.name, v.shape, v.dtype) for v in variables])
    assert listed[0] == listed[1]
    known = [v.name for v in known]
    assert "flat/float32:0" in known and "net/w:0" not in known
    paths, ends = [], []
    for built in (plain, flat):
        assert len(built.session.run(built.unready)) > 0
        built.session.run(built.init)
        assert len(built.session.run(built.unready)) == 0
        ends.append(built.train(3))
        paths.append(built.save(tmp_path / f"m{len(paths)}"))
    np.testing.assert_allclose(ends[0], ends[1], rtol=2e-6)
    names = dict(tf.train.list_variables(paths[0]))
    assert dict(tf.train.list_variables(paths[1])) == names
    for key in names:
        np.testing.assert_allclose(
            *(tf.train.load_variable(path, key) for path in paths), rtol=2e-5, atol=1e-6
        )
    for path in paths:
        continued = []
        for built in (plain, flat):
            built.restore(path)
            continued.append(built.train(1))
        np.testing.assert_allclose(continued[0], continued[1], rtol=2e-6)


def test_a_checkpoint_of_another_model_does_not_move_the_neighbours(tmp_path):
    flat = Built(OPTIMIZERS["descent"], below=BELOW)
    with flat.graph.as_default():
        shapes = {v.op.name: v.shape for v in v1.trainable_variables()}
    shapes |= {"net/b": (4, 2), "averages": (8,)}
    with tf.Graph().as_default(), v1.Session() as session:
        for name, shape in shapes.items():
            v1.get_variable(name, shape)
        session.run(v1.global_variables_initializer())
        other = v1.train.Saver().save(session, str(tmp_path / "other"))
    says = "check_restored_shape/net/b"
    with pytest.raises(tf.errors.InvalidArgumentError, match=says):
        flat.restore(other)


def test_views_can_be_assigned_read_anew_and_averaged(graph):
    flat = FlatVariables(BELOW)
    with flat.scope():
        a = v1.get_variable("a", initializer=[1.0, 2.0])
        b = v1.get_variable("b", initializer=[[3.0], [4.0]])
    average = tf.train.ExponentialMovingAverage(0.5)
    kept = average.apply([a, b])
    with v1.Session() as session:
        session.run(v1.global_variables_initializer())
        session.run(v1.assign(a, [5.0, 6.0]))
        session.run(kept)
        assert session.run(average.average(a)).tolist() == [3.0, 4.0]
        session.run([a.assign([1.0, 1.0]), b.assign_add([[1.0], [1.0]])])
        assert session.run(a.read_value()).tolist() == [1.0, 1.0]
        assert session.run(b).tolist() == [[4.0], [5.0]]
        b.load([[7.0], [8.0]], session)
        assert b.eval(session).tolist() == [[7.0], [8.0]]
        assert session.run(flat.variables[0]).tolist() == [1.0, 1.0, 7.0, 8.0]
    assert a.op.name == "a" and a.graph is graph
    with pytest.raises(ValueError, match=r"has the shape \(2,\)"):
        a.assign([1.0])
    with pytest.raises(AttributeError, match="pack_gradients"):
        _ = a.handle


@pytest.mark.parametrize("is_outside", [True, False])
def test_towers_have_flat_variables_of_their_own(is_outside, graph):
    found = []
    asked = []
    for tower in towers(CPUS[:2]):
        flat = FlatVariables(BELOW, group=lambda name: asked.append(name) or "")
        policy = Replicated().scope(tower)
        scopes = (flat.scope(), policy) if is_outside else (policy, flat.scope())
        with tf.device(tower.device), scopes[0], scopes[1]:
            loss_of(tf.constant(X))
        found.append(flat)
    names = [[v.name for v in flat.variables] for flat in found]
    assert names == [["flat/float32:0"], ["tower1/flat/float32:0"]]
    named = [name for name in asked if name.startswith("net/")]  # without towers
    assert named == ["net/w", "net/b", "net/scale"] * 2
    assert [flat.variables[0].device[-1] for flat in found] == ["0", "1"]
    flats = [flat_variable_of(flat.variables[0]) for flat in found]
    assert any(v is flats[0] for v in v1.global_variables())
    assert any(v is flats[1] for v in v1.local_variables())
    assert not any("tower1" in v.name for v in v1.global_variables())
    origin = variable_origin(flats[1])
    assert (origin.tower, origin.original) == (1, "flat/float32")
    view = Replicated().trainable_variables(towers(CPUS[:2])[1])[0]
    assert variable_origin(view).original == "net/w"


def test_models_may_read_values_anew(graph):
    flat, reads, views = FlatVariables(BELOW), [], []
    for tower in towers(CPUS[:2]):
        own = flat if tower.is_main else FlatVariables(BELOW)
        with own.scope(), Shared().scope(tower):
            view = v1.get_variable("w", initializer=[1.0, 2.0])
            reads.append(view.read_value())
            views.append(view)
    assert views[0] is views[1] and len(flat.variables) == 1  # shared, it is flat once
    reads.append(view.read_value())
    grads = [tf.gradients(read**2, view)[0] for read in reads]
    with v1.Session() as session:
        session.run(v1.global_variables_initializer())
        for grad in session.run(grads):
            assert grad.tolist() == [2.0, 4.0]
        with tf.control_dependencies([view.assign([5.0, 6.0])]):
            after = view.read_value()
        assert session.run(after).tolist() == [5.0, 6.0]


def test_dtypes_devices_and_what_does_not_train_lie_apart(graph):
    flat = FlatVariables(BELOW, group=lambda name: None if name == "alone" else "")
    with flat.scope():
        v1.get_variable("a", [3])
        v1.get_variable("alone", [3])
        v1.get_variable("half", [3], dtype=tf.float16)
        v1.get_variable("frozen", [3], trainable=False)
        v1.get_variable("whole", [3], dtype=tf.int32, initializer=tf.zeros_initializer)
        v1.get_variable("bounded", [3], constraint=tf.nn.relu)
        v1.get_variable("own", [3], collections=[v1.GraphKeys.LOCAL_VARIABLES])
        with tf.device("/cpu:1"):
            v1.get_variable("there", [3])
    parts = [[part.name for part in layout.parts] for layout in flat.layouts]
    assert parts == [["a"], ["half"], ["own"], ["there"]]


def test_wrong_uses_are_refused(graph):
    with FlatVariables(BELOW).scope():
        a = v1.get_variable("a", [3])
        b = v1.get_variable("b", [3])
        with pytest.raises(RuntimeError, match="when the scope of FlatVariables"):
            a.assign([1.0, 2.0, 3.0])
        with pytest.raises(ValueError, match="when the scope of FlatVariables"):
            pack_gradients([(tf.zeros([3]), a)])
    with pytest.raises(ValueError, match=r"one gradient each.* b \(0\)"):
        pack_gradients([(tf.zeros([3]), a)])
    with pytest.raises(ValueError, match=r"one gradient each.* b \(0\)"):
        pack_gradients([(tf.zeros([3]), a), (None, b)])
    sparse = tf.IndexedSlices(tf.zeros([1]), tf.constant([0]), tf.constant([3]))
    with pytest.raises(ValueError, match="b:0 has a sparse gradient"):
        pack_gradients([(tf.zeros([3]), a), (sparse, b)])
    whole = v1.fixed_size_partitioner(2)
    with pytest.raises(ValueError, match="partitioner"), FlatVariables(BELOW).scope():
        v1.get_variable("p", [4], partitioner=whole)
