"""Models with flat variables train, are saved and read as those without."""

from functools import partial

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

from tw_core import map_towers, towers
from tw_core.flat_variables import FlatVariables, flatten, pack_gradients
from tw_core.internal import apply_pairs, create_slots
from tw_core.testing import CPUS

v1 = tf.compat.v1.train
ROWS = np.random.default_rng(3).standard_normal((12, 8, 8, 3)).astype(np.float32)
GOALS = np.random.default_rng(4).standard_normal((12, 3)).astype(np.float32)
BELOW = 4_096
OPTIMIZERS = {
    "sgd": lambda: keras.optimizers.SGD(0.05, momentum=0.9, nesterov=True),
    "adam": lambda: keras.optimizers.Adam(0.01),
    "adamw": lambda: keras.optimizers.AdamW(0.01, weight_decay=0.1),
    "rmsprop": lambda: keras.optimizers.RMSprop(0.01, centered=True),
    "ftrl": lambda: keras.optimizers.Ftrl(0.05),
    "clipped": lambda: keras.optimizers.Adam(0.01, global_clipnorm=0.5),
    "averaged": lambda: keras.optimizers.SGD(0.05, use_ema=True, ema_momentum=0.5),
    "v1 momentum": lambda: tf.compat.v1.train.MomentumOptimizer(0.05, 0.9),
    "v1 adam": lambda: tf.compat.v1.train.AdamOptimizer(0.01),
}


def make_keras_model():
    keras.utils.set_random_seed(5)
    inputs = keras.Input((8, 8, 3))
    x = keras.layers.Conv2D(4, 3, strides=2, activation="relu")(inputs)
    x = keras.layers.BatchNormalization()(x)
    x = keras.layers.Flatten()(x)
    x = keras.layers.Dense(40, activation="tanh")(x)  # 36 x 40: stays alone.
    x = keras.layers.Dropout(0.3, seed=9)(x)
    return keras.Model(inputs, keras.layers.Dense(3)(x))


class Mixed(tf.Module):
    """Variables of two dtypes, in lists and dicts, large and small, some frozen."""

    def __init__(self, dtype=tf.float64):
        super().__init__()
        rng = np.random.default_rng(6)
        self.kernel = tf.Variable(0.1 * rng.standard_normal((192, 5)), dtype=tf.float32)
        self.wide = tf.Variable(0.1 * rng.standard_normal((5, 300)), dtype=tf.float32)
        self.more = [
            tf.Variable(0.1 * rng.standard_normal((300, 2)), dtype=dtype),
            tf.Variable(rng.standard_normal(2), dtype=dtype),
        ]
        self.scales = {"one": tf.Variable(0.5), "two": tf.Variable([1.5, 0.5, 0.25])}
        self.steps = tf.Variable(0, dtype=tf.int64, trainable=False)

    def __call__(self, x):
        hidden = tf.tanh(tf.reshape(x, [-1, 192]) @ self.kernel * self.scales["one"])
        hidden = tf.cast(tf.tanh(hidden @ self.wide), self.more[0].dtype)
        out = tf.cast(hidden @ self.more[0] + self.more[1], tf.float32)
        return tf.concat([out, out[:, :1]], axis=1) * self.scales["two"]


def train(model, optimizer, steps=3, **arguments):
    create_slots(optimizer, model.trainable_variables)

    @tf.function
    def step(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(x, **arguments) - y) ** 2)
        variables = model.trainable_variables
        pairs = zip(tape.gradient(loss, variables), variables, strict=True)
        apply_pairs(optimizer, list(pairs))
        return loss

    return [float(step(ROWS, GOALS)) for _ in range(steps)]


def values(model):
    found = getattr(model, "weights", None) or model.variables
    return [v.numpy() for v in found]


def assert_equal(some, others):
    for one, other in zip(some, others, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize(
    ("make", "name"),
    # Keras has no global norm of two dtypes.
    [(Mixed, name) for name in OPTIMIZERS if name != "clipped"]
    + [(make_keras_model, name) for name in ("sgd", "adamw", "clipped", "v1 adam")],
)
def test_it_trains_as_a_model_without(make, name):
    plain, flat = make(), flatten(make, below_bytes=BELOW)
    arguments = {"training": True} if make is make_keras_model else {}
    expected, found = (
        train(model, OPTIMIZERS[name](), **arguments) for model in (plain, flat)
    )
    assert len(flat.trainable_variables) < len(plain.trainable_variables)
    # The last elements of each variable go through other instructions than the others.
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    for one, other in zip(values(flat.model), values(plain), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def test_the_gradients_arrive_as_one_tensor_per_dtype():
    flat = flatten(Mixed, below_bytes=BELOW)
    layouts = flat.flat_variables.layouts
    sizes = sorted((v.dtype.name, v.shape[0]) for v in flat.flat_variables.variables)
    assert sizes == [("float32", 192 * 5 + 1 + 3), ("float64", 2)]
    alone = flatten(Mixed, below_bytes=0)
    assert alone.flat_variables.variables == []
    assert len(alone.trainable_variables) == len(alone.model.trainable_variables)

    @tf.function
    def step():
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(flat(ROWS))
        return tape.gradient(loss, flat.trainable_variables)

    types = [op.type for op in step.get_concrete_function().graph.get_operations()]
    assert types.count("SplitV") + types.count("Split") == sum(
        len(layout.parts) > 1 for layout in layouts
    )


@pytest.mark.slow
def test_keras_saves_loads_and_predicts_with_the_current_values(tmp_path):
    flat, plain = flatten(make_keras_model, below_bytes=BELOW), make_keras_model()
    train(flat, keras.optimizers.Adam(0.01), steps=1, training=True)
    model = flat.model
    assert [v.path for v in model.weights] and model.count_params() > 0
    model.save(tmp_path / "m.keras")
    loaded = keras.models.load_model(tmp_path / "m.keras")
    model.save_weights(tmp_path / "m.weights.h5")
    plain.load_weights(tmp_path / "m.weights.h5")
    predicted = model.predict(ROWS, verbose=0)
    for other in (loaded, plain):
        assert_equal(other.get_weights(), model.get_weights())
        np.testing.assert_array_equal(other.predict(ROWS, verbose=0), predicted)
    plain.set_weights([w + 1 for w in plain.get_weights()])
    plain.save_weights(tmp_path / "p.weights.h5")
    model.load_weights(tmp_path / "p.weights.h5")
    assert_equal(model.get_weights(), plain.get_weights())
    copied = keras.models.clone_model(model)
    copied.set_weights(model.get_weights())
    assert_equal(copied.get_weights(), model.get_weights())
    # A saved model is exported from what was loaded.
    for export in (model.export, partial(tf.saved_model.save, model)):
        with pytest.raises(ValueError, match="flat variable, which a SavedModel"):
            export(str(tmp_path / "refused"))
    loaded.export(str(tmp_path / "exported"))
    served = tf.saved_model.load(str(tmp_path / "exported"))
    np.testing.assert_allclose(served.serve(ROWS), predicted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("make", [make_keras_model, Mixed])
def test_checkpoints_are_those_of_a_model_without(make, tmp_path):
    flat, plain = flatten(make, below_bytes=BELOW), make()
    for v in plain.trainable_variables:
        v.assign(v + 1)
    first = tf.train.Checkpoint(model=flat.model).write(str(tmp_path / "flat"))
    second = tf.train.Checkpoint(model=plain).write(str(tmp_path / "plain"))
    assert tf.train.list_variables(first) == tf.train.list_variables(second)
    tf.train.Checkpoint(model=flat.model).read(second).assert_consumed()
    assert_equal(values(flat.model), values(plain))
    tf.train.Checkpoint(model=plain).read(first).assert_consumed()


def test_a_run_resumes_from_a_checkpoint_with_the_optimizer_as_it_is(tmp_path):
    def make_run():
        flat, optimizer = flatten(Mixed, below_bytes=BELOW), OPTIMIZERS["adam"]()
        create_slots(optimizer, flat.trainable_variables)
        saved = tf.train.Checkpoint(model=flat.model, optimizer=optimizer)
        return saved, partial(train, flat, optimizer, steps=2)

    (saved, go_on), (other, go_on_too) = make_run(), make_run()
    go_on()
    other.read(saved.write(str(tmp_path / "c"))).assert_consumed()
    assert go_on_too() == go_on()


def test_views_act_as_variables():
    flat = flatten(Mixed, below_bytes=BELOW)
    model = flat.model
    view, plain = model.scales["two"], np.array([1.5, 0.5, 0.25], np.float32)
    np.testing.assert_array_equal(view * 2, plain * 2)
    np.testing.assert_array_equal(1 - view, 1 - plain)
    np.testing.assert_array_equal(view[1:], plain[1:])
    np.testing.assert_array_equal(tf.gather(view, [2, 0]), plain[[2, 0]])
    assert view.shape == (3,) and view.dtype == tf.float32 and view.trainable
    assert any(v is view for v in model.trainable_variables)
    view.assign([1.0, 2.0, 3.0])
    view.assign_add([1.0, 1.0, 1.0])
    view.assign_sub([0.5, 0.5, 0.5])
    np.testing.assert_array_equal(view.numpy(), [1.5, 2.5, 3.5])
    np.testing.assert_array_equal(model.scales["one"].numpy(), 0.5)  # Its neighbour.


def test_a_part_cannot_be_written_in_a_step_that_has_read_it():
    flat = flatten(Mixed, below_bytes=BELOW)
    with flat.reading(), pytest.raises(RuntimeError, match="cannot write one part"):
        flat.model.scales["one"].assign(1.0)
    with pytest.raises(ValueError, match=r"has the shape \(3,\)"):
        flat.model.scales["two"].assign([1.0])


def test_groups_lie_apart_and_none_stays_alone():
    def group(name):
        return None if "kernel" in name else "bias" if "bias" in name else ""

    layouts = flatten(make_keras_model, group=group).flat_variables.layouts
    first, second = ([part.name for part in layout.parts] for layout in layouts)
    assert not any("kernel" in name for name in first + second)
    is_bias = [{"bias" in name for name in names} for names in (first, second)]
    assert is_bias in ([{True}, {False}], [{False}, {True}])


def test_what_is_frozen_in_the_function_stays_alone():
    def make():
        model = make_keras_model()
        model.layers[1].trainable = False
        return model

    flat, plain = flatten(make, below_bytes=BELOW), make()
    names = [p.name for layout in flat.flat_variables.layouts for p in layout.parts]
    assert len(names) == len(plain.trainable_variables) - 1  # And the wide kernel.
    before = flat.model.layers[1].get_weights()
    optimizer = keras.optimizers.AdamW(0.01, weight_decay=0.5)
    train(flat, optimizer, steps=1, training=True)
    assert_equal(before, flat.model.layers[1].get_weights())
    copies = [flat.model, flatten(make, below_bytes=BELOW).model]

    @tf.function(autograph=False)
    def read():
        return map_towers(
            lambda tower, own: own.layers[1].bias + 1.0,
            *(towers(CPUS[:2]), copies),
            trace="once",
        )

    for own in read():
        np.testing.assert_array_equal(own, before[1] + 1.0)
    flat.model.layers[2].trainable = flat.model.layers[4].trainable = False
    with pytest.raises(ValueError, match="freeze them in the function"):
        _ = flat.trainable_variables


class Halving(keras.optimizers.SGD):
    """Treats each element by itself, and says so."""

    elementwise = True

    def update_step(self, gradient, variable, learning_rate):
        super().update_step(0.5 * gradient, variable, learning_rate)


class Whole(keras.optimizers.SGD):
    """Divides each variable's gradient by its norm, which the class does not say."""

    def update_step(self, gradient, variable, learning_rate):
        gradient = gradient / tf.norm(gradient)
        super().update_step(gradient, variable, learning_rate)


def of_library(module):
    """Returns a library's optimizer classes by name."""
    return {
        name: kind
        for name, kind in vars(module).items()
        if isinstance(kind, type) and hasattr(kind, "apply_gradients")
    }


def made(kind):
    """Makes an optimizer with arguments that it cannot do without."""
    given = {"AdagradDAOptimizer": {"global_step": tf.Variable(0, dtype=tf.int64)}}
    given["MomentumOptimizer"] = {"momentum": 0.9}
    inner = {"keras": keras.optimizers, "tf_keras": tf_keras.optimizers}
    if "LossScale" in kind.__name__:
        return kind(inner[kind.__module__.partition(".")[0]].Adam(0.01))
    return kind(learning_rate=0.01, **given.get(kind.__name__, {}))


LIBRARIES = {
    "keras": (keras.optimizers, "Adafactor Lamb MultiOptimizer Muon Optimizer"),
    "tf_keras": (tf_keras.optimizers, "Adafactor Nadam Optimizer"),
    "legacy": (tf_keras.optimizers.legacy, "Nadam Optimizer"),
    "tf_keras scaling": (tf_keras.mixed_precision, ""),
    "v1": (tf.compat.v1.train, "Optimizer SyncReplicasOptimizer"),
}
KNOWN = [
    (library, name)
    for library, (module, others) in LIBRARIES.items()
    for name in of_library(module)
    if name not in others.split()
]


@pytest.mark.slow(by_day=["keras-Nadam", "v1-AdagradDAOptimizer"])
@pytest.mark.parametrize(("library", "name"), KNOWN)
def test_every_known_optimizer_trains_as_on_a_model_without(library, name):
    kind = of_library(LIBRARIES[library][0])[name]
    make = partial(Mixed, tf.float32)  # TensorFlow's Proximal ones take no other
    plain, flat = make(), flatten(make, below_bytes=BELOW)
    expected, found = (train(model, made(kind)) for model in (plain, flat))
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    for one, other in zip(values(flat.model), values(plain), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def test_an_optimizer_that_says_that_it_is_elementwise_trains_too():
    flat, plain = flatten(Mixed, below_bytes=BELOW), Mixed()
    for _ in range(2):
        found, expected = (train(model, Halving(0.1)) for model in (flat, plain))
        np.testing.assert_allclose(found, expected, rtol=1e-6)


def without_decay(optimizer, **excluded):
    optimizer.exclude_from_weight_decay(**excluded)
    return optimizer


IN_NAME = {"var_names": ["bias"]}
BY_NAME = "excludes variables from weight decay by name"


@pytest.mark.parametrize(
    ("optimizer", "says"),
    [
        (keras.optimizers.Lamb(), "Lamb is not known to update each element"),
        (keras.optimizers.Adafactor(), "Adafactor is not known"),
        (tf_keras.optimizers.Nadam(), "Nadam is not known"),
        (
            keras.optimizers.Adam(clipnorm=1.0),
            r"by its norm \(clipnorm\), and .* several",
        ),
        (keras.optimizers.LossScaleOptimizer(keras.optimizers.Lamb()), "Lamb is not"),
        (Whole(), "Whole is not known .*set elementwise = True in its class"),
        (Halving(clipnorm=1.0), "by its norm"),
        (without_decay(keras.optimizers.AdamW(), **IN_NAME), BY_NAME),
        (without_decay(tf_keras.optimizers.AdamW(), **IN_NAME), BY_NAME),
        (type("Adam", (v1.AdamOptimizer,), {})(), "Adam is not known"),
    ],
    ids=lambda optimizer: type(optimizer).__name__,
)
def test_optimizers_that_may_look_at_whole_variables_are_refused(optimizer, says):
    flat = flatten(Mixed, below_bytes=BELOW)
    with pytest.raises(ValueError, match=says):
        create_slots(optimizer, flat.trainable_variables)
    create_slots(optimizer, Mixed().trainable_variables)


class TwoHeads(tf.Module):
    """Has a head that the loss may leave out."""

    def __init__(self, *names):
        super().__init__()
        self.body = tf.Variable([[1.0, -2.0]], name="body")
        names = names or ("head0", "head1")
        self.heads = [tf.Variable([2.0, 3.0], name=name) for name in names]
        self.called = tf.function(self.score, autograph=False)

    def score(self, x, n):
        return tf.reduce_sum(x @ self.body * self.heads[n])

    def __call__(self, x, n=0):
        return self.score(x, n)


def step_of(model, optimizer, *, kind):
    def step():
        with tf.GradientTape() as tape:
            loss = model(tf.ones([2, 1]))
        variables = model.trainable_variables
        pairs = zip(tape.gradient(loss, variables), variables, strict=True)
        apply_pairs(optimizer, [(g, v) for g, v in pairs if g is not None])

    create_slots(optimizer, model.trainable_variables)
    return step if kind == "eager" else tf.function(step, autograph=False)


@pytest.mark.parametrize("kind", ["eager", "function"])
def test_a_variable_without_a_gradient_is_refused_by_name(kind):
    def adamw():
        return keras.optimizers.AdamW(0.1, weight_decay=0.5)

    with pytest.raises(ValueError, match=r"head1 has no gradient, .*flat/float32"):
        step_of(flatten(TwoHeads), adamw(), kind=kind)()
    plain = TwoHeads()
    flat = flatten(TwoHeads, group=lambda name: None if name == "head1" else "")
    for model in (plain, flat):
        step_of(model, adamw(), kind=kind)()
    for own, one in zip(flat.model.variables, plain.variables, strict=True):
        np.testing.assert_allclose(own, one, rtol=1e-6)
    np.testing.assert_array_equal(flat.model.heads[1], [2.0, 3.0])  # not decayed


@pytest.mark.parametrize("trace", ["each", "once"])
def test_a_variable_without_a_gradient_is_refused_in_towers(trace):
    ours = towers(CPUS[:2])
    models = [flatten(TwoHeads) for _ in ours]

    def gradients(tower, model):
        with tf.GradientTape() as tape:
            loss = model(tf.ones([2, 1]), 1)
        return tape.gradient(loss, model.trainable_variables)

    step = partial(map_towers, gradients, ours, models, trace=trace)
    with pytest.raises(ValueError, match="head0 has no gradient"):
        tf.function(step, autograph=False)()


def test_each_of_several_gradients_must_reach_all_variables():
    flat, x = flatten(TwoHeads), tf.ones([2, 1])
    with tf.GradientTape(persistent=True) as tape, flat.reading():
        losses = [flat.model(x, n) for n in range(2)]
        total = tf.add_n(losses)
    whole = tape.gradient(total, flat.trainable_variables)
    assert len(whole) == 1 and whole[0].shape == [6]
    for n, loss in enumerate(losses):
        with pytest.raises(ValueError, match=f"head{1 - n} has no gradient"):
            tape.gradient(loss, flat.trainable_variables)


def test_one_of_two_variables_of_a_name_may_be_without_a_gradient():
    step = step_of(flatten(partial(TwoHeads, "a", "a")), v1.AdamOptimizer(), kind="")
    with pytest.raises(ValueError, match="FlatModel: a has no gradient"):
        step()


def test_a_function_in_an_eager_call_is_refused_which_would_keep_old_values():
    flat, x = flatten(TwoHeads), tf.ones([2, 1])
    with flat.reading(), pytest.raises(RuntimeError, match="body is read in a tf"):
        flat.model.called(x, 0)

    @tf.function(autograph=False)
    def step():
        with flat.reading():
            return flat.model.called(x, 0)

    for scale in (1.0, 2.0):
        flat.model.body.assign([[scale, scale]])
        assert float(step()) == 10.0 * scale


def test_models_that_cannot_be_flat_are_refused():
    made, unit_norm = Mixed(), keras.constraints.UnitNorm()
    constrained = keras.layers.Dense(2, kernel_constraint=unit_norm)
    for make, says in (
        (lambda: made, "existed before"),
        (lambda: keras.Sequential([keras.layers.Dense(2)]), "without its variables"),
        (lambda: keras.Sequential([keras.Input([3]), constrained]), "a constraint"),
    ):
        with pytest.raises(ValueError, match=says):
            flatten(make)
    with pytest.raises(TypeError, match="trainable_variables; got int"):
        flatten(lambda: 3)
    flat = FlatVariables()
    with flat.scope(), pytest.raises(RuntimeError, match="open already"), flat.scope():
        pass


@pytest.mark.parametrize("traced", [True, False])
def test_sparse_gradients_are_refused(traced):
    class Lookup(tf.Module):
        def __init__(self):
            super().__init__()
            self.rows = tf.Variable(tf.ones([5, 2]), name="rows")

        def __call__(self):
            return tf.reduce_sum(tf.gather(self.rows, [1, 1, 3]))

    def step(flat):
        with tf.GradientTape() as tape:
            loss = flat()
        return tape.gradient(loss, flat.trainable_variables)

    flat = flatten(Lookup)
    call = tf.function(step, autograph=False) if traced else step
    with pytest.raises(ValueError, match="rows has a sparse gradient"):
        call(flat)


def test_gradients_of_views_can_be_packed_in_eager_code():
    flat = flatten(Mixed, below_bytes=BELOW)
    pairs = [(tf.ones(v.shape, v.dtype), v) for v in flat.model.trainable_variables]
    packed = pack_gradients(pairs)
    assert {id(v) for _, v in packed} == {id(v) for v in flat.trainable_variables}
    assert all(grad.shape == variable.shape for grad, variable in packed)
    with pytest.raises(ValueError, match="must have one gradient each"):
        pack_gradients(pairs[1:])
