"""The names and arguments are those of TensorFlow's class and session."""

import inspect

import pytest
import tensorflow as tf

from tw_core import OptimizerLike
from tw_syncrep import SyncReplicasOptimizer, TrainingSession, training_session

v1 = tf.compat.v1


@pytest.fixture
def graph():
    with tf.Graph().as_default() as graph:
        yield graph


METHODS = [
    "__init__",
    "compute_gradients",
    "apply_gradients",
    "minimize",
    "get_chief_queue_runner",
    "get_init_tokens_op",
    "make_session_run_hook",
    "get_slot",
    "get_slot_names",
    "variables",
]
ATTRIBUTES = ["chief_init_op", "local_step_init_op", "ready_for_local_init_op"]


@pytest.mark.parametrize("method", METHODS)
def test_a_method_takes_what_tensorflows_takes(method):
    def arguments(owner):
        signature = inspect.signature(getattr(owner, method))
        given = [
            (parameter.name, parameter.default)
            for parameter in signature.parameters.values()
            if parameter.kind is parameter.POSITIONAL_OR_KEYWORD
        ]
        return given, signature

    theirs, their_signature = arguments(v1.train.SyncReplicasOptimizer)
    ours, our_signature = arguments(SyncReplicasOptimizer)
    assert ours[: len(theirs)] == theirs
    takes_any = {p.kind for p in their_signature.parameters.values()} & {
        inspect.Parameter.VAR_POSITIONAL,
        inspect.Parameter.VAR_KEYWORD,
    }
    assert takes_any <= {p.kind for p in our_signature.parameters.values()}


def test_nothing_public_of_tensorflows_class_is_missing():
    theirs = {x for x in dir(v1.train.SyncReplicasOptimizer) if not x.startswith("_")}
    assert theirs | set(METHODS) | set(ATTRIBUTES) <= set(dir(SyncReplicasOptimizer))


def test_it_is_an_optimizer_whose_slots_are_the_wrapped_ones(graph):
    inner = v1.train.MomentumOptimizer(1.0, 0.5)
    opt = SyncReplicasOptimizer(inner, 1)
    assert isinstance(opt, v1.train.Optimizer)
    assert isinstance(opt, OptimizerLike)
    v = v1.get_variable("v", [2])
    global_step = v1.train.get_or_create_global_step()
    opt.apply_gradients([(tf.ones([2]), v)], global_step=global_step)
    assert opt.get_slot_names() == ["momentum"]
    assert opt.get_slot(v, "momentum") is inner.get_slot(v, "momentum")
    assert [x.name for x in opt.variables()] == ["v/Momentum:0"]


def test_a_training_session_takes_and_does_what_tensorflows_does():
    theirs = inspect.signature(v1.train.MonitoredTrainingSession).parameters
    ours = inspect.signature(training_session).parameters
    assert list(ours)[: len(theirs)] == list(theirs)
    beyond = list(ours.values())[len(theirs) :]
    assert {p.kind for p in beyond} == {inspect.Parameter.KEYWORD_ONLY}
    theirs = {x for x in dir(v1.train.MonitoredSession) if not x.startswith("_")}
    theirs -= {"StepContext"}  # the class that run_step_fn's functions get
    assert theirs <= set(dir(TrainingSession))
