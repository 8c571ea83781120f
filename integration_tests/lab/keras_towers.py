"""A plugin of pytest that turns the models of Keras's tests into towers.

``clients/keras.py`` rewrites the tests so that they train and evaluate what ``towers``
returns for their models. The first tower is the test's own model, the others are
copies of it: of the object, whatever its class takes to be made.

Under ``tw-launch`` every rank runs the tests, with models that train over all ranks on
shared data. Ranks meet after each test; where they do not, all end after it.
"""

import copy
import copyreg
import os
import types
import zlib
from pathlib import Path
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

import tw_keras
import tw_ranks

NUM_TOWERS = 2
ENV_PLAIN = "KERAS_TESTS_PLAIN"  # leaves the models as they are
ENV_DONE = "KERAS_TESTS_DONE"  # a file of tests that ranks have run before
WAIT_S = 300.0
_group: Any = None
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
    if "TF_CONFIG" in os.environ:
        global _group
        _group = tw_ranks.join(first_timeout_s=WAIT_S, stall_timeout_s=WAIT_S)
        config.option.xmlpath += f".{_group.rank}"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leaves out what ranks have run before."""
    if ENV_DONE in os.environ:
        done = Path(os.environ[ENV_DONE]).read_text().splitlines()
        items[:] = [item for item in items if _named(item) not in done]


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Lets a rank end well where tests have failed, so that the others end as well."""
    own = (pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.NO_TESTS_COLLECTED)
    if _group is not None and (session.shouldstop or session.exitstatus in own):
        session.exitstatus = pytest.ExitCode.OK


@pytest.fixture(autouse=True)
def forget_towers(record_property: Any, request: pytest.FixtureRequest) -> Any:
    """Starts a test without towers, and records how many it has made."""
    _made.clear()
    if _group is None:
        yield
    else:
        name = _named(request.node)
        keras.utils.set_random_seed(zlib.crc32(name.encode()))
        yield
        try:
            _group.sum([tf.constant(1.0)], names=[f"the end of {name}"])
        except Exception:
            request.session.shouldstop = f"ranks part in {name}"
            raise
    record_property("towers", len(_made))


def towers(model: Any) -> Any:
    """Returns the ``TowerModel`` of a model, always the same; else what it is given."""
    is_plain = isinstance(model, keras.Model)
    if not is_plain or isinstance(model, tw_keras.TowerModel) or _is_off():
        return model
    for plain, made in _made:
        if model is plain:
            return made
    models = iter([model, *(_copied(model) for _ in range(1, NUM_TOWERS))])
    made = tw_keras.TowerModel(
        lambda: next(models),
        [f"/cpu:{k}" for k in range(NUM_TOWERS)],
        group=_group,
        data="own" if _group is None else "shared",
    )
    _made.append((model, made))
    return made


def plain(model: Any) -> Any:
    """Returns tower 0 of a ``TowerModel``, or else what it is given."""
    return model.towers[0] if isinstance(model, tw_keras.TowerModel) else model


def _named(item: pytest.Item) -> str:
    return ".".join(item.nodeid.split("::")[-2:])


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
