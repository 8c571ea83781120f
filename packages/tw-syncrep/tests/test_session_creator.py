"""Which sessions are made, and how long they wait for the variables.

Private classes are imported, as only TensorFlow calls them within a step.
"""

import threading

import pytest
import tensorflow as tf
from harness.ports import find_free_ports

import tw_launch
from tw_syncrep import ServerLostError, StartTimeoutError, training_session
from tw_syncrep._session.creators import HeldSessionCreator, ReadySessionCreator

v1 = tf.compat.v1


@pytest.fixture(autouse=True)
def variable_without_a_value():
    with tf.Graph().as_default():
        yield v1.get_variable("v", [2], use_resource=True)


def test_a_session_replaced_within_a_step_raises_like_the_first_one():
    # TensorFlow's session asks its creator again after the loss of a server.
    creator = ReadySessionCreator(None, "", None, max_wait_s=0.5)
    with pytest.raises(StartTimeoutError, match=r"within 0.5 s, the lesser") as raised:
        creator.create_session()
    assert raised.value.waited_s == 0.5


def test_the_bound_that_was_reached_is_named():
    with pytest.raises(StartTimeoutError, match="within 1 s, the lesser of"):
        training_session(is_chief=False, max_wait_secs=1, start_timeout_s=60)


def test_a_start_that_failed_in_the_middle_is_no_session_to_go_on_with(monkeypatch):
    asked = []

    def fails_once(creator):
        if len(asked) == 1:
            raise tf.errors.AbortedError(None, None, "half restored")
        return v1.Session()

    monkeypatch.setattr(v1.train.ChiefSessionCreator, "create_session", fails_once)
    with tf.Graph().as_default():
        v1.train.get_or_create_global_step()
        creator = HeldSessionCreator(
            v1.train.Scaffold(),
            "",
            None,
            None,
            is_held=lambda _, is_again: asked.append(is_again) or is_again,
        )
        with pytest.raises(tf.errors.AbortedError):
            creator.create_session()
        creator.create_session().close()
        creator.create_session().close()
    assert asked == [False, False, True]


class FailsLate(v1.train.SessionRunHook):
    """A user's hook in which a step waits, and fails as if its server had restarted."""

    def __init__(self):
        self.sessions = 0
        self.go_on = threading.Event()

    def after_create_session(self, session, coord):
        del session, coord
        self.sessions += 1

    def before_run(self, run_context):
        del run_context
        assert self.go_on.wait(30)
        raise tf.errors.AbortedError(None, None, "late")


@pytest.mark.parametrize("is_chief", [True, False])
def test_a_call_that_comes_back_after_it_was_left_behind_makes_no_session(is_chief):
    free = [(f"localhost:{port}",) for port in find_free_ports(2)]
    task = tw_launch.TaskConfig({"ps": free[0], "worker": free[1]}, "worker", 0)
    hook = FailsLate()
    before = set(threading.enumerate())
    with tf.Graph().as_default():
        step = v1.train.get_or_create_global_step()
        none = tf.constant([], tf.string)
        session = training_session(
            *("", is_chief),
            scaffold=v1.train.Scaffold(ready_op=none, ready_for_local_init_op=none),
            hooks=[hook],
            cluster=task,
            wait_timeout_s=1,
        )
        with pytest.raises(ServerLostError, match="cannot be reached"):
            session.run(step)
    hook.go_on.set()
    for thread in set(threading.enumerate()) - before:
        thread.join(30)
        assert not thread.is_alive()
    assert hook.sessions == 1
