"""Every public name answers a wrong call in a sentence that says who refuses."""

from contextlib import nullcontext
from functools import cache, partial
from tempfile import TemporaryDirectory

import keras
import numpy as np
import pytest
import tensorflow as tf
from harness.wrong_calls import Interface, Late, WrongCall, WrongCalls

from tw_ampopt import (
    GradualLossScale,
    Optimizer,
    SimpleAdam,
    StaticLossScale,
    StatisticsWriter,
    TowerOptimizer,
)
from tw_core import towers
from tw_core.testing import CPUS
from tw_reduce import mean, sum_balanced

v1 = tf.compat.v1
NAN, INF = float("nan"), float("inf")
ONES = np.ones(2, np.float32)
WEIGHT = tf.Variable(ONES, name="w")
BOTH = ("Optimizer", "TowerOptimizer")
RULES = ("GradualLossScale", "DynamicLossScale", "StaticLossScale", "NoOpLossScale")


def weight():
    """The variable that the call is about, in its graph or outside of graphs."""
    if tf.executing_eagerly():
        return WEIGHT
    made = v1.trainable_variables()
    return made[0] if made else variable()


def variable(dtype=tf.float32):
    return tf.Variable(tf.cast(tf.ones(2), dtype), name="w")


def elsewhere(make):
    """Makes something in a graph of its own."""
    with tf.Graph().as_default(), tf.device("/cpu:0"):
        return make()


def optimizer(**settings):
    """An ``Optimizer`` that has a step for one variable."""
    made = Optimizer("T", **settings)
    made.apply_gradients([(ONES, weight())])
    return made


@cache
def shared():
    """One of these in its graph, for the calls that leave it as it is."""
    with tf.Graph().as_default() as graph:
        return graph, optimizer()


def use_optimizer(**arguments):
    """Makes it and one step, which some arguments are not used before."""
    made = Optimizer(**arguments)
    made.register_gradients(tf.reduce_sum(weight()), [weight()])
    made.apply_updates()


def use_tower_optimizer(variables, **arguments):
    TowerOptimizer(variables, **arguments).apply([ONES])


def write(**arguments):
    with TemporaryDirectory() as folder:
        writer = StatisticsWriter(TowerOptimizer([WEIGHT]), folder)
        try:
            writer.write(**arguments)
        finally:
            writer.close()


GIVEN = {
    "Optimizer": lambda: shared()[1],
    "Optimizer.register_gradients": lambda: Optimizer("T"),
    "Optimizer.apply_updates": lambda: Optimizer("T"),
    "TowerOptimizer": lambda: TowerOptimizer([WEIGHT], name="T"),
    "Optimizer.use_loss_scaling": lambda: True,
    "variables": lambda: [WEIGHT],
    "grads": lambda: [ONES],
    "grads_and_vars": lambda: [(ONES, weight())],
    "loss": lambda: tf.reduce_sum(weight()),
    "trainable_vars": lambda: [weight()],
    "var": weight,
    "value": lambda: tf.constant(1.0),
    "flags": lambda: [[False]],
    "device": lambda: "/cpu:0",
    "get_slot.name": lambda: "m",
    **{f"{name}.get_slot.name": lambda: "m" for name in (*BOTH, "SimpleAdam")},
    "logdir": lambda: "logs",
    "optimizer": lambda: Optimizer("T"),
    "StatisticsWriter.optimizer": lambda: TowerOptimizer([WEIGHT]),
}
CALLS = {
    "Optimizer": use_optimizer,
    "TowerOptimizer": use_tower_optimizer,
    "StatisticsWriter.write": write,
}
NAMED = {"SimpleAdam.compute_gradients.var_list": "var_list|variables"}
EXEMPT = {
    "the optimizer calls it with the state that it keeps": " ".join(
        f"{rule}.{method}" for rule in RULES for method in ("scale", "next")
    ),
    "sessions call it": (
        "StatisticsHook.after_create_session StatisticsHook.after_run "
        "StatisticsHook.before_run StatisticsHook.end"
    ),
}


def around(name):
    if name.startswith(("TowerOptimizer", "StatisticsWriter")):
        return nullcontext()
    is_shared = name.startswith("Optimizer.") and name not in GIVEN
    return shared()[0].as_default() if is_shared else tf.Graph().as_default()


INTERFACE = Interface(
    "tw-ampopt", GIVEN, around, named=NAMED, exempt=EXEMPT, calls=CALLS
)


def nothing(_):
    return None


SETTINGS = [
    ({"name": ""}, ValueError, "name must not be empty"),
    ({"tf_optimizer": keras.optimizers.Adam()}, TypeError, "tf_optimizer must be a cl"),
    ({"tf_optimizer": "tf.train.NoSuch"}, ValueError, "could not be resolved"),
    ({"tf_optimizer": "no.such.thing"}, ValueError, "could not be resolved"),
    ({"tf_optimizer": "keras.optimizers"}, TypeError, "tf_optimizer must be a class"),
    ({"tf_optimizer": "tf.constant"}, TypeError, "called with learning_rate and []"),
    ({"tf_optimizer": tf.Variable}, ValueError, "called with learning_rate and []"),
    ({"tf_optimizer": lambda **_: None}, TypeError, "Cannot wrap builtins.NoneType"),
    ({"beta3": 1.0}, TypeError, "learning_rate and ['beta3']"),
    ({"learning_rate": INF}, ValueError, "must be finite; got inf"),
    ({"learning_rate": lambda: 0.1}, TypeError, "function of the number of updates"),
    ({"learning_rate": nothing}, TypeError, "must return a number or a scalar"),
    ({"on_nonfinite": "skip"}, ValueError, "got 'skip'"),
    ({"clip_by_global_norm": 0}, ValueError, "must be above 0"),
    ({"reducer": mean(sum_balanced)}, ValueError, "reducer averages already"),
]
STEPS = [
    (0, ValueError, "must be a whole number of 1 or more; got 0"),
    (2.5, ValueError, "got 2.5"),
    (np.bool_(True), TypeError, "whole number of micro-batches"),
]


def one(make_variable, gradient=ONES):
    """One pair, made in the graph of the call."""
    return Late(lambda: [(gradient, make_variable())])


def grad(gradient):
    return one(weight, gradient)


PAIRS = [
    ([None], TypeError, "got [None]"),
    ([], ValueError, "got []"),
    (one(lambda: None), TypeError, "Only resource variables"),
    (Late(lambda: [(ONES, weight(), 3)]), TypeError, "(gradient, variable) pairs"),
    (Late(lambda: [(ONES, weight())] * 2), ValueError, "['w:0'] more than once"),
    (grad("a"), TypeError, "got 'a' for w:0"),
    (grad(None), ValueError, "No gradient for any variable"),
    (grad(np.ones(3)), ValueError, "w:0 (2,) has a gradient of shape"),
    (grad(np.int32(ONES)), TypeError, "got int32 for w:0"),
    (
        Late(lambda: [(tf.IndexedSlices(tf.ones(1), [0], [3]), weight())]),
        *(ValueError, "w:0 (2,) has a gradient of shape (3,)"),
    ),
    (
        Late(lambda: [(tf.IndexedSlices(tf.ones(2), [0]), weight())]),
        *(ValueError, "values (2,) for indices (1,)"),
    ),
    (one(lambda: variable(tf.complex64)), TypeError, ":0 of complex64"),
    (one(lambda: elsewhere(variable)), ValueError, "the variable w:0 of another graph"),
    (
        Late(lambda: [(elsewhere(lambda: tf.ones(2)), weight())]),
        *(ValueError, "the gradient of w:0 in tower 0 of another graph"),
    ),
]
NO_STEPS = [
    (Late(weight), ValueError, "global_step must be a scalar; got shape (2,)"),
    (
        Late(lambda: tf.Variable("a")),
        *(TypeError, "global_step must be numeric; got string"),
    ),
]
LOSSES = [
    (Late(lambda: weight() * 2.0), ValueError, "scalar; got a tensor of shape (2,)"),
    (Late(lambda: tf.constant(1)), TypeError, "dtype; got int32"),
    (
        Late(lambda: elsewhere(lambda: tf.reduce_sum(variable()))),
        *(ValueError, "the loss of another graph"),
    ),
]
VARIABLES = [([None], TypeError, "got [None]")]
VALUES = [
    ("a", TypeError, "got 'a'"),
    (Late(lambda: tf.constant(1)), TypeError, "got int32"),
    (
        Late(lambda: elsewhere(lambda: tf.constant(1.0))),
        *(ValueError, "value of another graph"),
    ),
]
SLOTS = [(ONES, TypeError, "var must be a variable")]
FLAGS = [
    (flags, ValueError, "here [1, 1], the value of")
    for flags in (None, [True], [[True, False]], [[1.0]])
]
GRADIENTS = [
    (["a"], TypeError, "got 'a' for w:0 in tower 0"),
    (["a", "b"], ValueError, "got [2]"),
    ([[ONES], None], TypeError, "got lists and others"),
    ([[ONES], [ONES]], ValueError, "got [1, 1]"),
    ([None], ValueError, "No gradient for any variable"),
    ([np.ones(3)], ValueError, "has a gradient of shape (3,)"),
    ([ONES > 0], TypeError, "got bool for w:0"),
    (
        [tf.IndexedSlices(tf.ones(1), tf.constant([1.0]))],
        *(TypeError, "indices of float32 for w:0"),
    ),
    (
        [tf.sparse.from_dense([1.0, 2.0])],
        *(TypeError, "A gradient must be a tensor of a floating dtype"),
    ),
]
ALL = (*BOTH, "SimpleAdam")
OTHERS = {
    "TowerOptimizer": SETTINGS,
    "Optimizer": [
        *SETTINGS,
        (
            {"loss_scale": "dynamic", "use_loss_scaling": False},
            *(TypeError, "got 'dynamic'"),
        ),
        (
            {"use_loss_scaling": True, "loss_scaling_init": -1.0},
            *(ValueError, "loss_scaling_init: The initial log2 must be within"),
        ),
        (
            {"use_loss_scaling": True, "loss_scale": GradualLossScale()},
            *(ValueError, "two rules for one scale"),
        ),
    ],
    "TowerOptimizer.loss_scale": [
        ("dynamic", TypeError, "got 'dynamic'"),
    ],
    "Optimizer.minibatch_multiplier": [
        *STEPS,
        (Late(lambda: tf.constant(True)), TypeError, "must be numeric; got bool"),
        (Late(lambda: tf.constant([2, 3])), ValueError, "must be a scalar; got shape"),
    ],
    "Optimizer.loss_scaling_inc": [(-1, ValueError, "at least 0")],
    "Optimizer.register_gradients.loss": LOSSES,
    "Optimizer.register_gradients.trainable_vars": [
        ([], ValueError, "trainable_vars is empty"),
        *VARIABLES,
        (Late(lambda: [weight()] * 2), ValueError, "['w:0'] more than once"),
        (
            Late(lambda: [elsewhere(variable)]),
            *(ValueError, "the variable w:0 of another graph"),
        ),
    ],
    "Optimizer.register_gradients": [
        (
            {"loss": tf.reduce_sum(WEIGHT)},
            *(ValueError, "the loss of another graph, of eager"),
        ),
    ],
    "Optimizer.apply_updates": [({}, ValueError, "No gradients were registered")],
    "Optimizer.get_loss_scaling_var.device": [
        ("a b", ValueError, "'a b' is not a TensorFlow device string"),
    ],
    "TowerOptimizer.accumulation_steps": STEPS,
    ".group": [("nccl", TypeError, "group must be a tw_core.ranks.RankGroup; got ")],
    "TowerOptimizer.towers": [
        ([], ValueError, "towers is empty"),
        (["/cpu:0"], TypeError, "got ['/cpu:0']"),
        (towers(CPUS[:1])[0], TypeError, "towers must be a list of"),
    ],
    "TowerOptimizer.variables": [
        *VARIABLES,
        ([], ValueError, "No variables; build the model"),
        ([[WEIGHT], None], TypeError, "got lists and others"),
        ([[[WEIGHT]]], TypeError, "Only resource variables"),
        ([tf.Variable("a", name="w")], TypeError, "w:0 of string"),
        (Late(lambda: [elsewhere(variable)]), ValueError, "w:0 of another graph"),
    ],
    **{
        f"TowerOptimizer.{n}.grads": GRADIENTS for n in ("apply", "nonfinite_gradients")
    },
    **{f"{name}.apply_gradients.grads_and_vars": PAIRS for name in ALL},
    **{f"{name}.apply_gradients.global_step": NO_STEPS for name in ALL},
    **{
        f"{name}.apply_gradients.name": [
            ("a b", ValueError, "name must begin with a letter")
        ]
        for name in ALL
    },
    **{f"{name}.compute_gradients.loss": LOSSES for name in ALL},
    **{
        f"{name}.compute_gradients": [
            ({"var_list": [None]}, TypeError, "got [None]"),
            ({"var_list": []}, ValueError, "got var_list=[]"),
            ({"foo": 3}, TypeError, "Unknown options ['foo']"),
        ]
        for name in ALL
    },
    **{f"{name}.get_slot.var": SLOTS for name in ALL},
    **{f"{name}.nonfinite_names.flags": FLAGS for name in BOTH},
    ".value": VALUES,
    "GradualLossScale": [
        ({"increment": -1}, ValueError, "increment must be at least 0; got -1"),
        ({"decrement": INF}, ValueError, "decrement must be finite"),
        ({"init": -1.0}, ValueError, "must be within the bounds; got init=-1.0"),
        *(
            ({"lowest": lowest, "highest": highest}, ValueError, "within -120..120")
            for lowest, highest in ((65.0, 64.0), (-200.0, 120.0))
        ),
    ],
    "DynamicLossScale": [
        ({"growth_interval": 0}, ValueError, "growth_interval must be at least 1"),
        ({"hysteresis": 0}, ValueError, "hysteresis must be at least 1"),
        ({"init": 25}, ValueError, "must be within the bounds"),
    ],
    "StaticLossScale.log2": [
        (121, ValueError, "within -120..120"),
        (True, TypeError, "GradualLossScale takes fractions"),
    ],
    "SimpleAdam": [
        ({"name": ""}, ValueError, "name must not be empty"),
        ({"beta1": 2.0}, ValueError, "beta1 must be below 1; got 2.0"),
        ({"epsilon": -1}, ValueError, "epsilon must be at least 0; got -1"),
        ({"learning_rate": Late(lambda: tf.ones(2))}, ValueError, "got shape (2,)"),
        (
            {"learning_rate": Late(lambda: tf.constant("a"))},
            *(TypeError, "must be numeric; got string"),
        ),
    ],
    ".logdir": [("", ValueError, "logdir must not be empty")],
    "StatisticsHook": [
        ({"optimizer": SimpleAdam()}, TypeError, "SimpleAdam"),
        ({"every_steps": 0}, ValueError, "every_steps must be at least 1; got 0"),
    ],
    "StatisticsWriter.write.step": [
        (-1, ValueError, "step must be at least 0; got -1")
    ],
}


def write_closed():
    with TemporaryDirectory() as folder:
        writer = StatisticsWriter(TowerOptimizer([WEIGHT]), folder)
        writer.close()
        writer.write()


def with_scale(method, value):
    """A method of an ``Optimizer`` with a scale; without one it has less to do."""
    with tf.Graph().as_default():
        getattr(optimizer(loss_scale=StaticLossScale(3)), method)(value.make())


ROWS = [
    *INTERFACE.rows(OTHERS),
    *(
        WrongCall(f"Optimizer.{method}", partial(with_scale, method, value), *case)
        for method in ("apply_loss_scaling", "undo_loss_scaling")
        for value, *case in VALUES[1:]
    ),
    WrongCall(
        "SimpleAdam",
        partial(SimpleAdam, learning_rate=tf.constant(NAN)),
        *(ValueError, "must be finite; got nan"),
    ),
    WrongCall(
        "SimpleAdam.compute_gradients",
        lambda: SimpleAdam().compute_gradients(tf.constant(1.0)),
        *(RuntimeError, "needs a graph"),
    ),
    WrongCall(
        "StatisticsWriter.write", write_closed, RuntimeError, "was called after close"
    ),
]


class TestWrongCalls(WrongCalls):
    interface, rows = INTERFACE, ROWS


def test_a_reducer_that_returns_no_sums_is_refused():
    lists = [[variable()] for _ in range(2)]
    for reducer in (
        lambda grads: None,
        lambda grads: [None] * len(grads),
        lambda grads: grads[:1],
        lambda grads: [tower[:0] for tower in grads],
        lambda grads: [[tf.zeros([3]) for _ in tower] for tower in grads],
        lambda grads: [["a" for _ in tower] for tower in grads],
    ):
        optimizer = TowerOptimizer(
            lists, name="T", towers=towers(CPUS[:2]), reducer=reducer
        )
        with pytest.raises(ValueError, match=r"^reducer must return \[K\]\[M\] sums"):
            optimizer.apply([[ONES], [ONES]])
