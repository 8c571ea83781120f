"""Models with flat variables train, are saved and read as those without."""

from functools import partial

import keras
import numpy as np
import pytest
import tensorflow as tf

from tw_core import map_towers, replicate, towers
from tw_core.flat_variables import FlatVariables, flatten, pack_gradients
from tw_core.internal import apply_pairs, create_slots
from tw_core.testing import CPUS

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
    x = keras.layers.Conv2D(4, 3, activation="relu")(inputs)
    x = keras.layers.BatchNormalization()(x)
    x = keras.layers.Flatten()(x)
    x = keras.layers.Dense(40, activation="tanh")(x)  # 144 x 40: stays alone.
    x = keras.layers.Dropout(0.3, seed=9)(x)
    x = keras.layers.Dense(7, activation="tanh")(x)
    return keras.Model(inputs, keras.layers.Dense(3)(x))


class Mixed(tf.Module):
    """Variables of two dtypes, in lists and dicts, large and small, some frozen."""

    def __init__(self):
        super().__init__()
        rng = np.random.default_rng(6)
        self.kernel = tf.Variable(0.1 * rng.standard_normal((192, 5)), dtype=tf.float32)
        self.wide = tf.Variable(0.1 * rng.standard_normal((5, 300)), dtype=tf.float32)
        self.more = [
            tf.Variable(0.1 * rng.standard_normal((300, 2)), dtype=tf.float64),
            tf.Variable(rng.standard_normal(2), dtype=tf.float64),
        ]
        self.scales = {"one": tf.Variable(0.5), "two": tf.Variable([1.5, 0.5, 0.25])}
        self.steps = tf.Variable(0, dtype=tf.int64, trainable=False)

    def __call__(self, x):
        hidden = tf.tanh(tf.reshape(x, [-1, 192]) @ self.kernel * self.scales["one"])
        hidden = tf.cast(tf.tanh(hidden @ self.wide), tf.float64)
        out = tf.cast(hidden @ self.more[0] + self.more[1], tf.float32)
        return tf.concat([out, out[:, :1]], axis=1) * self.scales["two"]


def train(call, variables_of, optimizer, steps=4):
    create_slots(optimizer, variables_of())

    @tf.function
    def step(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((call(x) - y) ** 2)
        variables = variables_of()
        pairs = zip(tape.gradient(loss, variables), variables, strict=True)
        apply_pairs(optimizer, list(pairs))
        return loss

    return [float(step(ROWS, GOALS)) for _ in range(steps)]


def values(model):
    found = getattr(model, "weights", None) or model.variables
    return [v.numpy() for v in found]


@pytest.mark.parametrize(
    ("make", "name"),
    [(make_keras_model, name) for name in OPTIMIZERS]
    # Keras has no global norm of two dtypes.
    + [(Mixed, name) for name in OPTIMIZERS if name != "clipped"],
)
def test_it_trains_as_a_model_without(make, name):
    plain, flat = make(), flatten(make, below_bytes=BELOW)
    is_keras = make is make_keras_model
    arguments = {"training": True} if is_keras else {}
    expected = train(
        lambda x: plain(x, **arguments),
        lambda: plain.trainable_variables,
        OPTIMIZERS[name](),
    )
    found = train(
        lambda x: flat(x, **arguments),
        lambda: flat.trainable_variables,
        OPTIMIZERS[name](),
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
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(flat(ROWS))
    grads = tape.gradient(loss, flat.flat_variables.variables)
    assert [g.shape for g in grads] == [v.shape for v in flat.flat_variables.variables]

    @tf.function
    def step():
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(flat(ROWS))
        return tape.gradient(loss, flat.trainable_variables)

    types = [op.type for op in step.get_concrete_function().graph.get_operations()]
    assert types.count("SplitV") + types.count("Split") == sum(
        len(layout.parts) > 1 for layout in layouts
    )


def test_keras_saves_loads_and_predicts_with_the_current_values(tmp_path):
    flat = flatten(make_keras_model, below_bytes=BELOW)
    plain = make_keras_model()
    train(
        lambda x: flat(x, training=True),
        lambda: flat.trainable_variables,
        keras.optimizers.Adam(0.01),
    )
    model = flat.model
    assert [v.path for v in model.weights] and model.count_params() > 0
    model.save(tmp_path / "m.keras")
    loaded = keras.models.load_model(tmp_path / "m.keras")
    predicted = model.predict(ROWS, verbose=0)
    np.testing.assert_array_equal(loaded.predict(ROWS, verbose=0), predicted)

    model.save_weights(tmp_path / "m.weights.h5")
    plain.load_weights(tmp_path / "m.weights.h5")
    np.testing.assert_array_equal(plain.predict(ROWS, verbose=0), predicted)
    plain.set_weights([w + 1 for w in plain.get_weights()])
    plain.save_weights(tmp_path / "p.weights.h5")
    model.load_weights(tmp_path / "p.weights.h5")
    for one, other in zip(model.get_weights(), plain.get_weights(), strict=True):
        np.testing.assert_array_equal(one, other)

    copied = keras.models.clone_model(model)
    copied.set_weights(model.get_weights())
    np.testing.assert_array_equal(
        copied.predict(ROWS, verbose=0), model.predict(ROWS, verbose=0)
    )


@pytest.mark.parametrize("make", [make_keras_model, Mixed])
def test_checkpoints_are_those_of_a_model_without(make, tmp_path):
    flat, plain = flatten(make, below_bytes=BELOW), make()
    for v in plain.trainable_variables:
        v.assign(v + 1)
    first = tf.train.Checkpoint(model=flat.model).write(str(tmp_path / "flat"))
    second = tf.train.Checkpoint(model=plain).write(str(tmp_path / "plain"))
    assert tf.train.list_variables(first) == tf.train.list_variables(second)
    tf.train.Checkpoint(model=flat.model).read(second).assert_consumed()
    for one, other in zip(values(flat.model), values(plain), strict=True):
        np.testing.assert_array_equal(one, other)
    tf.train.Checkpoint(model=plain).read(first).assert_consumed()


def test_a_run_resumes_from_a_checkpoint_with_the_optimizer_as_it_is(tmp_path):
    def make_run():
        flat, optimizer = flatten(Mixed, below_bytes=BELOW), OPTIMIZERS["adam"]()
        create_slots(optimizer, flat.trainable_variables)
        saved = tf.train.Checkpoint(model=flat.model, optimizer=optimizer)
        trained = partial(train, flat, lambda: flat.trainable_variables, optimizer)
        return saved, trained

    (saved, go_on), (other, go_on_too) = make_run(), make_run()
    go_on()
    other.read(saved.write(str(tmp_path / "c"))).assert_consumed()
    assert go_on_too() == go_on()


def test_slots_are_viewed_part_by_part():
    flat = flatten(Mixed, below_bytes=BELOW)
    slots = [
        tf.Variable(tf.reshape(tf.range(tf.size(v), dtype=v.dtype), v.shape))
        for v in flat.trainable_variables
    ]
    views = flat.view_slots(slots)
    own = flat.plain_variables
    assert [view.shape for view in views] == [v.shape for v in own]
    for n, layout in enumerate(flat.flat_variables.layouts):
        parts = [v for v in views if getattr(v, "flat", None) is not None]
        parts = [v for v in parts if v.flat.variable is slots[n]]
        whole = np.concatenate([tf.reshape(v, [-1]) for v in parts])
        assert sorted(whole) == list(range(len(whole)))
        parts[0].assign(parts[0] - 1)
        assert slots[n].numpy().min() == -1 and len(layout.parts) == len(parts)
    alone = [v for v in views if any(v is slot for slot in slots)]
    assert len(alone) == 2  # the large ones


def test_replicas_of_flat_models_are_copies():
    devices = towers(CPUS[:2])
    replicas = replicate(devices, lambda tower: flatten(Mixed, below_bytes=BELOW))
    first, second = (values(replica.model) for replica in replicas)
    for one, other in zip(first, second, strict=True):
        np.testing.assert_array_equal(one, other)
    placed = [{v.device[-1] for v in r.flat_variables.variables} for r in replicas]
    assert placed == [{"0"}, {"1"}]
    losses = map_towers(
        lambda tower, replica: float(tf.reduce_mean(replica(ROWS))), devices, replicas
    )
    assert losses[0] == losses[1]


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

    flat = flatten(make_keras_model, below_bytes=BELOW, group=group)
    parts = [
        sorted(part.name for part in layout.parts)
        for layout in flat.flat_variables.layouts
    ]
    assert len(parts) == 2
    assert not any("kernel" in name for names in parts for name in names)
    assert {"bias" in name for name in parts[0]} != {
        "bias" in name for name in parts[1]
    }


def test_what_is_frozen_in_the_function_stays_alone():
    def make():
        model = make_keras_model()
        model.layers[1].trainable = False
        return model

    flat, plain = flatten(make, below_bytes=BELOW), make()
    names = [p.name for layout in flat.flat_variables.layouts for p in layout.parts]
    assert len(names) == len(plain.trainable_variables) - 1  # And the wide kernel.
    before = flat.model.layers[1].get_weights()
    expected = train(
        lambda x: plain(x, training=True),
        lambda: plain.trainable_variables,
        keras.optimizers.AdamW(0.01, weight_decay=0.5),
    )
    found = train(
        lambda x: flat(x, training=True),
        lambda: flat.trainable_variables,
        keras.optimizers.AdamW(0.01, weight_decay=0.5),
    )
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    for one, other in zip(before, flat.model.layers[1].get_weights(), strict=True):
        np.testing.assert_array_equal(one, other)


def test_what_is_frozen_later_is_refused():
    flat = flatten(make_keras_model, below_bytes=BELOW)
    flat.model.layers[1].trainable = False
    with pytest.raises(ValueError, match="freeze them in the function"):
        _ = flat.trainable_variables


@pytest.mark.parametrize(
    "optimizer",
    [
        keras.optimizers.Lamb(),
        keras.optimizers.Adafactor(),
        keras.optimizers.Adam(clipnorm=1.0),
        keras.optimizers.LossScaleOptimizer(keras.optimizers.Lamb()),
    ],
    ids=lambda optimizer: type(optimizer).__name__,
)
def test_optimizers_that_look_at_whole_variables_are_refused(optimizer):
    flat = flatten(Mixed, below_bytes=BELOW)
    with pytest.raises(ValueError, match="holds several"):
        create_slots(optimizer, flat.trainable_variables)
    create_slots(optimizer, Mixed().trainable_variables)


def test_variables_left_out_of_the_decay_are_refused():
    flat = flatten(Mixed, below_bytes=BELOW)
    optimizer = keras.optimizers.AdamW()
    optimizer.exclude_from_weight_decay(var_names=["bias"])
    with pytest.raises(ValueError, match="out of the weight decay by their names"):
        create_slots(optimizer, flat.trainable_variables)


def make_constrained():
    inputs = keras.Input((3,))
    layer = keras.layers.Dense(2, kernel_constraint=keras.constraints.UnitNorm())
    return keras.Model(inputs, layer(inputs))


def test_models_that_cannot_be_flat_are_refused():
    made = make_keras_model()
    with pytest.raises(ValueError, match="were made before"):
        flatten(lambda: made)
    with pytest.raises(ValueError, match="without its variables"):
        flatten(lambda: keras.Sequential([keras.layers.Dense(2)]))
    with pytest.raises(ValueError, match="have a constraint"):
        flatten(make_constrained)
    with pytest.raises(TypeError, match="trainable_variables; got int"):
        flatten(lambda: 3)
    with pytest.raises(RuntimeError, match=r"outside of tf\.function"):
        tf.function(lambda: flatten(Mixed))()
    with pytest.raises(TypeError, match="make_model"):
        flatten(None)
    with pytest.raises(ValueError, match="below_bytes must be at least 0"):
        FlatVariables(-1)


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


def test_a_threshold_of_0_leaves_all_alone():
    flat = flatten(Mixed, below_bytes=0)
    assert flat.flat_variables.variables == []
    assert len(flat.trainable_variables) == len(flat.model.trainable_variables)


def test_a_scope_that_is_open_is_not_entered_again():
    flat = FlatVariables()
    with flat.scope(), pytest.raises(RuntimeError, match="open already"), flat.scope():
        pass


def test_gradients_of_views_can_be_packed_in_eager_code():
    flat = flatten(Mixed, below_bytes=BELOW)
    pairs = [(tf.ones(v.shape, v.dtype), v) for v in flat.model.trainable_variables]
    packed = pack_gradients(pairs)
    assert {id(v) for _, v in packed} == {id(v) for v in flat.trainable_variables}
    assert all(grad.shape == variable.shape for grad, variable in packed)
    with pytest.raises(ValueError, match="must have one gradient each"):
        pack_gradients(pairs[1:])


def test_a_saved_model_is_refused_and_exported_from_a_plain_one(tmp_path):
    flat = flatten(make_keras_model, below_bytes=BELOW)
    for export in (flat.model.export, partial(tf.saved_model.save, flat.model)):
        with pytest.raises(ValueError, match="flat variable, which a SavedModel"):
            export(str(tmp_path / "refused"))
    flat.model.save(tmp_path / "m.keras")
    plain = keras.models.load_model(tmp_path / "m.keras")
    plain.export(str(tmp_path / "exported"))
    served = tf.saved_model.load(str(tmp_path / "exported"))
    np.testing.assert_allclose(served.serve(ROWS), flat.model(ROWS), rtol=1e-5)
