"""Models whose steps XLA compiles, updates included."""

import logging
from functools import partial

import keras
import numpy as np
import pytest
import tensorflow as tf
from tower_models import CPUS, check_near, seeded

from tw_keras import TowerModel
from tw_keras._copies.copies import Copies

kinds, layers = keras.optimizers, keras.layers
RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=[22, 6, 6, 1]).astype("f")  # The last batch of 8 has 6 rows.
Y = RANDOM.integers(0, 3, 22)
OPTIMIZERS = {
    "adam": partial(kinds.Adam, 0.01, epsilon=1e-3),
    "momentum": partial(kinds.SGD, 0.05, momentum=0.9, global_clipnorm=1.0),
    "scaled": lambda: kinds.LossScaleOptimizer(
        kinds.Adam(0.01, epsilon=1e-3), initial_scale=2.0**8
    ),
    "accumulating": partial(
        kinds.AdamW, 0.01, epsilon=1e-3, gradient_accumulation_steps=2
    ),
}


def network():
    return keras.Sequential(
        [
            keras.Input([6, 6, 1]),
            layers.Conv2D(3, 3),
            layers.LayerNormalization(),
            layers.Flatten(),
            layers.Dense(3),
        ]
    )


def fit(model, optimizer, x=X, **options):
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer(), loss, metrics=["accuracy"], **options)
    given = {"batch_size": 8, "epochs": 2, "shuffle": False, "verbose": 0}
    return model.fit(x, Y, **given).history, model.get_weights()


CELLS = [
    ("adam", 2, {}),
    ("scaled", 3, {"variables": "sharded"}),
    ("accumulating", 2, {"variables": "parameter_server"}),
    ("momentum", 2, {}),
    ("scaled", 4, {}),
    ("accumulating", 2, {}),
    ("momentum", 4, {"variables": "sharded"}),
]


@pytest.mark.slow(by_day=["scaled-3-options1"])
@pytest.mark.parametrize(("name", "num_towers", "options"), CELLS)
def test_towers_compiled_train_as_one_device(name, num_towers, options):
    want = fit(seeded(network)(), OPTIMIZERS[name], jit_compile=False)
    many = TowerModel(seeded(network), CPUS[:num_towers], **options)
    check_near(fit(many, OPTIMIZERS[name], jit_compile=True), want)


@pytest.mark.slow
@pytest.mark.parametrize("variables", ["replicated", "sharded", "parameter_server"])
def test_a_nan_of_one_tower_skips_the_compiled_update_on_all(variables):
    x = X.copy()
    x[13] = np.nan  # in the second batch, of the second tower
    optimizers = [OPTIMIZERS["scaled"]() for _ in range(2)]
    want = fit(seeded(network)(), lambda: optimizers[0], x, jit_compile=False)
    many = TowerModel(seeded(network), CPUS[:2], variables=variables)
    check_near(fit(many, lambda: optimizers[1], x, jit_compile=True), want)
    assert np.isfinite(want[1][0]).all()
    for own in optimizers:
        # Four of six steps updated; each other one halved the scale.
        assert float(own.dynamic_scale.numpy()) == 2.0**6
        assert int(own.inner_optimizer.iterations.numpy()) == 4


class OwnStep(keras.Sequential):
    """Builds its optimizer in its first step."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            y_pred = self(x, training=True)
            loss = self.compute_loss(x, y, y_pred)
        variables = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, variables), variables)
        return self.compute_metrics(x, y, y_pred, None)


@pytest.mark.slow
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("kind", [keras.Sequential, OwnStep])
def test_one_tower_has_the_bits_of_keras(compiled, kind):
    def dropping():
        return kind([network(), layers.Dropout(0.2, seed=1)])

    options = {"jit_compile": compiled}
    # The graph optimizer orders products by the graph around them.
    set_options = tf.config.optimizer.set_experimental_options
    set_options({"disable_meta_optimizer": not compiled})
    try:
        want = fit(seeded(dropping)(), OPTIMIZERS["adam"], **options)
        got = fit(TowerModel(seeded(dropping), CPUS[:1]), OPTIMIZERS["adam"], **options)
    finally:
        set_options({"disable_meta_optimizer": False})
    tf.nest.map_structure(np.testing.assert_array_equal, got, want)


def test_one_tower_is_one_compiled_function():
    model = TowerModel(seeded(network), CPUS[:1])
    model.compile(kinds.Adam(), "mse", jit_compile=True)
    x, y = X[:4], np.ones([4, 3], "f")
    model.train_on_batch(x, y)
    step = tf.function(lambda *data: model.train_step(data), autograph=False)
    nodes = step.get_concrete_function(x, y).graph.as_graph_def().node
    calls = [node for node in nodes if node.op == "StatefulPartitionedCall"]
    assert len(calls) == 1
    assert not [node.name for node in nodes if "Variable" in node.op]


def used_operations(graph):
    """Returns the operations that a function runs, by their types."""
    found, stack = set(), [t.op for t in graph.outputs] + list(graph.control_outputs)
    while stack:
        op = stack.pop()
        if op not in found:
            found.add(op)
            stack += [*(tensor.op for tensor in op.inputs), *op.control_inputs]
    return [op.type for op in found if op.type != "Placeholder"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "variables"), [("scaled", "replicated"), ("adam", "sharded")]
)
def test_no_operation_outside_of_compiled_functions_is_per_variable(name, variables):
    def operations(depth):
        model = TowerModel(lambda: deep(depth), CPUS[:2], variables=variables)
        model.compile(OPTIMIZERS[name](), "mse", jit_compile=True)
        step = tf.function(lambda *data: model.train_step(data), autograph=False)
        specs = [tf.TensorSpec([None, width]) for width in (4, 1)]
        return sorted(used_operations(step.get_concrete_function(*specs).graph))

    assert operations(2) == operations(6)


def deep(depth):
    inner = [layers.Dense(4) for _ in range(depth)]
    return keras.Sequential([keras.Input([4]), *inner, layers.Dense(1)])


@pytest.mark.slow
def test_a_compiled_model_goes_on_from_a_checkpoint_compiled_or_not(tmp_path):
    model = TowerModel(seeded(network), CPUS[:2])
    fit(model, OPTIMIZERS["adam"], jit_compile=True)
    path = tf.train.Checkpoint(model).save(tmp_path / "model")

    def going_on():
        tf.train.Checkpoint(model).restore(path)
        model.copy_to_replicas()
        history = model.fit(X, Y, batch_size=8, shuffle=False, verbose=0).history
        return history, model.get_weights()

    first, again = going_on(), going_on()
    tf.nest.map_structure(np.testing.assert_array_equal, again, first)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(model.optimizer, loss, metrics=["accuracy"], jit_compile=False)
    check_near(going_on(), first, 2e-6)


class Unknown(layers.Layer):
    """A layer that says that XLA does not know it."""

    def __init__(self):
        super().__init__(name="unknown")
        self.supports_jit = False

    def call(self, inputs):
        return inputs


@pytest.mark.parametrize(
    ("asked", "devices", "more", "wanted"),
    [
        ("auto", ["/cpu:0"], [], False),
        ("auto", ["/gpu:0", "/gpu:1"], [], True),
        ("auto", ["/gpu:0"], [Unknown], False),
        (True, ["/cpu:0"], [Unknown], False),
        (True, ["/cpu:0"], [], True),
        (False, ["/gpu:0"], [Unknown], False),
    ],
)
def test_xla_is_used_as_keras_decides(
    monkeypatch, caplog, asked, devices, more, wanted
):
    model = TowerModel(
        lambda: keras.Sequential([network(), *(own() for own in more)]), CPUS[:1]
    )
    # On a machine with GPUs Keras compiles what it can.
    monkeypatch.setattr(keras.Model, "_resolve_auto_jit_compile", lambda self: True)
    own = model._copies
    own.towers = [type("Tower", (), {"device": device}) for device in devices]
    with caplog.at_level(logging.WARNING, "tw_keras"):
        assert own.compiles(asked) is wanted
    said = [record.getMessage() for record in caplog.records]
    missing = bool(more) and asked is not False
    assert ["cannot compile unknown;" in line for line in said] == [True] * missing


class Texts(layers.Layer):
    """A layer that XLA does not know, and that does not say so."""

    def call(self, inputs):
        sizes = tf.strings.length(tf.strings.as_string(tf.sign(inputs)))
        return inputs + tf.cast(sizes, tf.float32)


class Sized(layers.Layer):
    """A layer whose sizes depend on the batch's values."""

    def call(self, inputs):
        ones = tf.reduce_sum(tf.ones_like(inputs)) + tf.reduce_max(inputs) * 0.0
        return inputs + tf.reduce_sum(tf.zeros([tf.cast(ones, tf.int32)]))


class Elsewhere(layers.Layer):
    """A layer with a variable on another device, which several towers read."""

    def build(self, shape):
        with tf.device(CPUS[2]):
            self.own = tf.Variable(tf.ones(shape[-1:]), trainable=False)

    def call(self, inputs):
        return inputs * self.own


class Looping(layers.Layer):
    """A loop before a layer that is synchronised, at which functions are cut."""

    def build(self, shape):
        self.norm = layers.BatchNormalization(synchronized=True, epsilon=0.1)
        self.norm.build(shape)

    def call(self, inputs, training=None):
        return self.norm(tf.map_fn(tf.tanh, inputs), training=training)


def odd(kind):
    inner = [layers.Flatten(), layers.Dense(4), kind(name="odd"), layers.Dense(3)]
    return keras.Sequential([keras.Input([6, 6, 1]), *inner])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "num_towers"),
    [
        *((kind, count) for kind in (Texts, Sized) for count in (1, 2)),
        *((Elsewhere, 1), (Looping, 2)),
    ],
    ids=lambda own: getattr(own, "__name__", None),
)
def test_steps_go_on_without_xla_where_it_fails(monkeypatch, caplog, kind, num_towers):
    # On a machine with GPUs "auto" compiles.
    monkeypatch.setattr(Copies, "compiles", lambda self, asked: bool(asked))
    make = seeded(lambda: odd(kind))
    want = fit(make(), OPTIMIZERS["adam"], jit_compile=False)
    model = TowerModel(make, CPUS[:num_towers])
    with caplog.at_level(logging.WARNING, "tw_keras"):
        check_near(fit(model, OPTIMIZERS["adam"]), want, 2e-6)
    [line] = [o.getMessage() for o in caplog.records if o.name.startswith("tw_keras")]
    assert "steps run without XLA, which cannot compile" in line
    assert "/odd" in line
    assert len(model.predict(X, verbose=0)) == len(X)
    with pytest.raises((tf.errors.InvalidArgumentError, ValueError)) as caught:
        fit(model, OPTIMIZERS["adam"], jit_compile=True)
    [note] = caught.value.__notes__
    assert "/odd" in note
    assert "compile(jit_compile=False)" in note


def test_an_error_of_the_program_is_not_taken_for_one_of_xla(monkeypatch):
    monkeypatch.setattr(Copies, "compiles", lambda self, asked: bool(asked))
    calls = []

    class Fails(keras.Sequential):
        def train_step(self, data):
            calls.append(data)
            raise ValueError("The xlabel is unknown.")

    model = TowerModel(lambda: Fails([network()]), CPUS[:2])
    with pytest.raises(ValueError, match="The xlabel is unknown") as caught:
        fit(model, OPTIMIZERS["adam"])
    assert len(calls) == 1
    assert "XLA" not in "".join(getattr(caught.value, "__notes__", []))
