"""How long a replica that is not the chief waits for the variables.

A private class is imported, as only TensorFlow calls it within a step.
"""

import pytest
import tensorflow as tf

from tw_syncrep import StartTimeoutError, training_session
from tw_syncrep._session.creators import HeldSessionCreator, ReadySessionCreator

v1 = tf.compat.v1


@pytest.fixture(autouse=True)
def variable_without_a_value():
    with tf.Graph().as_default():
        yield v1.get_variable("v", [2], use_resource=True)


def test_a_session_replaced_within_a_step_raises_like_the_first_one():
    # TensorFlow's session asks its creator again after the loss of a server.
    creator = ReadySessionCreator(None, "", None, max_wait_s=1.5)
    with pytest.raises(StartTimeoutError, match=r"within 1.5 s, the lesser") as raised:
        creator.create_session()
    assert raised.value.waited_s == 1.5


def test_the_bound_that_was_reached_is_named():
    with pytest.raises(StartTimeoutError, match="within 2 s, the lesser of"):
        training_session(is_chief=False, max_wait_secs=2, start_timeout_s=60)


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
