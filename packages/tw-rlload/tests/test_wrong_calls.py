"""Calls that must be refused in a sentence, for every public name that takes any."""

from contextlib import nullcontext
from functools import cache, partial

import keras
import numpy as np
import tensorflow as tf
from harness.wrong_calls import Interface, Late, WrongCall, WrongCalls
from rlload_pulled import Loss

from tw_core import towers
from tw_core.testing import CPUS
from tw_reduce import mean, packed, sum_balanced
from tw_rlload import plan_load

v1 = tf.compat.v1
NAN, INF = float("nan"), float("inf")
X = np.zeros((8, 2), np.float32)
SESSION = "LocalSyncParallelOptimizer"


class Model(tf.Module):
    def __init__(self):
        super().__init__()
        self.w = tf.Variable([0.0, 0.0], name="w")


class Strange:
    trainable_variables = ("w",)


def loss_fn(model, inputs):
    return tf.reduce_mean(tf.square(inputs["x"] - model.w))


def sgd():
    return keras.optimizers.SGD(0.1)


def batch(num_buffers=1, **options):
    return INTERFACE.call("DeviceBatch", num_buffers=num_buffers, **options)


@cache
def loaded():
    """A loaded batch and a function that trains on it."""
    rows = batch(num_buffers=2)
    rows.load([X])
    return rows, INTERFACE.call("EpochFunction", batch=rows)


def placeholder(shape=(None, 2), name="x"):
    return v1.placeholder(tf.float32, shape, name)


@cache
def trained():
    """The class with its batch loaded, and its session."""
    made = INTERFACE.call(SESSION, num_buffers=2)
    config = v1.ConfigProto(device_count={"CPU": 2})
    sess = v1.Session(graph=made.loss_inputs[0].graph, config=config)
    with sess.graph.as_default():
        sess.run(v1.global_variables_initializer())
    return made, sess


def reloaded():
    made, sess = trained()
    made.load_data(sess, [X], [])
    return made


def elsewhere(make):
    with tf.Graph().as_default():
        return make()


GIVEN = {
    "rows": lambda: 8,
    "num_devices": lambda: 2,
    "max_per_device_batch_size": lambda: 2,
    "plan": lambda: plan_load(8, num_devices=2, max_per_device_batch_size=2),
    "num_epochs": lambda: 1,
    "values": lambda: [1.0],
    "weights": lambda: [1.0],
    "towers": lambda: towers(CPUS[:2]),
    "columns": lambda: {"x": tf.TensorSpec([None, 2])},
    "batch": batch,
    "loss_fn": lambda: loss_fn,
    "models": lambda: [Model(), Model()],
    "optimizers": lambda: [sgd(), sgd()],
    "batch_index": lambda: 0,
    "EpochFunction": lambda: loaded()[1],
    "DeviceBatch.load.columns": lambda: [X],
    "DeviceBatch.load_next.columns": lambda: [X],
    "DeviceBatch.load_next": lambda: batch(num_buffers=2),
    "optimizer": lambda: v1.train.GradientDescentOptimizer(0.1),
    "devices": lambda: list(CPUS[:2]),
    "input_placeholders": lambda: [placeholder()],
    "rnn_inputs": list,
    "build_graph": lambda: Loss,
    SESSION: reloaded,
    "sess": lambda: trained()[1],
    "inputs": lambda: [X],
    "state_inputs": list,
}
NAMED = {
    "DeviceBatch.load.states": "columns",
    "DeviceBatch.load_next.states": "columns",
    ".inputs": "columns",
    ".state_inputs": "columns",
}
EXEMPT = {"takes any arrays; of those refused it shows the shapes": "weighted_mean"}


def around(name):
    """Sessions have a graph; batches and functions are made outside of graphs."""
    if name.startswith(f"{SESSION}."):
        return trained()[1].graph.as_default()
    return tf.Graph().as_default() if name == SESSION else nullcontext()


INTERFACE = Interface("tw-rlload", GIVEN, around, named=NAMED, exempt=EXEMPT)

OTHERS = {
    "plan_load": [
        ({"rows": -8}, ValueError, "got -8 rows"),
        ({"states": 3}, ValueError, "cannot be divided among 3"),
    ],
    ".num_devices": [(0, ValueError, "at least 1; got 0")],
    ".max_per_device_batch_size": [(0, ValueError, "at least 1; got 0")],
    ".num_epochs": [(0, ValueError, "at least 1; got 0")],
    ".seed": [(-1, ValueError, "at least 0; got -1")],
    ".num_buffers": [(3, ValueError, "got 3")],
    ".timeout_s": [(-1, ValueError, "timeout_s must be at least 0; got -1")],
    ".batch_index": [(1, IndexError, "got 1")],
    ".reducer": [
        (mean(sum_balanced), ValueError, "reducer averages already, and its means"),
        (packed(mean(sum_balanced)), ValueError, "reducer averages already"),
    ],
    ".grad_norm_clipping": [
        (-1, ValueError, "got -1"),
        (INF, ValueError, "must be finite; got inf"),
    ],
    "weighted_mean": [
        ({"values": None}, TypeError, "got None"),
        ({"values": ["a"]}, TypeError, "of numbers; got"),
        ({"values": [1], "weights": [1]}, TypeError, "floating"),
        ({"values": [1.0, 2.0], "weights": [1.0] * 3}, ValueError, "(2,) and (3,)"),
        ({"values": 1.0, "weights": 1.0}, ValueError, "[rows]"),
    ],
    "DeviceBatch": [
        ({"towers": []}, ValueError, "towers is empty"),
        ({"towers": ["/cpu:0"]}, TypeError, "towers(devices)"),
        ({"towers": towers(["/cpu:0"] * 2)}, ValueError, "passed twice"),
        ({"towers": towers(["/gpu:7"])}, ValueError, "/gpu:7"),
        ({"columns": {"x": "float32"}}, TypeError, "got {'x': 'str'}"),
        ({"columns": {}}, ValueError, "at least one col"),
        ({"columns": {"x": tf.TensorSpec([])}}, ValueError, "'x' has shape ()"),
        (
            {"columns": {"x": tf.TensorSpec([None], tf.string)}},
            *(ValueError, "dtype str"),
        ),
        (
            {"states": {"x": tf.TensorSpec([None])}},
            *(ValueError, "unique names; twice: ['x']"),
        ),
    ],
    "DeviceBatch.load.columns": [
        ([], ValueError, "got 0"),
        (
            Late(lambda: [elsewhere(lambda: placeholder(name="other"))]),
            *(TypeError, "symbolic tensor"),
        ),
    ],
    "EpochFunction": [
        ({"models": ["a", "b"]}, TypeError, "with trainable_variables, such as"),
        ({"models": [Strange()] * 2}, ValueError, "passed twice"),
        (
            {"models": [Strange(), Strange()]},
            *(TypeError, "Strange.trainable_variables m"),
        ),
        (
            {"models": [elsewhere(Model), elsewhere(Model)]},
            *(TypeError, "outside of graphs"),
        ),
        ({"models": [Model()]}, ValueError, "got 1 models and 2 optimizers"),
        (
            {"models": Late(lambda: [keras.Sequential() for _ in range(2)])},
            *(ValueError, "has no trainable variables"),
        ),
        ({"optimizers": [sgd()] * 2}, ValueError, "was passed twice"),
        ({"optimizers": [None, sgd()]}, TypeError, "with apply_gradients(pairs)"),
        ({"optimizers": [type(sgd()), keras.Model]}, TypeError, "got the class SGD"),
        ({"apply_fn": print}, ValueError, "for apply_fn; got 2 models and 2 opt"),
        (
            {"models": [Model()], "optimizers": [sgd()], "apply_fn": print},
            *(ValueError, "must be one model per tower, and a single optimizer"),
        ),
        (
            {"models": [Model()] * 2, "optimizers": [sgd()], "apply_fn": print},
            *(ValueError, "A model or an optimizer was passed twice"),
        ),
        (
            {"optimizers": [sgd()], "apply_fn": print},
            *(ValueError, "SGD must be built before apply_fn uses it"),
        ),
    ],
    SESSION: [
        ({"optimizer": None}, TypeError, "with apply_gradients(pairs)"),
        ({"optimizer": v1.train.AdamOptimizer}, TypeError, "the class AdamOptimizer"),
        (
            {"optimizer": sgd()},
            *(TypeError, "SGD, a Keras 3 optimizer, does not work"),
        ),
        ({"devices": []}, ValueError, "devices must be a non-empty list of"),
        ({"devices": ["/cpu:zero"]}, ValueError, "is not a TensorFlow device string"),
        (
            {"devices": ["/cpu:0", "/cpu:1", "/device:CPU:0"]},
            ValueError,
            "passed twice",
        ),
        (
            {"input_placeholders": []},
            ValueError,
            "input_placeholders must be a non-empty",
        ),
        ({"input_placeholders": [X]}, TypeError, "got ['ndarray']"),
        (
            {"input_placeholders": [elsewhere(lambda: placeholder(name="other"))]},
            *(ValueError, "other:0"),
        ),
        (
            {"input_placeholders": Late(lambda: [placeholder(None)])},
            *(ValueError, "has shape <unknown>"),
        ),
        (
            {"input_placeholders": Late(lambda: [placeholder([])])},
            *(ValueError, "has shape ()"),
        ),
        (
            {"input_placeholders": Late(lambda: [placeholder()] * 2)},
            *(ValueError, "unique names; twice: ['x']"),
        ),
        ({"rnn_inputs": [X]}, TypeError, "rnn_inputs must hold placeholders"),
        (
            {"build_graph": lambda inputs: None},
            *(TypeError, "object with gradients(optimizer); got NoneType"),
        ),
    ],
    f"{SESSION}.load_data": [
        ({"state_inputs": [X]}, ValueError, "got 1"),
        ({"inputs": Late(lambda: trained()[0].loss_inputs)}, TypeError, "symbolic te"),
    ],
    ".sess": [
        (None, TypeError, "sess must be a session"),
        (v1.Session(graph=tf.Graph()), ValueError, "session of the graph in which"),
    ],
}


def trained_on_shared():
    """Two models that hold one variable, which trains nowhere."""
    models, rows = [Model(), Model()], batch()
    models[1].w = models[0].w
    rows.load([X])
    return INTERFACE.call("EpochFunction", batch=rows, models=models).run_epochs(1)


def graph_of_its_own(call):
    return lambda: elsewhere(call)


new_function = partial(INTERFACE.call, "EpochFunction")
# Refused for the state that they meet, with a RuntimeError.
TOO_EARLY = [
    ("DeviceBatch", graph_of_its_own(batch), "use tw_rlload.LocalSyncParallel"),
    ("DeviceBatch", tf.function(batch, autograph=False), "makes variables; use it"),
    ("DeviceBatch.load_next", lambda: batch().load_next([X]), "num_buffers=2"),
    ("DeviceBatch.use_next", lambda: batch().use_next(), "load_next"),
    (
        "EpochFunction",
        graph_of_its_own(partial(new_function, batch=batch())),
        "outside",
    ),
    ("EpochFunction.optimize", lambda: new_function().optimize(0), "Load"),
    (
        "EpochFunction.run_epochs",
        *(graph_of_its_own(lambda: loaded()[1].run_epochs(1)), "outside of graphs"),
    ),
    (f"{SESSION}.use_next", lambda: trained()[0].use_next(), "No load is under way"),
]
ROWS = [
    *INTERFACE.rows(OTHERS),
    *(WrongCall(name, call, RuntimeError, says) for name, call, says in TOO_EARLY),
    WrongCall(
        *("DeviceBatch.load", lambda: batch(check_finite=True).load([X + NAN])),
        *(ValueError, "16 of 16 values are NaN"),
    ),
    WrongCall(
        *("EpochFunction.run_epochs", trained_on_shared),
        *(ValueError, "w:0 is one variable in towers [0, 1]"),
    ),
]


class TestWrongCalls(WrongCalls):
    interface, rows = INTERFACE, ROWS
