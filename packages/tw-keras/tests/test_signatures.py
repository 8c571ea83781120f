"""Keras's signatures, of which checkers and editors know, are those of this Keras."""

import inspect
from typing import get_overloads

import keras
import numpy as np
import pytest

from tw_keras import TowerModel, _model


def make_model():
    return keras.Sequential([keras.Input([2]), keras.layers.Dense(1)])


def defaults(function):
    """Maps the names of arguments, in order, to their defaults."""
    parameters = [*inspect.signature(function).parameters.values()]
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [(one.name, one.default) for one in parameters if one.kind not in kinds]


@pytest.mark.parametrize("name", ["fit", "evaluate", "predict"])
def test_the_arguments_and_defaults_are_keras_own(name):
    theirs = defaults(getattr(keras.Model, name))
    assert defaults(getattr(TowerModel, name)) == theirs


def test_an_overload_of_compile_has_the_arguments_of_keras():
    of_keras, _ = get_overloads(TowerModel.compile)
    assert defaults(of_keras) == defaults(keras.Model.compile)


@pytest.fixture
def model():
    made = TowerModel(make_model, ["/cpu:0"] * 2)
    made.compile("sgd", "mse")
    return made


@pytest.mark.parametrize("name", ["fit", "predict"])
def test_a_misspelt_argument_is_refused_as_by_keras(model, name):
    with pytest.raises(TypeError, match="unexpected keyword argument 'batchsize'"):
        getattr(model, name)(np.ones([4, 2]), batchsize=2)


def test_an_argument_of_a_newer_keras_passes_through(model, monkeypatch):
    seen = []

    def fit(self, x=None, *args, extra=None, **kwargs):
        seen.append(extra)

    monkeypatch.setattr(keras.Model, "fit", fit)
    monkeypatch.setattr(_model, "_FIT", inspect.signature(fit))
    model.fit(np.ones([4, 2]), extra=3)
    assert seen == [3]
