"""Calls that must be refused in a sentence, for every public name that takes any."""

from contextlib import contextmanager
from functools import cache, partial

import keras
import numpy as np
import pytest
import tensorflow as tf

import tw_rlload
from tw_core import towers
from tw_core.testing import (
    CPUS,
    WrongCall,
    check_wrong_call,
    names_without_wrong_calls,
)
from tw_rlload import (
    DeviceBatch,
    EpochFunction,
    LocalSyncParallelOptimizer,
    epoch_order,
    plan_load,
    weighted_mean,
)

v1 = tf.compat.v1
NAN = float("nan")
SPECS = {"x": tf.TensorSpec([None, 2])}
X = np.zeros((8, 2), np.float32)
# Records that the package makes and hands out; users make none.
HANDED_OUT = ["EpochOrder", "EpochResult", "LoadPlan", "LoadReport"]


class Model(tf.Module):
    def __init__(self):
        super().__init__()
        self.w = tf.Variable([0.0, 0.0], name="w")


class Strange:
    trainable_variables = ("w",)


class Loss:
    def __init__(self, inputs):
        self.w = v1.get_variable("w", initializer=tf.zeros([2]))
        self.loss = tf.reduce_mean(tf.square(inputs[0] - self.w))

    def gradients(self, optimizer):
        return optimizer.compute_gradients(self.loss)


def loss_fn(model, inputs):
    return tf.reduce_mean(tf.square(inputs["x"] - model.w))


def trained_on_shared():
    """Two models that hold one variable, which trains nowhere."""
    models, rows = [Model(), Model()], batch()
    models[1].w = models[0].w
    rows.load([X])
    return function(rows, models=models).run_epochs(1)


def unbuilt():
    return keras.Sequential([keras.layers.Dense(1)])


def sgd():
    return keras.optimizers.SGD(0.1)


def plan(rows=8, states=None, **options):
    return plan_load(
        rows, states, **{"num_devices": 2, "max_per_device_batch_size": 2, **options}
    )


def batch(made=None, columns=SPECS, states=None, **options):
    made = towers(CPUS[:2]) if made is None else made
    options = {"max_per_device_batch_size": 2, **options}
    return DeviceBatch(made, columns, states, **options)


def function(rows=None, loss=loss_fn, models=None, optimizers=None, **options):
    rows = batch() if rows is None else rows
    models = [Model(), Model()] if models is None else models
    optimizers = [sgd(), sgd()] if optimizers is None else optimizers
    return EpochFunction(rows, loss, models, optimizers, **options)


@cache
def loaded():
    """A loaded batch and a function that trains on it."""
    rows = batch(num_buffers=2)
    rows.load([X])
    return rows, function(rows)


def in_graph(call):
    with tf.Graph().as_default():
        return call()


def session_optimizer(shape=(None, 2), state_shapes=(), copies=1, **changes):
    """The class in a graph of its own, with some arguments changed."""
    with tf.Graph().as_default():
        arguments = {
            "optimizer": v1.train.GradientDescentOptimizer(0.1),
            "devices": list(CPUS[:2]),
            "input_placeholders": [v1.placeholder(tf.float32, shape, "x")] * copies,
            "rnn_inputs": [v1.placeholder(tf.float32, s, "h") for s in state_shapes],
            "max_per_device_batch_size": 2,
            "build_graph": Loss,
            **changes,
        }
        return LocalSyncParallelOptimizer(**arguments)


@contextmanager
def in_session():
    with tf.Graph().as_default():
        optimizer = LocalSyncParallelOptimizer(
            v1.train.GradientDescentOptimizer(0.1),
            list(CPUS[:2]),
            [v1.placeholder(tf.float32, [None, 2], "x")],
            [],
            2,
            Loss,
            num_buffers=2,
        )
        with v1.Session(config=v1.ConfigProto(device_count={"CPU": 2})) as sess:
            sess.run(v1.global_variables_initializer())
            optimizer.load_data(sess, [X], [])
            yield optimizer, sess


def with_session(call):
    with in_session() as (optimizer, sess):
        return call(optimizer, sess)


def elsewhere():
    """A session of another graph."""
    return v1.Session(graph=tf.Graph())


def of_another_graph():
    with tf.Graph().as_default():
        return v1.placeholder(tf.float32, [None, 2], "other")


WHOLE = "must be a whole number; got"


def rows(name, *given):
    """Rows of one callable: (call, error, says)."""
    return [WrongCall(name, *row) for row in given]


def arguments(name, make, *given):
    """Rows of one callable: (argument, value, error, says)."""
    return [
        WrongCall(name, partial(make, **{argument: value}), error, says)
        for argument, value, error, says in given
    ]


PLANS = [
    *arguments(
        "plan_load",
        plan,
        ("rows", "8", TypeError, f"rows {WHOLE} '8' (str)"),
        ("rows", None, TypeError, f"rows {WHOLE} None"),
        ("rows", 2.5, TypeError, f"rows {WHOLE} 2.5"),
        ("rows", True, TypeError, f"rows {WHOLE} True"),
        ("rows", -8, ValueError, "got -8 rows"),
        ("states", 2.0, TypeError, f"states {WHOLE} 2.0"),
        ("states", 0, ValueError, "8 rows, 0 states"),
        ("states", 3, ValueError, "cannot be divided among 3"),
        ("num_devices", "2", TypeError, f"num_devices {WHOLE}"),
        ("num_devices", 0, ValueError, "at least 1; got 0"),
        ("max_per_device_batch_size", 2.5, TypeError, f"batch_size {WHOLE} 2.5"),
        ("max_per_device_batch_size", None, TypeError, f"batch_size {WHOLE} None"),
        ("max_per_device_batch_size", 0, ValueError, "must be at least 1; got 0"),
        ("remainder", "keep", ValueError, "['drop', 'pad', 'error']; got 'keep'"),
        ("remainder", None, ValueError, "got None"),
        ("rows", 0, ValueError, "nothing to load: got 0 rows"),
        ("rows", 1, ValueError, "got 1 sequences of 1 rows for 2 devices. Pass at l"),
    ),
    *rows(
        "plan_load",
        (lambda: plan(9, 3), ValueError, "is 2 rows, and one sequence has 3"),
        (
            lambda: plan(9, remainder="error"),
            *(ValueError, "9 rows (9 sequences of 1) leave 1 rows over"),
        ),
    ),
    *rows(
        "epoch_order",
        (lambda: epoch_order(None, 1), TypeError, "must be a LoadPlan, as"),
        (lambda: epoch_order(8, 1), TypeError, "got int"),
        (lambda: epoch_order(plan(), 1.5), TypeError, WHOLE),
        (lambda: epoch_order(plan(), "1"), TypeError, WHOLE),
        (lambda: epoch_order(plan(), 0), ValueError, "got 0"),
        (lambda: epoch_order(plan(), 1, "all"), ValueError, "got 'all'"),
        (lambda: epoch_order(plan(), 1, 7), ValueError, "got 7"),
        (lambda: epoch_order(plan(), 1, "rows", seed="0"), TypeError, f"seed {WHOLE}"),
        (lambda: epoch_order(plan(), 1, seed=-1), ValueError, "at least 0; got -1"),
    ),
]
MEANS = rows(
    "weighted_mean",
    (lambda: weighted_mean(None, [1.0]), TypeError, "got None"),
    (lambda: weighted_mean(["a"], [1.0]), TypeError, "of numbers; got"),
    (lambda: weighted_mean([1.0], None), TypeError, "weights"),
    (lambda: weighted_mean([1], [1]), TypeError, "floating"),
    (lambda: weighted_mean([1.0, 2.0], [1.0] * 3), ValueError, "got (2,) and (3,)"),
    (lambda: weighted_mean([[1.0], [2.0]], [1.0] * 2), ValueError, "(2, 1) and (2,)"),
    (lambda: weighted_mean(1.0, 1.0), ValueError, "[rows]"),
)
X_TWICE = {"x": tf.TensorSpec([None])}
BATCHES = [
    *arguments(
        "DeviceBatch",
        batch,
        ("made", "ab", TypeError, "towers must be a list"),
        ("made", 3, TypeError, "towers must be a list"),
        ("made", ["/cpu:0"], TypeError, "towers(devices)"),
        ("made", [], ValueError, "towers is empty"),
        ("made", towers(["/cpu:0"] * 2), ValueError, "given twice"),
        ("made", towers(["/gpu:7"]), ValueError, "/gpu:7"),
        ("columns", None, TypeError, "got None"),
        ("columns", ["x"], TypeError, "a dictionary"),
        ("columns", {"x": "float32"}, TypeError, "got {'x': 'str'}"),
        ("columns", {}, ValueError, "at least one col"),
        ("columns", {"x": tf.TensorSpec([])}, ValueError, "'x' has shape (); rows are"),
        ("columns", {"x": tf.TensorSpec(None)}, ValueError, "'x' has shape <unknown>"),
        ("columns", {"x": tf.TensorSpec([None], tf.string)}, ValueError, "dtype str"),
        ("states", ["h"], TypeError, "states must be a"),
        ("states", X_TWICE, ValueError, "names of their own; twice: ['x']"),
        ("max_per_device_batch_size", 2.5, TypeError, f"batch_size {WHOLE} 2.5"),
        ("max_per_device_batch_size", 0, ValueError, "at least 1; got 0"),
        ("remainder", "keep", ValueError, "got 'keep'"),
        ("num_buffers", 3, ValueError, "num_buffers must be 1, or 2 to load the next"),
        ("num_buffers", "2", TypeError, f"num_buffers {WHOLE}"),
        ("check_finite", "no", TypeError, "check_finite must be True or False; got"),
    ),
    *rows(
        "DeviceBatch",
        (lambda: in_graph(batch), RuntimeError, "use tw_rlload.LocalSyncParallel"),
        (tf.function(batch, autograph=False), RuntimeError, "makes variables; do so"),
    ),
    *rows(
        "DeviceBatch.load",
        (lambda: batch().load([X], timeout_s=-1), ValueError, "timeout_s must be at l"),
        (lambda: batch().load(None), TypeError, "NoneType"),
        (lambda: batch().load("x"), TypeError, "a list or a dictionary; got str"),
        (lambda: batch().load(X), TypeError, "a list or a dictionary; got ndarray"),
        (lambda: batch().load([]), ValueError, "got 0"),
        (lambda: batch().load({"y": X}), ValueError, "['y']"),
        (lambda: batch().load(["x"]), ValueError, "'x'"),
        (lambda: batch().load([None]), ValueError, "object"),
        (lambda: batch().load([X[:, :1]]), ValueError, "[8, 1]"),
        (lambda: batch().load([X], None), TypeError, "NoneType"),
        (lambda: batch().load([of_another_graph()]), TypeError, "symbolic tensor"),
        (
            lambda: batch(check_finite=True).load([X + NAN]),
            *(ValueError, "16 of 16 values are NaN"),
        ),
    ),
    *rows(
        "DeviceBatch.load_next",
        (lambda: batch().load_next([X]), RuntimeError, "Batch with num_buffers=2"),
        (lambda: batch(num_buffers=2).load_next(None), TypeError, "NoneType"),
    ),
    *rows(
        "DeviceBatch.use_next",
        (lambda: batch().use_next(), RuntimeError, "load_next"),
        (lambda: batch().use_next("a"), TypeError, "timeout_s must be a number; got"),
        (lambda: batch().use_next(-1.0), ValueError, "got -1.0"),
        (lambda: batch().use_next(NAN), ValueError, "got nan"),
    ),
]
ONE_OPTIMIZER = {"optimizers": [sgd()], "apply_fn": print}
FUNCTIONS = [
    *arguments(
        "EpochFunction",
        function,
        ("rows", "batch", TypeError, "batch must be a DeviceBatch; got str"),
        ("loss", None, TypeError, "got None"),
        ("models", "ab", TypeError, "got 'ab'"),
        ("models", Model(), TypeError, "a list of"),
        ("models", ["a", "b"], TypeError, "with trainable_variables, as Keras's"),
        ("models", [Strange()] * 2, ValueError, "given twice"),
        ("models", [Strange(), Strange()], TypeError, "Strange.trainable_variables m"),
        ("models", [in_graph(Model), in_graph(Model)], TypeError, "outside of graphs"),
        ("models", [], ValueError, "got 0 models"),
        ("models", [Model()], ValueError, "got 1 models and 2 optimizers"),
        ("models", [Model() for _ in range(3)], ValueError, "got 3 models and 2"),
        ("models", [Model()] * 2, ValueError, "is given twice"),
        ("models", [unbuilt(), unbuilt()], ValueError, "has no trainable variables"),
        ("optimizers", [sgd()], ValueError, "got 2 models and 1 optimizers"),
        ("optimizers", [sgd()] * 2, ValueError, "is given twice"),
        ("optimizers", "ab", TypeError, "'ab'"),
        ("optimizers", sgd(), TypeError, "a list"),
        ("optimizers", [None, sgd()], TypeError, "with apply_gradients(pairs)"),
        ("optimizers", ["adam", "sgd"], TypeError, "got str"),
        ("optimizers", [type(sgd()), keras.Model], TypeError, "got the class SGD"),
        ("reducer", "mean", TypeError, "'mean'"),
        ("grad_norm_clipping", "1", TypeError, "clipping must be a number; got '1'"),
        ("grad_norm_clipping", NAN, ValueError, "got nan"),
        ("grad_norm_clipping", -1, ValueError, "got -1"),
        ("grad_norm_clipping", float("inf"), ValueError, "must be finite; got inf"),
        ("apply_fn", "apply", TypeError, "apply_fn must be a function; got 'apply'"),
        (
            "apply_fn",
            print,
            ValueError,
            "applies with; got 2 models and 2 opt",
        ),
    ),
    *rows(
        "EpochFunction",
        (
            lambda: function(models=[Model()], **ONE_OPTIMIZER),
            *(ValueError, "must be one model per tower, and the one optimizer"),
        ),
        (
            lambda: function(models=[Model()] * 2, **ONE_OPTIMIZER),
            *(ValueError, "a model or an optimizer is given twice"),
        ),
        (
            lambda: function(**ONE_OPTIMIZER),
            *(ValueError, "SGD must be built before apply_fn uses it"),
        ),
        (
            lambda: in_graph(partial(function, batch())),
            *(RuntimeError, "outside of graphs"),
        ),
    ),
    *rows(
        "EpochFunction.optimize",
        (lambda: loaded()[1].optimize("a"), TypeError, f"batch_index {WHOLE} 'a'"),
        (lambda: loaded()[1].optimize(None), TypeError, WHOLE),
        (lambda: loaded()[1].optimize(0.5), TypeError, WHOLE),
        (lambda: loaded()[1].optimize(1), IndexError, "got 1"),
        (lambda: function().optimize(0), RuntimeError, "nothing has been loaded yet"),
    ),
    *rows(
        "EpochFunction.run_epochs",
        (lambda: loaded()[1].run_epochs("1"), TypeError, f"num_epochs {WHOLE} '1'"),
        (
            trained_on_shared,
            ValueError,
            "w:0 is one variable in towers [0, 1]",
        ),
        (lambda: loaded()[1].run_epochs(None), TypeError, WHOLE),
        (lambda: loaded()[1].run_epochs(0), ValueError, "at least 1; got 0"),
        (lambda: loaded()[1].run_epochs(1, "all"), ValueError, "must be None or one o"),
        (lambda: loaded()[1].run_epochs(1, seed=0.5), TypeError, f"seed {WHOLE} 0.5"),
        (lambda: loaded()[1].run_epochs(1, progress="yes"), TypeError, "True or False"),
        (
            lambda: in_graph(lambda: loaded()[1].run_epochs(1)),
            *(RuntimeError, "outside of graphs"),
        ),
    ),
]
MADE = "LocalSyncParallelOptimizer"
CONSTRUCTED = arguments(
    MADE,
    session_optimizer,
    ("optimizer", None, TypeError, "with apply_gradients(pairs)"),
    ("optimizer", "adam", TypeError, "got str"),
    ("optimizer", v1.train.AdamOptimizer, TypeError, "the class AdamOptimizer"),
    ("optimizer", sgd(), TypeError, "SGD, a Keras 3 optimizer, does not work"),
    ("devices", None, TypeError, "devices must be a list"),
    ("devices", "/cpu:0", TypeError, "devices must be a list"),
    ("devices", [], ValueError, "devices must hold at least one of"),
    ("devices", [None], TypeError, "a device is an int"),
    ("devices", [-1], ValueError, "-1"),
    ("devices", ["/cpu:zero"], ValueError, "is not a TensorFlow device string"),
    ("devices", ["/cpu:0", "/cpu:1", "/device:CPU:0"], ValueError, "given twice"),
    ("input_placeholders", None, TypeError, "input_placeholders must be a list"),
    ("input_placeholders", [], ValueError, "input_placeholders must hold"),
    ("input_placeholders", [X], TypeError, "got ['ndarray']"),
    ("input_placeholders", ["x"], TypeError, "got ['str']"),
    ("input_placeholders", [of_another_graph()], ValueError, "other:0"),
    ("shape", None, ValueError, "has shape <unknown>"),
    ("shape", [], ValueError, "has shape ()"),
    ("state_shapes", [None], ValueError, "column 'h' has shape <unknown>"),
    ("copies", 2, ValueError, "names of their own; twice: ['x']"),
    ("rnn_inputs", None, TypeError, "rnn_inputs must be a list"),
    ("rnn_inputs", [X], TypeError, "rnn_inputs must hold placeholders"),
    ("max_per_device_batch_size", "2", TypeError, WHOLE),
    ("max_per_device_batch_size", 2.5, TypeError, WHOLE),
    ("max_per_device_batch_size", -1, ValueError, "got -1"),
    ("build_graph", None, TypeError, "build_graph must be a function; got None"),
    ("build_graph", lambda inputs: None, TypeError, "got NoneType"),
    ("grad_norm_clipping", "1", TypeError, "must be a number; got '1'"),
    ("grad_norm_clipping", NAN, ValueError, "got nan"),
    ("grad_norm_clipping", -1.0, ValueError, "grad_norm_clipping must be at least 0"),
    ("reducer", "mean", TypeError, "reducer must be a function; got 'mean'"),
    ("remainder", "keep", ValueError, "got 'keep'"),
    ("check_finite", None, TypeError, "check_finite must be True or False"),
    ("num_buffers", 1.0, TypeError, f"num_buffers {WHOLE} 1.0"),
    ("num_buffers", 0, ValueError, "got 0"),
)
SESSIONS = [
    WrongCall(f"{MADE}.{method}", partial(with_session, call), error, says)
    for method, call, error, says in [
        ("load_data", lambda o, s: o.load_data(s, None, []), TypeError, "NoneType"),
        ("load_data", lambda o, s: o.load_data(s, [X], None), TypeError, "NoneType"),
        ("load_data", lambda o, s: o.load_data(s, [X, X], []), ValueError, "got 2"),
        ("load_data", lambda o, s: o.load_data(s, [X], [X]), ValueError, "got 1"),
        (
            *("load_data", lambda o, s: o.load_data(s, o.loss_inputs, [])),
            *(TypeError, "symbolic tensor"),
        ),
        ("load_next", lambda o, s: o.load_next(s, "x", []), TypeError, "got str"),
        ("use_next", lambda o, s: o.use_next(), RuntimeError, "no load is under way"),
        ("use_next", lambda o, s: o.use_next("1"), TypeError, "must be a number"),
        ("use_next", lambda o, s: o.use_next(-1), ValueError, "got -1"),
        ("optimize", lambda o, s: o.optimize(s, "0"), TypeError, WHOLE),
        ("optimize", lambda o, s: o.optimize(s, 1), IndexError, "got 1"),
        ("run_epochs", lambda o, s: o.run_epochs(s, None), TypeError, WHOLE),
        ("run_epochs", lambda o, s: o.run_epochs(s, 1, 7), ValueError, "got 7"),
        ("run_epochs", lambda o, s: o.run_epochs(s, 1, seed="a"), TypeError, WHOLE),
        (
            "run_epochs",
            lambda o, s: o.run_epochs(s, 1, progress=1),
            TypeError,
            "True or",
        ),
    ]
]
USES = {
    "load_data": lambda o, s: o.load_data(s, [X], []),
    "load_next": lambda o, s: o.load_next(s, [X], []),
    "optimize": lambda o, s: o.optimize(s, 0),
    "run_epochs": lambda o, s: o.run_epochs(s, 1),
}
OTHERS = [
    WrongCall(
        f"{MADE}.{method}",
        lambda c=call, m=make: with_session(lambda o, _: c(o, m())),
        *(error, says),
    )
    for method, call in USES.items()
    for make, error, says in [
        (lambda: None, TypeError, "sess must be a session"),
        (elsewhere, ValueError, "another graph"),
    ]
]
WRONG = [*PLANS, *MEANS, *BATCHES, *FUNCTIONS, *CONSTRUCTED, *SESSIONS, *OTHERS]


@pytest.mark.parametrize("row", WRONG, ids=lambda row: f"{row.name}: {row.says}")
def test_a_wrong_call_is_refused_in_a_sentence(row):
    check_wrong_call(row)


def test_every_public_name_has_wrong_calls():
    missing = names_without_wrong_calls(tw_rlload, WRONG, exempt=HANDED_OUT)
    assert missing == []
