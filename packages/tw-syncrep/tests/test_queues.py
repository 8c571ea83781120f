"""What ends a replica's wait, and what does not.

A private enum is imported: users get no ``WakeReason``, the hook does.
"""

import threading

import numpy as np
import pytest
import tensorflow as tf
from harness.replica_threads import new_container, start_by_hand
from syncrep_given import make, vector

from tw_syncrep._protocol.queues import WakeReason


@pytest.fixture
def waiting():
    """A replica that can wait, alone in its run: no chief ends its rounds."""

    def build(task):
        model = make(task, lambda _: [(tf.ones([3]), vector())], aggregate=1)
        model.give_token = model.opt.get_init_tokens_op(1)
        return model

    return Waiting(*start_by_hand(0, build, container=new_container()))


class Waiting:
    def __init__(self, model, session):
        self.model, self.graph = model, model.opt.sync_graph
        self.session = session
        self.reply = None
        self._thread = None
        self.open()

    def open(self):
        self.session.run(self.graph.ops.open)
        self.position = self.session.run(self.graph.position)

    def begin(self):
        self._thread = threading.Thread(target=self._wait, daemon=True)
        self._thread.start()

    def has_ended(self, within_s):
        self._thread.join(within_s)
        return not self._thread.is_alive()

    def _wait(self):
        self.reply = self.session.run(self.graph.reply)

    def wake(self, position):
        ops = self.graph.ops
        self.session.run(ops.wake, {ops.position: position})


@pytest.mark.parametrize("later", [(1, 0), (0, 1)], ids=["round", "incarnation"])
def test_what_was_to_end_an_earlier_wait_does_not_end_a_later_one(waiting, later):
    waiting.wake(waiting.position - np.array(later))
    waiting.begin()
    assert not waiting.has_ended(within_s=0.3)
    waiting.wake(waiting.position)
    assert waiting.has_ended(within_s=20)
    np.testing.assert_array_equal(
        waiting.reply, [*waiting.position, 0, WakeReason.WATCHDOG]
    )


def test_an_initial_token_that_comes_late_ends_a_wait_once(waiting):
    waiting.begin()
    assert not waiting.has_ended(within_s=0.3)
    waiting.session.run(waiting.model.give_token)
    assert waiting.has_ended(within_s=20)
    np.testing.assert_array_equal(
        waiting.reply, [*waiting.position, 0, WakeReason.TABLE_CHANGED]
    )
    waiting.begin()
    assert not waiting.has_ended(within_s=0.3)
    waiting.wake(waiting.position)
    assert waiting.has_ended(within_s=20)
    # One of an older incarnation is void.
    waiting.session.run(waiting.model.give_token)
    waiting.open()
    waiting.begin()
    assert not waiting.has_ended(within_s=0.3)
    waiting.wake(waiting.position)
    assert waiting.has_ended(within_s=20)
