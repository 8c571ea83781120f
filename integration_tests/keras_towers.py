"""A plugin of pytest that turns the models of Keras's tests into towers.

``clients/keras.py`` rewrites the tests so that they train and evaluate what ``towers``
returns for their models. The first tower is the test's own model, the others are
copies of it: of the object, whatever its class takes to be made.
"""

import copy
import copyreg
import os
import types
from typing import Any

import keras
import pytest
import tensorflow as tf
from keras.src.saving.keras_saveable import KerasSaveable
from keras.src.utils.tracking import (
    TrackedDict,
    TrackedList,
    TrackedOrderedDict,
    TrackedSet,
)

import tw_builders

NUM_TOWERS = 2
ENV_PLAIN = "KERAS_TESTS_PLAIN"  # leaves the models as they are
_made: list[tuple[Any, Any]] = []  # a test's models with their towers


def pytest_configure(config: pytest.Config) -> None:
    """Makes the devices of the towers, and the names that Keras's tests know."""
    cpu = tf.config.list_physical_devices("CPU")[0]
    logical = [tf.config.LogicalDeviceConfiguration()] * NUM_TOWERS
    tf.config.set_logical_device_configuration(cpu, logical)
    config.addinivalue_line("markers", "requires_trainable_backend: ours is")
    KerasSaveable.__deepcopy__ = _copy_object
    keras.Variable.__deepcopy__ = _copy_variable
    for kind in (TrackedList, TrackedDict, TrackedOrderedDict, TrackedSet):
        kind.__deepcopy__ = _copy_tracked
    for kind in (types.ModuleType, tf.__internal__.FuncGraph):
        copyreg.pickle(kind, repr)  # a string: the copy of a model has the same


@pytest.fixture(autouse=True)
def forget_towers(record_property: Any) -> Any:
    """Starts a test without towers, and records how many it has made."""
    _made.clear()
    yield
    record_property("towers", len(_made))


def towers(model: Any) -> Any:
    """Returns the ``TowerModel`` of a model, always the same; else what it is given."""
    is_plain = isinstance(model, keras.Model)
    if not is_plain or isinstance(model, tw_builders.TowerModel) or _is_off():
        return model
    for plain, made in _made:
        if model is plain:
            return made
    models = iter([model, *(_copied(model) for _ in range(1, NUM_TOWERS))])
    made = tw_builders.TowerModel(
        lambda: next(models), [f"/cpu:{k}" for k in range(NUM_TOWERS)]
    )
    _made.append((model, made))
    return made


def plain(model: Any) -> Any:
    """Returns tower 0 of a ``TowerModel``, or else what it is given."""
    return model.towers[0] if isinstance(model, tw_builders.TowerModel) else model


def _is_off() -> bool:
    return os.environ.get(ENV_PLAIN) == "1"


def _copied(model: Any) -> Any:
    if not model.compiled:
        strategy = tf.distribute.get_strategy()  # of optimizers; there is only one
        return copy.deepcopy(model, {id(strategy): strategy})
    read, saved = model.__reduce__()  # one that was loaded, which Keras can save
    return read(*saved)


def _copy_object(one: Any, memo: dict[int, Any]) -> Any:
    is_layer = isinstance(one, keras.Layer)
    new = (keras.Layer if is_layer else object).__new__(type(one))
    memo[id(one)] = new
    wrapped = ("build", "quantize") if is_layer else ()  # by __new__, around the object
    own = {name: value for name, value in vars(one).items() if name not in wrapped}
    vars(new).update(copy.deepcopy(own, memo))
    return new


def _copy_tracked(tracked: Any, memo: dict[int, Any]) -> Any:
    new = type(tracked)()  # without a tracker, which would refuse what is added
    memo[id(tracked)] = new
    plain: Any = dict if isinstance(tracked, dict) else type(tracked).__bases__[0]
    values = copy.deepcopy(plain(tracked), memo)
    if isinstance(tracked, list):
        new.extend(values)
    else:
        new.update(values)
    vars(new).update(copy.deepcopy(vars(tracked), memo))
    return new


def _copy_variable(variable: Any, memo: dict[int, Any]) -> Any:
    new = copy.copy(variable)
    memo[id(variable)] = new
    if variable._value is not None:
        new._value = tf.Variable(
            variable._value, trainable=variable.trainable, name=variable.name
        )
    return new
