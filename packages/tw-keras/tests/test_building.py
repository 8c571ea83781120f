"""Layers that only a step calls are built on every tower, as Keras builds them."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from tower_models import CPUS, check_near

from tw_keras import TowerModel

layers = keras.layers
RANDOM = np.random.default_rng(0)
X, Y = RANDOM.normal(size=(20, 4)), RANDOM.normal(size=(20, 2))
MODES = ["replicated", "sharded", "parameter_server"]
pytestmark = pytest.mark.usefixtures("in_float64")


def dense(units=2):
    return layers.Dense(
        units, kernel_initializer=keras.initializers.RandomNormal(seed=units)
    )


def mean_square(difference):
    return tf.reduce_mean(difference**2)


class Nested(layers.Layer):
    """Has no ``build``: Keras builds what is inside by a symbolic call."""

    def __init__(self):
        super().__init__()
        self.inner = dense()

    def call(self, x):
        return self.inner(x)


class OfTwo(Nested):
    def call(self, x, context):
        return self.inner(keras.ops.concatenate([x, context], axis=-1))


class MadeInBuild(layers.Layer):
    def build(self, shape):
        self.inner = dense()

    def call(self, x):
        return self.inner(x)


class Submodel(keras.Model):
    def __init__(self):
        super().__init__()
        self.flatten, self.inner = layers.Flatten(), dense()

    def call(self, x):
        return self.inner(self.flatten(x))


PARTS = {
    "Dense": dense,
    "Sequential": lambda: keras.Sequential([dense(3), dense()]),
    "layer": Nested,
    "layer of two": OfTwo,
    "made in build": MadeInBuild,
    "model": Submodel,
}


class Student(keras.Model):
    """Learns what a part that only its step calls returns; the part learns, too."""

    def __init__(self, part):
        super().__init__()
        self.student, self.part = dense(), PARTS[part]()
        self.takes_two = part == "layer of two"
        self.tracker = keras.metrics.Mean("loss")

    @property
    def metrics(self):
        return [self.tracker]

    def loss_of(self, x, y):
        taught = self.part(x, y) if self.takes_two else self.part(x)
        return mean_square(self.student(x) - taught) + mean_square(taught - y)

    def train_step(self, data):
        with tf.GradientTape() as tape:
            loss = self.loss_of(*data[:2])
        variables = self.student.trainable_variables + self.part.trainable_variables
        self.optimizer.apply(tape.gradient(loss, variables), variables)
        self.tracker.update_state(loss, sample_weight=tf.shape(data[0])[0])
        return {"loss": self.tracker.result()}


class WithCall(Student):
    def call(self, x):
        return self.student(x)


class InLoss(keras.Model):
    """A head that only ``compute_loss`` calls, and a plain ``train_step``."""

    def __init__(self, part):
        super().__init__()
        self.inner, self.part = dense(3), PARTS[part]()
        self.takes_two = part == "layer of two"

    def call(self, x):
        return self.inner(x)

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None):
        head = self.part(y_pred, y) if self.takes_two else self.part(y_pred)
        return mean_square(head - y)


class InTraining(InLoss):
    """A part that the call has in training alone."""

    def call(self, x, training=None):
        hidden = self.inner(x)
        head = self.part(hidden, x) if self.takes_two else self.part(hidden)
        return head if training else hidden[:, :2]

    compute_loss = keras.Model.compute_loss


class WithRows(WithCall):
    """A step that needs to know the number of rows."""

    def loss_of(self, x, y):
        return super().loss_of(x, y) + mean_square(
            tf.ones([x.shape[0], 2], x.dtype) - y
        )


def sgd():
    return keras.optimizers.SGD(0.1)


def trained(model, *, before=None, drop_remainder=False, optimizer=sgd, **options):
    model.compile(optimizer(), loss="mse", **options)
    data = tf.data.Dataset.from_tensor_slices((X, Y))
    data = data.batch(6, drop_remainder=drop_remainder)
    if before is not None:
        before(model)
    history = model.fit(data, epochs=2, shuffle=False, verbose=0).history
    return history, model.get_weights()


def check_as_on_one_device(make, num_towers, variables, **options):
    many = TowerModel(make, CPUS[:num_towers], variables=variables)
    got = trained(many, **options)
    options.pop("jit_compile", None)
    check_near(got, trained(make(), jit_compile=False, **options), 1e-9)
    for tower in many.towers[1:]:
        check_near(tower.get_weights(), got[1], 0.0)


ROOMS = [("replicated", 2), ("sharded", 3), ("parameter_server", 2), ("replicated", 1)]


@pytest.mark.slow(
    by_day=[
        "replicated-2-model-Student",
        "sharded-3-Sequential-WithCall",
        "parameter_server-2-layer-InLoss",
        "replicated-1-layer of two-InTraining",
    ]
)
@pytest.mark.parametrize("kind", [Student, WithCall, InLoss, InTraining])
@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize(("variables", "num_towers"), ROOMS)
# Keras warns on one device, too, of a model whose call does not build all of it.
@pytest.mark.filterwarnings("error", "ignore:.*on layer 'in_")
def test_what_only_a_step_calls_is_built(kind, part, variables, num_towers):
    check_as_on_one_device(lambda: kind(part), num_towers, variables)


def evaluate_first(model):
    model.test_on_batch(X[:6], Y[:6])
    model.evaluate(X, Y, verbose=0)


def predict_first(model):
    model.predict(X, verbose=0)


def clipping():
    """An ``apply`` of its own, which is replaced while a step is traced to build."""
    optimizer = sgd()
    plain = optimizer.apply
    optimizer.apply = lambda grads, variables=None: plain(
        [tf.clip_by_value(grad, -0.01, 0.01) for grad in grads], variables
    )
    return optimizer


HOW = {
    "eagerly": {"run_eagerly": True},
    "compiled by XLA": {"jit_compile": True},
    "after an evaluation": {"before": evaluate_first},
    "after a prediction": {"before": predict_first},
    "by an apply of its own": {"optimizer": clipping},
    "on a batch": {"before": lambda model: model.train_on_batch(X[:6], Y[:6])},
}


@pytest.mark.slow(
    by_day=[
        *("InLoss-eagerly", "WithCall-compiled by XLA", "Student-on a batch"),
        "WithCall-by an apply of its own",
    ]
)
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("kind", [Student, WithCall, InLoss, InTraining])
def test_it_is_built_however_training_begins(kind, how):
    if kind is Student and "before" in HOW[how] and how != "on a batch":
        pytest.skip("has no call")
    check_as_on_one_device(lambda: kind("layer"), 2, "replicated", **HOW[how])


class InPrediction(WithCall):
    """A part that training calls, too, and that a prediction builds."""

    def predict_step(self, data):
        return self.part(data[0] if isinstance(data, tuple) else data)


@pytest.mark.slow(by_day=["layer"])
@pytest.mark.parametrize("part", ["Dense", "layer", "made in build"])
def test_what_only_a_prediction_calls_is_built(part):
    check_as_on_one_device(
        lambda: InPrediction(part), 2, "replicated", before=predict_first
    )


def test_a_step_that_needs_the_number_of_rows_builds_them_too():
    check_as_on_one_device(
        lambda: WithRows("layer"), 2, "replicated", drop_remainder=True
    )


@pytest.mark.parametrize("part", ["Dense", "layer"])
@pytest.mark.parametrize("run_eagerly", [False, True])
def test_what_no_model_holds_is_refused_by_name(part, run_eagerly):
    outside = PARTS[part]()

    class Holds(WithCall):
        def loss_of(self, x, y):
            return mean_square(self(x) - outside(x))

    model = TowerModel(lambda: Holds("Dense"), CPUS[:2])
    # Else the trace that builds ``part`` would build the other layer as well.
    for own in model.towers:
        own.part.build([None, 4])
    model.compile("sgd", run_eagerly=run_eagerly)
    own = "dense" if part == "Dense" else "nested"
    with pytest.raises(ValueError, match=f"create the variable 'kernel' in {own}"):
        model.fit(X, Y, verbose=0)


class WrongShape(keras.Model):
    """Its ``compute_output_shape`` expects a list, and no step calls it."""

    def __init__(self):
        super().__init__()
        self.inner = dense()

    def call(self, inputs):
        return self.inner(inputs["x"])

    def compute_output_shape(self, shapes):
        raise AssertionError("no step calls this")


@pytest.mark.parametrize("variables", MODES)
def test_the_shape_that_a_model_computes_is_not_asked_for(variables):
    def losses(model):
        model.compile(keras.optimizers.SGD(0.1), "mse", metrics=["mae"])
        fitted = model.fit({"x": X}, Y, batch_size=6, shuffle=False, verbose=0)
        return [fitted.history, model.predict({"x": X}, verbose=0)]

    many = TowerModel(WrongShape, CPUS[:3], variables=variables)
    check_near(losses(many), losses(WrongShape()), 1e-9)


class ListsOne(keras.Model):
    """Lists one metric; a plain step updates the compiled ones as well."""

    def __init__(self):
        super().__init__()
        self.inner, self.tracker = dense(), keras.metrics.Mean("norm")

    def call(self, x):
        return self.inner(x)

    @property
    def metrics(self):
        return [self.tracker]

    def compute_metrics(self, x, y, y_pred, sample_weight=None):
        self.tracker.update_state(y_pred**2)
        return super().compute_metrics(x, y, y_pred, sample_weight)


@pytest.mark.slow(by_day=["2"])
@pytest.mark.parametrize("num_towers", [1, 2])
def test_metrics_that_a_class_does_not_list_are_updated(num_towers):
    def results(model):
        model.compile(keras.optimizers.SGD(0.1), "mse", metrics=["mae"])
        data = {"batch_size": 6, "verbose": 0}
        fitted = model.fit(X, Y, shuffle=False, **data).history
        every = keras.Model.metrics.fget(getattr(model, "towers", [model])[0])
        kept = [v.numpy() for own in every for v in own.variables]
        return [fitted, kept, model.evaluate(X, Y, **data)]

    check_near(results(TowerModel(ListsOne, CPUS[:num_towers])), results(ListsOne()))


def test_shared_variables_that_a_step_builds_are_on_the_host():
    model = TowerModel(
        lambda: WithCall("layer"), CPUS[1:3], variables="parameter_server"
    )
    model.compile("sgd")
    model.fit(X, Y, verbose=0)
    assert {v.value.device[-5:] for v in model.variables} == {"CPU:0"}
