"""Every public name answers a wrong call in a sentence that says who refuses."""

from functools import partial

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras
from keras.optimizers import SGD, LossScaleOptimizer

import tw_ampopt
from tw_ampopt import (
    DynamicLossScale,
    GradualLossScale,
    Optimizer,
    SimpleAdam,
    StaticLossScale,
    StatisticsHook,
    StatisticsWriter,
    TowerOptimizer,
)
from tw_core import towers
from tw_core.testing import CPUS, WrongCall, check_wrong_call, names_without_wrong_calls
from tw_reduce import mean, sum_balanced

v1 = tf.compat.v1
NAN = float("nan")
ONES = np.ones(2, np.float32)


def rows(name, call, *cases):
    """Makes a row of each (arguments, error, part of the message)."""
    return [
        WrongCall(
            name,
            partial(call, **args) if isinstance(args, dict) else partial(call, *args),
            error,
            says,
        )
        for args, error, says in cases
    ]


def variable(dtype=tf.float32, **arguments):
    return tf.Variable(tf.cast(tf.ones(2), dtype), name="w", **arguments)


# Calls; those in a session graph have one of their own.


def in_graph(call):
    def build(*args, **kwargs):
        with tf.Graph().as_default(), tf.device("/cpu:0"):
            return call(*args, **kwargs)

    return build


@in_graph
def make_optimizer(**arguments):
    """Makes it and one step, which some arguments are not used before."""
    optimizer = Optimizer(**arguments)
    w = variable()
    optimizer.register_gradients(tf.reduce_sum(w), [w])
    optimizer.apply_updates()


def make_tower_optimizer(**arguments):
    w = variable()
    TowerOptimizer(**({"variables": [w]} | arguments)).apply([ONES])


@in_graph
def register(loss=None, variables=None):
    w = variable()
    loss = tf.reduce_sum(w) if loss is None else loss(w)
    Optimizer("T").register_gradients(loss, [w] if variables is None else variables(w))


def of_optimizer(method, **settings):
    """Calls a method of an ``Optimizer`` that has a step for one variable."""

    def call(make_arguments):
        w = variable()
        optimizer = Optimizer("T", **settings)
        optimizer.apply_gradients([(ONES, w)])
        getattr(optimizer, method)(**make_arguments(w))

    return in_graph(call)


def of_tower_optimizer(method, **settings):
    """The same, of a ``TowerOptimizer``."""

    def call(make_arguments):
        w = variable()
        optimizer = TowerOptimizer([w], name="T", **settings)
        getattr(optimizer, method)(**make_arguments(w))

    return call


def of_adam(method):
    def call(make_arguments):
        getattr(SimpleAdam(), method)(**make_arguments(variable()))

    return in_graph(call)


def given(**arguments):
    """Gives the same arguments whatever the variable."""
    return (lambda w: arguments,)


def elsewhere(make):
    """Makes something in a graph of its own."""
    with tf.Graph().as_default(), tf.device("/cpu:0"):
        return make()


# What several share.


def of_settings(name, make, steps):
    """Arguments that both optimizers take; ``steps`` names that of micro-batches."""
    return rows(
        name,
        make,
        ({"name": None}, TypeError, "name must be a string; got None"),
        ({"name": ""}, ValueError, "name must not be empty"),
        ({"name": "a b"}, ValueError, "name must begin with a letter"),
        ({"tf_optimizer": None}, TypeError, "got None"),
        ({"tf_optimizer": 3}, TypeError, "tf_optimizer must be a class"),
        (
            {"tf_optimizer": keras.optimizers.Adam()},
            TypeError,
            "tf_optimizer must be a cl",
        ),
        ({"tf_optimizer": SimpleAdam()}, TypeError, "every tower needs its own opt"),
        ({"tf_optimizer": "adam"}, ValueError, "'adam' could not be resolved"),
        ({"tf_optimizer": "tf.train.NoSuch"}, ValueError, "could not be resolved"),
        ({"tf_optimizer": "no.such.thing"}, ValueError, "could not be resolved"),
        (
            {"tf_optimizer": "keras.optimizers"},
            TypeError,
            "tf_optimizer must be a class",
        ),
        (
            {"tf_optimizer": "tf.constant"},
            TypeError,
            "called with learning_rate and []",
        ),
        ({"tf_optimizer": tf.Variable}, ValueError, "called with learning_rate and []"),
        (
            {"tf_optimizer": lambda **_: None},
            TypeError,
            "cannot wrap builtins.NoneType; can wrap tf.compat.v1.train",
        ),
        (
            {"tf_optimizer": tf_keras.optimizers.Adam},
            TypeError,
            "cannot wrap tf_keras.",
        ),
        (
            {"tf_optimizer": lambda learning_rate: LossScaleOptimizer(SGD())},
            TypeError,
            "it scales the loss itself",
        ),
        (
            {"tf_optimizer": lambda learning_rate: SGD(gradient_accumulation_steps=2)},
            TypeError,
            "it accumulates itself; let tw_ampopt do so",
        ),
        ({"beta3": 1.0}, TypeError, "learning_rate and ['beta3']"),
        ({"learning_rate": None}, TypeError, "learning_rate must be a number"),
        ({"learning_rate": "0.1"}, TypeError, "got '0.1'"),
        ({"learning_rate": True}, TypeError, "got True"),
        ({"learning_rate": NAN}, ValueError, "learning_rate must be finite; got nan"),
        ({"learning_rate": float("inf")}, ValueError, "must be finite; got inf"),
        (
            {"learning_rate": lambda: 0.1},
            TypeError,
            "function of the number of updates",
        ),
        (
            {"learning_rate": lambda u: None},
            TypeError,
            "must return a number or a scalar",
        ),
        ({steps: "2"}, TypeError, f"{steps} must be a whole number of micro-batches"),
        ({steps: True}, TypeError, "whole number of micro-batches"),
        ({steps: [2]}, TypeError, "whole number of micro-batches"),
        ({steps: np.bool_(True)}, TypeError, "whole number of micro-batches"),
        ({steps: 0}, ValueError, f"{steps} must be a whole number of 1 or more; got 0"),
        ({steps: -1}, ValueError, "whole number of 1 or more; got -1"),
        ({steps: float("inf")}, ValueError, "got inf"),
        ({steps: NAN}, ValueError, "got nan"),
        ({steps: 2.5}, ValueError, "got 2.5"),
        ({"share": 3}, TypeError, f"share must be a tw_ampopt.{name}; got 3"),
        ({"loss_scale": "dynamic"}, TypeError, "must be a rule such as tw_ampopt.Dyn"),
        ({"loss_scale": DynamicLossScale}, TypeError, "loss_scale must be a rule"),
        ({"on_nonfinite": "skip"}, ValueError, "must be one of ['skip_group', 'drop"),
        ({"on_nonfinite": None}, ValueError, "got None"),
        ({"clip_by_global_norm": "a"}, TypeError, "must be a number; got 'a'"),
        ({"clip_by_global_norm": 0}, ValueError, "must be above 0"),
        ({"clip_by_global_norm": NAN}, ValueError, "must be finite"),
        ({"clip_by_global_norm": True}, TypeError, "must be a number; got True"),
        ({"master_copies": "no"}, TypeError, "must be True or False; got 'no'"),
        ({"report_mem_usage": None}, TypeError, "must be True or False; got None"),
        ({"reducer": "nccl"}, TypeError, "reducer must be a function; got 'nccl'"),
        ({"reducer": mean(sum_balanced)}, ValueError, "reducer averages already"),
    )


def of_pairs(name, call):
    """Arguments of ``apply_gradients``."""
    pair = "grads_and_vars"

    def one(make):
        return (lambda w: {pair: [make(w)]},)

    def with_pair(**arguments):
        return (lambda w: {pair: [(ONES, w)], **arguments},)

    return rows(
        name,
        call,
        (given(grads_and_vars=None), TypeError, "pairs; got None"),
        (given(grads_and_vars=3), TypeError, "pairs; got 3"),
        (given(grads_and_vars="ab"), TypeError, "pairs; got 'ab'"),
        (given(grads_and_vars=[None]), TypeError, "got [None]"),
        (
            (lambda w: {pair: [(ONES, w)] * 2},),
            ValueError,
            "['w:0'] came more than once",
        ),
        (given(grads_and_vars=[]), ValueError, "got []"),
        (one(lambda w: (ONES, None)), TypeError, "only resource variables"),
        (one(lambda w: (ONES, "w")), TypeError, "got ['w']"),
        (one(lambda w: (ONES, ONES)), TypeError, "only resource variables"),
        (one(lambda w: (ONES, w, 3)), TypeError, "(gradient, variable) pairs"),
        (one(lambda w: ("a", w)), TypeError, "got 'a' for w:0"),
        (one(lambda w: (None, w)), ValueError, "no gradient for any variable"),
        (
            one(lambda w: (np.ones(3), w)),
            ValueError,
            "w:0 (2,) has a gradient of shape",
        ),
        (one(lambda w: (np.complex64(ONES), w)), TypeError, "got complex64 for w:0"),
        (one(lambda w: (np.int32(ONES), w)), TypeError, "got int32 for w:0"),
        (one(lambda w: (ONES > 0, w)), TypeError, "got bool for w:0"),
        (one(lambda w: (ONES, variable(tf.int32))), TypeError, ":0 of int32"),
        (one(lambda w: (ONES, variable(tf.complex64))), TypeError, ":0 of complex64"),
        (
            one(lambda w: (ONES, elsewhere(variable))),
            ValueError,
            "the variable w:0 of another graph",
        ),
        (
            one(lambda w: (elsewhere(lambda: tf.ones(2)), w)),
            ValueError,
            "the gradient of w:0 in tower 0 of another graph",
        ),
        (with_pair(global_step=3), TypeError, "global_step must be a variable"),
        (with_pair(global_step="a"), TypeError, "got 'a'"),
        (with_pair(name=3), TypeError, "name must be a string; got 3"),
        (with_pair(name="a b"), ValueError, "name must begin with a letter"),
        (
            (lambda w: {pair: [(ONES, w)], "global_step": w},),
            ValueError,
            "global_step must be a scalar; got shape (2,)",
        ),
        (
            (lambda w: {pair: [(ONES, w)], "global_step": tf.Variable("a")},),
            TypeError,
            "global_step must be numeric; got string",
        ),
    )


def of_losses(name, call):
    """Arguments of ``compute_gradients``."""

    def with_loss(**arguments):
        return (lambda w: {"loss": tf.reduce_sum(w), **arguments},)

    return rows(
        name,
        call,
        (given(loss=None), TypeError, "loss must be a tensor; got None"),
        (given(loss=3.0), TypeError, "loss must be a tensor; got 3.0"),
        (
            (lambda w: {"loss": w * 2.0},),
            ValueError,
            "scalar; got a tensor of shape (2,)",
        ),
        ((lambda w: {"loss": tf.constant(1)},), TypeError, "dtype; got int32"),
        (
            (lambda w: {"loss": elsewhere(lambda: tf.constant(1.0))},),
            ValueError,
            "the loss of another graph",
        ),
        (with_loss(var_list=3), TypeError, "var_list must be a list of variables"),
        (with_loss(var_list="a"), TypeError, "got 'a'"),
        (with_loss(var_list=["a"]), TypeError, "got ['a']"),
        (with_loss(var_list=[None]), TypeError, "got [None]"),
        (with_loss(var_list=[]), ValueError, "got var_list=[]"),
        (with_loss(foo=3), TypeError, "unknown options ['foo']"),
    )


def of_values(name, call):
    """Arguments of ``apply_loss_scaling`` and ``undo_loss_scaling``."""
    return rows(
        name,
        call,
        (given(value=None), TypeError, "value must be a tensor, e.g. a loss; got None"),
        (given(value=2.0), TypeError, "got 2.0"),
        (given(value="a"), TypeError, "got 'a'"),
        ((lambda w: {"value": tf.constant(1)},), TypeError, "got int32"),
        ((lambda w: {"value": tf.constant("a")},), TypeError, "got string"),
        (
            (lambda w: {"value": elsewhere(lambda: tf.constant(1.0))},),
            ValueError,
            "value of another graph",
        ),
    )


def of_slots(name, call):
    return rows(
        name,
        call,
        (given(var=None, name="m"), TypeError, "var must be a variable; got None"),
        (given(var="w", name="m"), TypeError, "got 'w'"),
        (given(var=ONES, name="m"), TypeError, "var must be a variable"),
        ((lambda w: {"var": w, "name": None},), TypeError, "name must be a string"),
        ((lambda w: {"var": w, "name": ["m"]},), TypeError, "got ['m']"),
    )


def of_flags(name, call):
    return rows(
        name,
        call,
        *(
            (given(flags=flags), ValueError, "here [1, 1], the value of")
            for flags in (None, 3, "a", [], [True], [[True, False]], [["a"]], [[1.0]])
        ),
    )


def of_gradients(name, call):
    """Arguments of ``TowerOptimizer.apply`` and ``nonfinite_gradients``."""
    rows_of_text = tf.IndexedSlices(tf.ones(1), tf.constant(["a"]))
    matrix_rows = tf.IndexedSlices(tf.ones([1, 2]), tf.constant([0]))
    rows_of_floats = tf.IndexedSlices(tf.ones(1), tf.constant([1.0]))
    return rows(
        name,
        call,
        (given(grads=None), TypeError, "grads must be [K][N] gradients"),
        (given(grads="ab"), TypeError, "got 'ab'"),
        (given(grads=ONES), TypeError, "grads must be [K][N] gradients"),
        (given(grads=["a"]), TypeError, "got 'a' for w:0 in tower 0"),
        (given(grads=["a", "b"]), ValueError, "got [2]"),
        (given(grads=[]), ValueError, "got [0]"),
        (given(grads=[[ONES], None]), TypeError, "got lists and others"),
        (given(grads=[[ONES], [ONES]]), ValueError, "got [1, 1]"),
        (given(grads=[None]), ValueError, "no gradient for any variable"),
        (given(grads=[1.0]), TypeError, "got 1.0 for w:0"),
        (given(grads=[np.ones(3)]), ValueError, "has a gradient of shape (3,)"),
        (given(grads=[matrix_rows]), ValueError, "w:0 (2,) has a gradient of shape"),
        (given(grads=[np.complex64(ONES)]), TypeError, "got complex64 for w:0"),
        (given(grads=[ONES > 0]), TypeError, "got bool for w:0"),
        (given(grads=[rows_of_text]), TypeError, "indices of string for w:0"),
        (given(grads=[rows_of_floats]), TypeError, "indices of float32 for w:0"),
        (
            given(grads=[tf.sparse.from_dense([1.0, 2.0])]),
            TypeError,
            "a gradient is a tensor of a floating dtype",
        ),
    )


OPTIMIZER = [
    *of_settings("Optimizer", make_optimizer, "minibatch_multiplier"),
    *rows(
        "Optimizer",
        make_optimizer,
        ({"use_loss_scaling": "no"}, TypeError, "must be True or False; got 'no'"),
        ({"use_loss_scaling": True, "loss_scaling_init": "a"}, TypeError, "got 'a'"),
        ({"use_loss_scaling": True, "loss_scaling_init": NAN}, ValueError, "got nan"),
        ({"use_loss_scaling": True, "loss_scaling_inc": -1}, ValueError, "at least 0"),
        ({"use_loss_scaling": True, "loss_scaling_dec": None}, TypeError, "got None"),
        (
            {"use_loss_scaling": True, "loss_scaling_init": -1.0},
            ValueError,
            "initial log2 must lie within the bounds",
        ),
        (
            {"use_loss_scaling": True, "loss_scale": GradualLossScale()},
            ValueError,
            "two rules for one scale",
        ),
    ),
    *rows(
        "Optimizer.register_gradients",
        register,
        ({"loss": lambda w: None}, TypeError, "loss must be a tensor; got None"),
        ({"loss": lambda w: 3.0}, TypeError, "loss must be a tensor; got 3.0"),
        ({"loss": lambda w: w * 2.0}, ValueError, "got a tensor of shape (2,)"),
        ({"loss": lambda w: tf.constant(1)}, TypeError, "got int32"),
        ({"loss": lambda w: tf.constant("a")}, TypeError, "got string"),
        ({"loss": lambda w: tf.constant(1j)}, TypeError, "got complex128"),
        (
            {"loss": lambda w: elsewhere(lambda: tf.reduce_sum(variable()))},
            ValueError,
            "the loss of another graph",
        ),
        ({"variables": lambda w: 3}, TypeError, "must be a list or dict"),
        ({"variables": lambda w: "ab"}, TypeError, "got 'ab'"),
        ({"variables": lambda w: []}, ValueError, "trainable_vars is empty"),
        ({"variables": lambda w: {}}, ValueError, "trainable_vars is empty"),
        ({"variables": lambda w: [None]}, TypeError, "got [None]"),
        ({"variables": lambda w: ["a"]}, TypeError, "only resource variables"),
        (
            {"variables": lambda w: [v1.Variable(ONES, use_resource=False)]},
            TypeError,
            "tf.compat.v1.enable_resource_variables()",
        ),
        ({"variables": lambda w: [w, w]}, ValueError, "['w:0'] more than once"),
        ({"variables": lambda w: [variable(tf.int32)]}, TypeError, "of int32"),
        ({"variables": lambda w: [variable(tf.complex64)]}, TypeError, "of complex64"),
        (
            {"variables": lambda w: [elsewhere(variable)]},
            ValueError,
            "the variable w:0 of another graph",
        ),
    ),
    *rows(
        "Optimizer.apply_updates",
        in_graph(lambda **arguments: Optimizer("T").apply_updates(**arguments)),
        ({"allow_no_op": "no"}, TypeError, "must be True or False; got 'no'"),
        ({"allow_no_op": None}, TypeError, "got None"),
        ({}, ValueError, "no gradients were registered"),
    ),
    *rows(
        "Optimizer.get_loss_scaling_var",
        of_optimizer("get_loss_scaling_var"),
        (given(device=None), TypeError, "device must be a string; got None"),
        (given(device=3), TypeError, "got 3"),
        (given(device="a b"), ValueError, "'a b' is not a TensorFlow device string"),
    ),
    *of_losses("Optimizer.compute_gradients", of_optimizer("compute_gradients")),
    *of_pairs("Optimizer.apply_gradients", of_optimizer("apply_gradients")),
    *of_slots("Optimizer.get_slot", of_optimizer("get_slot")),
    *of_flags("Optimizer.nonfinite_names", of_optimizer("nonfinite_names")),
]
TOWER_OPTIMIZER = [
    *of_settings("TowerOptimizer", make_tower_optimizer, "accumulation_steps"),
    *rows(
        "TowerOptimizer",
        make_tower_optimizer,
        ({"variables": None}, TypeError, "must be one list per tower"),
        ({"variables": "ab"}, TypeError, "got 'ab'"),
        ({"variables": ["a"]}, TypeError, "got ['a']"),
        ({"variables": [ONES]}, TypeError, "only resource variables"),
        ({"variables": [None]}, TypeError, "got [None]"),
        ({"variables": []}, ValueError, "no variables; build the model"),
        ({"variables": [[]]}, ValueError, "no variables; build the model"),
        ({"towers": 3}, TypeError, "towers must be a list of tw_core.Tower"),
        ({"towers": []}, ValueError, "towers is empty"),
        ({"towers": ["/cpu:0"]}, TypeError, "got ['/cpu:0']"),
        ({"towers": [None]}, TypeError, "got [None]"),
        ({"towers": towers(CPUS[:1])[0]}, TypeError, "towers must be a list of"),
    ),
    *rows(
        "TowerOptimizer",
        lambda make: TowerOptimizer(make()),
        ((lambda: [[variable()], None],), TypeError, "got lists and others"),
        ((lambda: [[[variable()]]],), TypeError, "only resource variables"),
        ((lambda: [variable(tf.int32)],), TypeError, ":0 of int32"),
        ((lambda: [variable(tf.complex64)],), TypeError, ":0 of complex64"),
        ((lambda: [tf.Variable("a", name="w")],), TypeError, "w:0 of string"),
        ((lambda: [elsewhere(variable)],), ValueError, "w:0 of another graph"),
    ),
    *of_gradients("TowerOptimizer.apply", of_tower_optimizer("apply")),
    *of_gradients(
        "TowerOptimizer.nonfinite_gradients", of_tower_optimizer("nonfinite_gradients")
    ),
    *rows(
        "TowerOptimizer.get_loss_scaling_var",
        of_tower_optimizer("get_loss_scaling_var"),
        (given(device=None), TypeError, "device must be a string; got None"),
        (given(device=3), TypeError, "got 3"),
    ),
    *of_losses(
        "TowerOptimizer.compute_gradients", of_tower_optimizer("compute_gradients")
    ),
    *of_pairs("TowerOptimizer.apply_gradients", of_tower_optimizer("apply_gradients")),
    *of_slots("TowerOptimizer.get_slot", of_tower_optimizer("get_slot")),
    *of_flags("TowerOptimizer.nonfinite_names", of_tower_optimizer("nonfinite_names")),
]
SCALING = [
    row
    for method in ("apply_loss_scaling", "undo_loss_scaling")
    for settings in ({}, {"loss_scale": StaticLossScale(3)})
    for name, of in (
        ("Optimizer", of_optimizer),
        ("TowerOptimizer", of_tower_optimizer),
    )
    for row in of_values(f"{name}.{method}", of(method, **settings))
]


def of_rules():
    """Numbers of the scale rules."""
    for name in ("init", "increment", "decrement", "lowest", "highest"):
        yield from rows(
            "GradualLossScale",
            GradualLossScale,
            ({name: None}, TypeError, f"{name} must be a number; got None"),
            ({name: "3"}, TypeError, f"{name} must be a number; got '3'"),
            ({name: True}, TypeError, f"{name} must be a number; got True"),
            ({name: NAN}, ValueError, f"{name} must be"),
        )
    for rule, names in (
        (
            DynamicLossScale,
            ("init", "growth_interval", "lowest", "highest", "hysteresis"),
        ),
        (StaticLossScale, ("log2",)),
    ):
        for name in names:
            yield from rows(
                rule.__name__,
                rule,
                ({name: None}, TypeError, f"{{'{name}': None}}"),
                ({name: "3"}, TypeError, f"{{'{name}': '3'}}"),
                ({name: 2.5}, TypeError, f"{{'{name}': 2.5}}"),
                ({name: True}, TypeError, f"{{'{name}': True}}"),
            )
    yield from rows(
        "GradualLossScale",
        GradualLossScale,
        ({"increment": -1}, ValueError, "increment must be at least 0; got -1"),
        ({"decrement": float("inf")}, ValueError, "decrement must be finite"),
        ({"init": -1.0}, ValueError, "must lie within the bounds; got init=-1.0"),
        ({"lowest": 121.0}, ValueError, "must lie within -120..120"),
    )
    yield from rows(
        "DynamicLossScale",
        DynamicLossScale,
        ({"growth_interval": 0}, ValueError, "growth_interval counts updates"),
        ({"hysteresis": 0}, ValueError, "hysteresis counts updates"),
        ({"init": 25}, ValueError, "must lie within the bounds"),
    )
    yield from rows(
        "StaticLossScale",
        StaticLossScale,
        ({"log2": 121}, ValueError, "within -120..120"),
    )


SIMPLE_ADAM = [
    *rows(
        "SimpleAdam",
        SimpleAdam,
        ({"name": None}, TypeError, "name must be a string; got None"),
        ({"name": ""}, ValueError, "name must not be empty"),
        ({"name": "a b"}, ValueError, "name must begin with a letter"),
        ({"learning_rate": None}, TypeError, "learning_rate must be a number"),
        ({"learning_rate": "a"}, TypeError, "got 'a'"),
        ({"learning_rate": [1]}, TypeError, "got [1]"),
        ({"learning_rate": NAN}, ValueError, "learning_rate must be finite; got nan"),
        ({"beta1": 2.0}, ValueError, "beta1 must be below 1; got 2.0"),
        ({"beta1": -1}, ValueError, "beta1 must be at least 0; got -1"),
        ({"beta1": "a"}, TypeError, "beta1 must be a number; got 'a'"),
        ({"beta2": 1.0}, ValueError, "beta2 must be below 1; got 1.0"),
        ({"beta2": None}, TypeError, "beta2 must be a number; got None"),
        ({"epsilon": -1}, ValueError, "epsilon must be at least 0; got -1"),
        ({"epsilon": NAN}, ValueError, "epsilon must be finite"),
    ),
    *rows(
        "SimpleAdam",
        lambda make: SimpleAdam(learning_rate=make()),
        ((lambda: tf.ones(2),), ValueError, "must be a scalar; got shape (2,)"),
        ((lambda: tf.constant("a"),), TypeError, "must be numeric; got string"),
        ((lambda: tf.constant(NAN),), ValueError, "must be finite; got nan"),
    ),
    *of_losses("SimpleAdam.compute_gradients", of_adam("compute_gradients")),
    *rows(
        "SimpleAdam.compute_gradients",
        lambda: SimpleAdam().compute_gradients(tf.constant(1.0)),
        ((), RuntimeError, "needs a graph"),
    ),
    *of_pairs("SimpleAdam.apply_gradients", of_adam("apply_gradients")),
    *of_slots("SimpleAdam.get_slot", of_adam("get_slot")),
]


def make_hook(make=lambda optimizer: optimizer, logdir="logs", **arguments):
    with tf.Graph().as_default():
        StatisticsHook(make(Optimizer("T")), logdir, **arguments)


def make_writer(make=lambda optimizer: optimizer, logdir="logs"):
    StatisticsWriter(make(TowerOptimizer([variable()])), logdir)


def write(folder, **arguments):
    writer = StatisticsWriter(TowerOptimizer([variable()]), folder)
    try:
        writer.write(**arguments)
    finally:
        writer.close()


STATISTICS = [
    *rows(
        "StatisticsHook",
        make_hook,
        ({"make": lambda o: None}, TypeError, "tw_ampopt.Optimizer; got None"),
        ({"make": lambda o: "o"}, TypeError, "got 'o'"),
        ({"make": lambda o: SimpleAdam()}, TypeError, "SimpleAdam"),
        ({"logdir": None}, TypeError, "logdir must be a string; got None"),
        ({"logdir": 3}, TypeError, "logdir must be a string; got 3"),
        ({"logdir": ""}, ValueError, "logdir must not be empty"),
        ({"every_steps": 0}, ValueError, "every_steps must be at least 1; got 0"),
        ({"every_steps": "a"}, TypeError, "every_steps must be a whole number"),
        ({"every_steps": 2.5}, TypeError, "got 2.5"),
        ({"name_nonfinite": "no"}, TypeError, "must be True or False; got 'no'"),
    ),
    *rows(
        "StatisticsWriter",
        make_writer,
        ({"make": lambda o: None}, TypeError, "tw_ampopt.TowerOptimizer; got None"),
        ({"make": lambda o: "o"}, TypeError, "got 'o'"),
        ({"logdir": None}, TypeError, "logdir must be a string; got None"),
        ({"logdir": ""}, ValueError, "logdir must not be empty"),
    ),
]
WRONG_CALLS = [
    *OPTIMIZER,
    *TOWER_OPTIMIZER,
    *SCALING,
    *of_rules(),
    *SIMPLE_ADAM,
    *STATISTICS,
]
EXEMPT = {
    # What the optimizer calls with the state that it keeps.
    *(
        f"{rule}.{method}"
        for rule in (
            "GradualLossScale",
            "DynamicLossScale",
            "StaticLossScale",
            "NoOpLossScale",
        )
        for method in ("scale", "next")
    ),
    # What sessions call.
    "StatisticsHook.after_create_session",
    "StatisticsHook.after_run",
    "StatisticsHook.before_run",
    "StatisticsHook.end",
    # Needs a folder: below.
    "StatisticsWriter.write",
}


@pytest.mark.parametrize("row", WRONG_CALLS, ids=lambda r: f"{r.name} {r.says[:40]}")
def test_a_wrong_call_is_refused_in_a_sentence(row):
    check_wrong_call(row)


def test_every_public_name_has_wrong_calls():
    assert names_without_wrong_calls(tw_ampopt, WRONG_CALLS, exempt=EXEMPT) == []


@pytest.mark.parametrize(
    ("step", "error", "says"),
    [
        ("a", TypeError, "step must be a whole number; got 'a'"),
        (2.5, TypeError, "step must be a whole number; got 2.5"),
        (-1, ValueError, "step must be at least 0; got -1"),
    ],
)
def test_a_wrong_step_of_the_axis_is_refused(tmp_path, step, error, says):
    call = partial(write, str(tmp_path), step=step)
    check_wrong_call(WrongCall("StatisticsWriter.write", call, error, says))


def test_nothing_is_written_after_closing(tmp_path):
    writer = StatisticsWriter(TowerOptimizer([variable()]), tmp_path)
    writer.close()
    check_wrong_call(
        WrongCall(
            "StatisticsWriter.write", writer.write, RuntimeError, "comes after close"
        )
    )


def test_an_eager_tensor_or_variable_in_a_session_graph_is_refused():
    w = variable()
    loss = tf.reduce_sum(w)
    for call, says in (
        (lambda: register(loss=lambda _: loss), "the loss of another graph, of eager"),
        (lambda: register(variables=lambda _: [w]), "the variable w:0 of another"),
    ):
        row = WrongCall("Optimizer.register_gradients", call, ValueError, says)
        check_wrong_call(row)


@pytest.mark.parametrize(
    "reducer",
    [
        lambda grads: None,
        lambda grads: [None] * len(grads),
        lambda grads: grads[:1],
        lambda grads: [tower[:0] for tower in grads],
        lambda grads: [[tf.zeros([3]) for _ in tower] for tower in grads],
        lambda grads: [["a" for _ in tower] for tower in grads],
    ],
)
def test_a_reducer_that_returns_no_sums_is_refused(reducer):
    lists = [[variable()] for _ in range(2)]
    optimizer = TowerOptimizer(
        lists, name="T", towers=towers(CPUS[:2]), reducer=reducer
    )
    call = partial(optimizer.apply, [[ONES], [ONES]])
    says = "'T'.apply: reducer must return [K][M] sums"
    check_wrong_call(WrongCall("TowerOptimizer.apply", call, ValueError, says))


@pytest.mark.parametrize("kind", ["tf.train.GradientDescentOptimizer", SimpleAdam])
def test_a_negative_learning_rate_is_fine(kind):
    w = variable()
    TowerOptimizer([w], tf_optimizer=kind, learning_rate=-1.0).apply([ONES])
    np.testing.assert_allclose(w, [2, 2], rtol=1e-5)
