"""Calls that must be refused in a sentence, for every public name that takes any."""

from contextlib import nullcontext

import keras
import tensorflow as tf
from harness.wrong_calls import Interface, WrongCall, WrongCalls

from tw_core.testing import CPUS
from tw_keras import TowerModel

TWO = list(CPUS[:2])


def dense():
    return keras.Sequential([keras.layers.Input([1]), keras.layers.Dense(1)])


GIVEN = {
    "devices": lambda: TWO,
    "TowerModel.devices": lambda: TWO,
    "make_model": lambda: dict,
    "data": lambda: iter(()),
    "steps": lambda: 2,
    "TowerModel": lambda: TowerModel(dense, TWO),
    "callback": keras.callbacks.Callback,
}
EXEMPT = {
    "Python calls it": "TowerModel.__getattr__ TowerModel.__setattr__",
    "Keras answers": (
        "TowerModel.name TowerModel.compile TowerModel.fit TowerModel.evaluate "
        "TowerModel.predict TowerModel.predict_step "
        "TowerModel.test_step TowerModel.train_step TowerModel.set_weights "
        "TowerModel.predict_on_batch "
        "TowerModel.make_train_function TowerModel.make_test_function "
        "TowerModel.make_predict_function TowerModel.save TowerModel.save_weights"
    ),
}
INTERFACE = Interface(
    "tw-keras",
    GIVEN,
    lambda _: nullcontext(),
    named={".devices": "towers|devices"},
    exempt=EXEMPT,
)


class Needy(keras.Model):
    def __init__(self, units):
        super().__init__()


OTHERS = {
    "TowerModel.make_model": [
        (
            lambda units, *, rate: dense(),
            *(
                TypeError,
                "called without arguments, once per tower; got one with missing",
            ),
        ),
        (Needy, TypeError, "once per tower; got one with missing a required argument"),
        (lambda: None, TypeError, "must return a keras.Model; got NoneType"),
    ],
    "TowerModel.devices": [
        ([], ValueError, "devices is empty; at least one tower is needed"),
        (
            "/cpu:0",
            TypeError,
            "or a list of ints and device strings; got '/cpu:0'",
        ),
        ([None], TypeError, "one of tf.config.list_logical_devices(); got None"),
    ],
    "compare.steps": [(0, ValueError, "steps must be at least 1; got 0")],
    "TowerModel.variables": [("mirrored", ValueError, "must be 'replicated' or")],
    "TowerModel.loss_reduction": [("mean", ValueError, "must be 'sum' or None")],
    "TowerModel.data": [("mine", ValueError, "data must be 'own' or 'shared'")],
    "TowerModel.uneven": [("pad", ValueError, "uneven must be 'wait' or 'stop'")],
    "TowerModel.wire_dtype": [("float32", ValueError, "must be 'float16' or")],
}


def in_a_graph():
    with tf.Graph().as_default():
        TowerModel(dense, TWO)


ROWS = [
    *INTERFACE.rows(OTHERS),
    WrongCall("TowerModel", in_a_graph, RuntimeError, "made outside of gr"),
]


class TestWrongCalls(WrongCalls):
    interface, rows = INTERFACE, ROWS
