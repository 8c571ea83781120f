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


def sgd():
    return keras.optimizers.SGD(0.1)


def plan(rows=8, states=None, **options):
    return plan_load(
        rows, states, **{"num_devices": 2, "max_per_device_batch_size": 2, **options}
    )


def order(*args, **options):
    return epoch_order(*args, **options)


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


def session_optimizer(**changes):
    """The class in a graph of its own, with some arguments changed."""
    with tf.Graph().as_default():
        arguments = {
            "optimizer": v1.train.GradientDescentOptimizer(0.1),
            "devices": list(CPUS[:2]),
            "input_placeholders": [v1.placeholder(tf.float32, [None, 2], "x")],
            "rnn_inputs": [],
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
PLANS = [
    WrongCall("plan_load", lambda: plan("8"), TypeError, f"rows {WHOLE} '8' (str)"),
    WrongCall("plan_load", lambda: plan(None), TypeError, f"rows {WHOLE} None"),
    WrongCall("plan_load", lambda: plan(2.5), TypeError, f"rows {WHOLE} 2.5"),
    WrongCall("plan_load", lambda: plan(True), TypeError, f"rows {WHOLE} True"),
    WrongCall("plan_load", lambda: plan(-8), ValueError, "got -8 rows"),
    WrongCall("plan_load", lambda: plan(8, 2.0), TypeError, f"states {WHOLE} 2.0"),
    WrongCall("plan_load", lambda: plan(8, 0), ValueError, "8 rows, 0 states"),
    WrongCall("plan_load", lambda: plan(8, 3), ValueError, "cannot be divided among 3"),
    WrongCall(
        "plan_load", lambda: plan(num_devices="2"), TypeError, f"num_devices {WHOLE}"
    ),
    WrongCall(
        "plan_load", lambda: plan(num_devices=0), ValueError, "at least 1; got 0"
    ),
    WrongCall(
        "plan_load",
        lambda: plan(max_per_device_batch_size=2.5),
        TypeError,
        f"max_per_device_batch_size {WHOLE} 2.5",
    ),
    WrongCall(
        "plan_load",
        lambda: plan(max_per_device_batch_size=None),
        TypeError,
        f"max_per_device_batch_size {WHOLE} None",
    ),
    WrongCall("plan_load", lambda: plan(remainder="keep"), ValueError, "got 'keep'"),
    WrongCall("plan_load", lambda: plan(remainder=None), ValueError, "got None"),
    WrongCall(
        "epoch_order", lambda: order(None, 1), TypeError, "must be a LoadPlan, as"
    ),
    WrongCall("epoch_order", lambda: order(8, 1), TypeError, "got int"),
    WrongCall("epoch_order", lambda: order(plan(), 1.5), TypeError, WHOLE),
    WrongCall("epoch_order", lambda: order(plan(), "1"), TypeError, WHOLE),
    WrongCall("epoch_order", lambda: order(plan(), 0), ValueError, "got 0"),
    WrongCall("epoch_order", lambda: order(plan(), 1, "all"), ValueError, "got 'all'"),
    WrongCall("epoch_order", lambda: order(plan(), 1, 7), ValueError, "got 7"),
    WrongCall(
        "epoch_order",
        lambda: order(plan(), 1, "rows", seed="0"),
        TypeError,
        f"seed {WHOLE} '0'",
    ),
    WrongCall(
        "epoch_order",
        lambda: order(plan(), 1, "rows", seed=-1),
        ValueError,
        "seed must be at least 0; got -1",
    ),
]
MEANS = [
    WrongCall(
        "weighted_mean", lambda: weighted_mean(None, [1.0]), TypeError, "got None"
    ),
    WrongCall(
        "weighted_mean", lambda: weighted_mean(["a"], [1.0]), TypeError, "string"
    ),
    WrongCall(
        "weighted_mean", lambda: weighted_mean([1.0], None), TypeError, "weights"
    ),
    WrongCall("weighted_mean", lambda: weighted_mean([1], [1]), TypeError, "floating"),
    WrongCall(
        "weighted_mean",
        lambda: weighted_mean([1.0, 2.0], [1.0, 1.0, 1.0]),
        ValueError,
        "got (2,) and (3,)",
    ),
    WrongCall(
        "weighted_mean",
        lambda: weighted_mean([[1.0], [2.0]], [1.0, 1.0]),
        ValueError,
        "got (2, 1) and (2,)",
    ),
    WrongCall("weighted_mean", lambda: weighted_mean(1.0, 1.0), ValueError, "[rows]"),
]
BATCHES = [
    WrongCall("DeviceBatch", lambda: batch("ab"), TypeError, "towers must be a list"),
    WrongCall("DeviceBatch", lambda: batch(3), TypeError, "towers must be a list"),
    WrongCall("DeviceBatch", lambda: batch(["/cpu:0"]), TypeError, "towers(devices)"),
    WrongCall("DeviceBatch", lambda: batch([]), ValueError, "towers is empty"),
    WrongCall(
        "DeviceBatch", lambda: batch(towers(["/cpu:0"] * 2)), ValueError, "given twice"
    ),
    WrongCall("DeviceBatch", lambda: batch(towers(["/gpu:7"])), ValueError, "/gpu:7"),
    WrongCall("DeviceBatch", lambda: batch(columns=None), TypeError, "got None"),
    WrongCall("DeviceBatch", lambda: batch(columns=["x"]), TypeError, "a dictionary"),
    WrongCall(
        "DeviceBatch",
        lambda: batch(columns={"x": "float32"}),
        TypeError,
        "got {'x': 'str'}",
    ),
    WrongCall("DeviceBatch", lambda: batch(columns={}), ValueError, "at least one col"),
    WrongCall(
        "DeviceBatch",
        lambda: batch(columns={"x": tf.TensorSpec([])}),
        ValueError,
        "'x' has shape ()",
    ),
    WrongCall(
        "DeviceBatch",
        lambda: batch(columns={"x": tf.TensorSpec([None], tf.string)}),
        ValueError,
        "'x' has dtype string",
    ),
    WrongCall(
        "DeviceBatch", lambda: batch(states=["h"]), TypeError, "states must be a"
    ),
    WrongCall(
        "DeviceBatch",
        lambda: batch(max_per_device_batch_size=2.5),
        TypeError,
        f"max_per_device_batch_size {WHOLE} 2.5",
    ),
    WrongCall(
        "DeviceBatch",
        lambda: batch(max_per_device_batch_size=0),
        ValueError,
        "at least 1; got 0",
    ),
    WrongCall("DeviceBatch", lambda: batch(remainder="keep"), ValueError, "got 'keep'"),
    WrongCall("DeviceBatch", lambda: batch(num_buffers=3), ValueError, "got 3"),
    WrongCall(
        "DeviceBatch", lambda: batch(num_buffers="2"), TypeError, f"num_buffers {WHOLE}"
    ),
    WrongCall(
        "DeviceBatch",
        lambda: batch(check_finite="no"),
        TypeError,
        "check_finite must be True or False; got 'no'",
    ),
    WrongCall(
        "DeviceBatch", lambda: in_graph(batch), RuntimeError, "outside of graphs"
    ),
    WrongCall(
        "DeviceBatch.load",
        lambda: batch().load([X], timeout_s=-1),
        ValueError,
        "load: timeout_s must be at least 0; got -1",
    ),
    WrongCall("DeviceBatch.load", lambda: batch().load(None), TypeError, "NoneType"),
    WrongCall("DeviceBatch.load", lambda: batch().load("x"), TypeError, "got str"),
    WrongCall("DeviceBatch.load", lambda: batch().load([]), ValueError, "got 0"),
    WrongCall("DeviceBatch.load", lambda: batch().load({"y": X}), ValueError, "['y']"),
    WrongCall("DeviceBatch.load", lambda: batch().load(["x"]), ValueError, "'x'"),
    WrongCall("DeviceBatch.load", lambda: batch().load([None]), ValueError, "object"),
    WrongCall(
        "DeviceBatch.load", lambda: batch().load([X[:, :1]]), ValueError, "[8, 1]"
    ),
    WrongCall(
        "DeviceBatch.load", lambda: batch().load([X], None), TypeError, "NoneType"
    ),
    WrongCall(
        "DeviceBatch.load",
        lambda: batch().load([of_another_graph()]),
        TypeError,
        "symbolic tensor",
    ),
    WrongCall(
        "DeviceBatch.load",
        lambda: batch(check_finite=True).load([X + NAN]),
        ValueError,
        "16 of 16 values are NaN",
    ),
    WrongCall(
        "DeviceBatch.load_next",
        lambda: batch().load_next([X]),
        RuntimeError,
        "num_buffers=2",
    ),
    WrongCall(
        "DeviceBatch.load_next",
        lambda: batch(num_buffers=2).load_next(None),
        TypeError,
        "NoneType",
    ),
    WrongCall(
        "DeviceBatch.use_next", lambda: batch().use_next(), RuntimeError, "load_next"
    ),
    WrongCall(
        "DeviceBatch.use_next",
        lambda: batch().use_next("a"),
        TypeError,
        "timeout_s must be a number; got 'a'",
    ),
    WrongCall(
        "DeviceBatch.use_next", lambda: batch().use_next(-1.0), ValueError, "got -1.0"
    ),
    WrongCall(
        "DeviceBatch.use_next", lambda: batch().use_next(NAN), ValueError, "got nan"
    ),
]
FUNCTIONS = [
    WrongCall(
        "EpochFunction",
        lambda: function(apply_fn="apply"),
        TypeError,
        "apply_fn must be a function; got 'apply'",
    ),
    WrongCall(
        "EpochFunction",
        lambda: function(apply_fn=print),
        ValueError,
        "the one optimizer that it applies with; got 2 models and 2 optimizers",
    ),
    WrongCall(
        "EpochFunction",
        lambda: function(models=[Model()], optimizers=[sgd()], apply_fn=print),
        ValueError,
        "with apply_fn pass one model per tower (2)",
    ),
    WrongCall(
        "EpochFunction",
        lambda: function(models=[Model()] * 2, optimizers=[sgd()], apply_fn=print),
        ValueError,
        "a model or an optimizer is given twice",
    ),
    WrongCall(
        "EpochFunction",
        lambda: function(optimizers=[sgd()], apply_fn=print),
        ValueError,
        "SGD must be built before apply_fn uses it",
    ),
    WrongCall("EpochFunction", lambda: function("batch"), TypeError, "got str"),
    WrongCall(
        "EpochFunction",
        lambda: EpochFunction(None, loss_fn, [Model()], [sgd()]),
        TypeError,
        "batch must be a DeviceBatch; got NoneType",
    ),
    WrongCall("EpochFunction", lambda: function(loss=None), TypeError, "got None"),
    WrongCall("EpochFunction", lambda: function(models="ab"), TypeError, "got 'ab'"),
    WrongCall(
        "EpochFunction", lambda: function(models=Model()), TypeError, "a list of"
    ),
    WrongCall(
        "EpochFunction",
        lambda: function(models=["a", "b"]),
        TypeError,
        "with trainable_variables, as Keras's",
    ),
    WrongCall(
        "EpochFunction",
        lambda: function(models=[Strange(), Strange()]),
        TypeError,
        "Strange.trainable_variables must hold variables",
    ),
    WrongCall(
        "EpochFunction",
        lambda: function(models=[in_graph(Model), in_graph(Model)]),
        TypeError,
        "made outside of graphs",
    ),
    WrongCall("EpochFunction", lambda: function(models=[]), ValueError, "got 0 models"),
    WrongCall("EpochFunction", lambda: function(optimizers="ab"), TypeError, "'ab'"),
    WrongCall("EpochFunction", lambda: function(optimizers=sgd()), TypeError, "a list"),
    WrongCall(
        "EpochFunction",
        lambda: function(optimizers=[None, sgd()]),
        TypeError,
        "with apply_gradients(pairs)",
    ),
    WrongCall(
        "EpochFunction",
        lambda: function(optimizers=["adam", "sgd"]),
        TypeError,
        "got str",
    ),
    WrongCall(
        "EpochFunction",
        lambda: function(optimizers=[keras.optimizers.SGD, keras.optimizers.Adam]),
        TypeError,
        "got the class SGD",
    ),
    WrongCall("EpochFunction", lambda: function(reducer="mean"), TypeError, "'mean'"),
    WrongCall(
        "EpochFunction",
        lambda: function(grad_norm_clipping="1"),
        TypeError,
        "grad_norm_clipping must be a number; got '1'",
    ),
    WrongCall(
        "EpochFunction", lambda: function(grad_norm_clipping=NAN), ValueError, "got nan"
    ),
    WrongCall(
        "EpochFunction", lambda: function(grad_norm_clipping=-1), ValueError, "got -1"
    ),
    WrongCall(
        "EpochFunction",
        lambda: function(grad_norm_clipping=float("inf")),
        ValueError,
        "must be finite; got inf",
    ),
    WrongCall(
        "EpochFunction",
        lambda: in_graph(partial(EpochFunction, batch(), loss_fn, [Model()], [sgd()])),
        RuntimeError,
        "outside of graphs",
    ),
    WrongCall(
        "EpochFunction.optimize",
        lambda: loaded()[1].optimize("a"),
        TypeError,
        f"batch_index {WHOLE} 'a'",
    ),
    WrongCall(
        "EpochFunction.optimize", lambda: loaded()[1].optimize(None), TypeError, WHOLE
    ),
    WrongCall(
        "EpochFunction.optimize", lambda: loaded()[1].optimize(0.5), TypeError, WHOLE
    ),
    WrongCall(
        "EpochFunction.optimize", lambda: loaded()[1].optimize(1), IndexError, "got 1"
    ),
    WrongCall(
        "EpochFunction.optimize", lambda: function().optimize(0), RuntimeError, "Load"
    ),
    WrongCall(
        "EpochFunction.run_epochs",
        lambda: loaded()[1].run_epochs("1"),
        TypeError,
        f"num_epochs {WHOLE} '1'",
    ),
    WrongCall(
        "EpochFunction.run_epochs",
        lambda: loaded()[1].run_epochs(None),
        TypeError,
        WHOLE,
    ),
    WrongCall(
        "EpochFunction.run_epochs",
        lambda: loaded()[1].run_epochs(0),
        ValueError,
        "at least 1; got 0",
    ),
    WrongCall(
        "EpochFunction.run_epochs",
        lambda: loaded()[1].run_epochs(1, "all"),
        ValueError,
        "got 'all'",
    ),
    WrongCall(
        "EpochFunction.run_epochs",
        lambda: loaded()[1].run_epochs(1, "rows", seed=0.5),
        TypeError,
        f"seed {WHOLE} 0.5",
    ),
    WrongCall(
        "EpochFunction.run_epochs",
        lambda: loaded()[1].run_epochs(1, progress="yes"),
        TypeError,
        "progress must be True or False; got 'yes'",
    ),
    WrongCall(
        "EpochFunction.run_epochs",
        lambda: in_graph(lambda: loaded()[1].run_epochs(1)),
        RuntimeError,
        "outside of graphs",
    ),
]
MADE = "LocalSyncParallelOptimizer"
CONSTRUCTED = [
    WrongCall(MADE, lambda n=name, v=value: session_optimizer(**{n: v}), error, says)
    for name, value, error, says in [
        ("optimizer", None, TypeError, "with apply_gradients(pairs)"),
        ("optimizer", "adam", TypeError, "got str"),
        ("optimizer", v1.train.AdamOptimizer, TypeError, "the class AdamOptimizer"),
        ("optimizer", sgd(), TypeError, "SGD, a Keras 3 optimizer, does not work"),
        ("devices", None, TypeError, "devices must be a list"),
        ("devices", "/cpu:0", TypeError, "devices must be a list"),
        ("devices", [], ValueError, "devices must hold at least one of"),
        ("devices", [None], TypeError, "a device is an int"),
        ("devices", [-1], ValueError, "-1"),
        ("devices", ["/cpu:0"] * 2, ValueError, "given twice"),
        ("input_placeholders", None, TypeError, "input_placeholders must be a list"),
        ("input_placeholders", [], ValueError, "input_placeholders must hold"),
        ("input_placeholders", [X], TypeError, "got ['ndarray']"),
        ("input_placeholders", ["x"], TypeError, "got ['str']"),
        ("input_placeholders", [of_another_graph()], ValueError, "other:0"),
        ("rnn_inputs", None, TypeError, "rnn_inputs must be a list"),
        ("rnn_inputs", [X], TypeError, "rnn_inputs must hold placeholders"),
        ("max_per_device_batch_size", "2", TypeError, WHOLE),
        ("max_per_device_batch_size", 2.5, TypeError, WHOLE),
        ("max_per_device_batch_size", -1, ValueError, "got -1"),
        ("build_graph", None, TypeError, "build_graph must be a function; got None"),
        ("build_graph", lambda inputs: None, TypeError, "got NoneType"),
        ("grad_norm_clipping", "1", TypeError, "must be a number; got '1'"),
        ("grad_norm_clipping", NAN, ValueError, "got nan"),
        ("reducer", "mean", TypeError, "reducer must be a function; got 'mean'"),
        ("remainder", "keep", ValueError, "got 'keep'"),
        ("check_finite", None, TypeError, "check_finite must be True or False"),
        ("num_buffers", 1.0, TypeError, f"num_buffers {WHOLE} 1.0"),
        ("num_buffers", 0, ValueError, "got 0"),
    ]
]
NO_SESSION = "sess must be a session"
SESSIONS = [
    WrongCall(f"{MADE}.{method}", lambda c=call: with_session(c), error, says)
    for method, call, error, says in [
        ("load_data", lambda o, s: o.load_data(None, [X], []), TypeError, NO_SESSION),
        (
            "load_data",
            lambda o, s: o.load_data(elsewhere(), [X], []),
            ValueError,
            "another graph",
        ),
        ("load_data", lambda o, s: o.load_data(s, None, []), TypeError, "NoneType"),
        ("load_data", lambda o, s: o.load_data(s, [X], None), TypeError, "NoneType"),
        ("load_data", lambda o, s: o.load_data(s, [X, X], []), ValueError, "got 2"),
        ("load_data", lambda o, s: o.load_data(s, [X], [X]), ValueError, "got 1"),
        (
            "load_data",
            lambda o, s: o.load_data(s, o.loss_inputs, []),
            TypeError,
            "symbolic tensor",
        ),
        ("load_next", lambda o, s: o.load_next(None, [X], []), TypeError, NO_SESSION),
        (
            "load_next",
            lambda o, s: o.load_next(elsewhere(), [X], []),
            ValueError,
            "another graph",
        ),
        ("load_next", lambda o, s: o.load_next(s, "x", []), TypeError, "got str"),
        ("use_next", lambda o, s: o.use_next(), RuntimeError, "no load is under way"),
        ("use_next", lambda o, s: o.use_next("1"), TypeError, "must be a number"),
        ("use_next", lambda o, s: o.use_next(-1), ValueError, "got -1"),
        ("optimize", lambda o, s: o.optimize(None, 0), TypeError, NO_SESSION),
        (
            "optimize",
            lambda o, s: o.optimize(elsewhere(), 0),
            ValueError,
            "another graph",
        ),
        ("optimize", lambda o, s: o.optimize(s, "0"), TypeError, WHOLE),
        ("optimize", lambda o, s: o.optimize(s, 1), IndexError, "got 1"),
        ("run_epochs", lambda o, s: o.run_epochs(None, 1), TypeError, NO_SESSION),
        (
            "run_epochs",
            lambda o, s: o.run_epochs(elsewhere(), 1),
            ValueError,
            "another graph",
        ),
        ("run_epochs", lambda o, s: o.run_epochs(s, None), TypeError, WHOLE),
        ("run_epochs", lambda o, s: o.run_epochs(s, 1, 7), ValueError, "got 7"),
        (
            "run_epochs",
            lambda o, s: o.run_epochs(s, 1, seed="a"),
            TypeError,
            f"seed {WHOLE}",
        ),
        (
            "run_epochs",
            lambda o, s: o.run_epochs(s, 1, progress=1),
            TypeError,
            "progress must be True or False",
        ),
    ]
]
WRONG = [*PLANS, *MEANS, *BATCHES, *FUNCTIONS, *CONSTRUCTED, *SESSIONS]


@pytest.mark.parametrize("row", WRONG, ids=lambda row: f"{row.name}: {row.says}")
def test_a_wrong_call_is_refused_in_a_sentence(row):
    check_wrong_call(row)


def test_every_public_name_has_wrong_calls():
    missing = names_without_wrong_calls(tw_rlload, WRONG, exempt=HANDED_OUT)
    assert missing == []
