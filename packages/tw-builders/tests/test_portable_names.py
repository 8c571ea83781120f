"""Towers are told which variables a model without towers cannot restore."""

import logging

import pytest
import tensorflow as tf
from session_builders import BUILDERS

from tw_core import map_towers, towers
from tw_core.contexts import TrainTowerContext
from tw_core.testing import CPUS
from tw_core.variables import Replicated

v1 = tf.compat.v1
MAKERS = {"tf.Variable": tf.Variable, "v1.Variable": v1.Variable}


def by_get_variable(value, name, **options):
    return v1.get_variable(name, initializer=value, **options)


def told(caplog):
    return [own.getMessage() for own in caplog.records if own.name == "tw_core"]


def called(build, make, count=1, **options):
    def tower():
        with v1.variable_scope("enc"):
            return make(1.0, name="w", **options)

    with tf.Graph().as_default():
        build(CPUS[:count]).call_for_each_tower(tower)
        return [v.op.name for v in v1.global_variables()]


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("kind", BUILDERS)
def test_the_warning_has_the_name_and_the_portable_one(kind, make, caplog):
    count = 2 if kind in ("replicated", "sharded") else 1
    with caplog.at_level(logging.WARNING):
        saved = called(BUILDERS[kind], MAKERS[make], count)
    assert saved == ["tower0/enc/w"]
    [message] = told(caplog)
    assert message.startswith("tower0: checkpoints will hold tower0/enc/w, with the")
    assert "the same model without towers calls enc/w." in message
    assert "make variables with tf.compat.v1.get_variable" in message


@pytest.mark.parametrize("kind", BUILDERS)
def test_what_is_saved_by_its_own_name_is_not_warned_of(kind, caplog):
    assert called(BUILDERS[kind], by_get_variable, 2) == ["enc/w"]
    assert told(caplog) == []


def test_what_is_not_saved_is_not_warned_of(caplog):
    with tf.Graph().as_default(), TrainTowerContext("tower0"):
        v1.Variable(0.0, collections=[v1.GraphKeys.LOCAL_VARIABLES])
    with tf.Graph().as_default(), TrainTowerContext(""):
        v1.Variable(0.0)
    with (
        tf.Graph().as_default(),
        TrainTowerContext("tower0"),
        v1.variable_scope("tower0"),
    ):
        v1.get_variable("w", [])
    assert told(caplog) == []


def test_a_towers_variables_are_in_one_warning_and_a_functions_in_none(caplog):
    saved = called(BUILDERS["parameter server"], tf.Variable, 2, trainable=False)
    assert saved == ["tower0/enc/w", "tower1/enc/w"]
    assert [own.partition(":")[0] for own in told(caplog)] == ["tower0", "tower1"]
    caplog.clear()

    def tower(tower):
        with Replicated().scope(tower):
            return [tf.Variable(0.0, name=name) for name in "ab"]

    with tf.Graph().as_default(), tf.name_scope("outer"):
        map_towers(tower, towers(CPUS[:2]))
    [message] = told(caplog)
    assert "hold outer/tower0/a, outer/tower0/b, with" in message
    assert "calls outer/a, outer/b." in message
    made = []

    @tf.function(autograph=False)
    def step():
        if not made:
            made.extend(map_towers(lambda _: tf.Variable(0.0), towers(CPUS[:2])))

    caplog.clear()
    step()  # is saved by objects
    assert len(made) == 2 and told(caplog) == []
