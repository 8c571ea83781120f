"""Ops around the steps: starting, leaving, closing, being heard, being woken."""

from collections.abc import Sequence
from dataclasses import dataclass

import tensorflow as tf

from tw_syncrep._exact_device_scope import apart_from_the_caller, on_device
from tw_syncrep._protocol.chief import Meeting
from tw_syncrep._protocol.run_table import (
    Field,
    ReplicaField,
    mark,
    replica_key,
    replica_keys,
    ring_keys,
)
from tw_syncrep._protocol.ticket import make_notice
from tw_syncrep._protocol.wake_queues import Token
from tw_syncrep._protocol.worker import Replica


@dataclass(frozen=True)
class SessionOps:
    """What a hook runs.

    Attributes:
      join: before a replica's first step: it goes on from where the run stands.
      open: the chief's, before its first round: begins an epoch and joins it.
      initial: int64 [R], feeds ``open`` with each replica's initial tokens; as it
        comes, none.
      leave: a replica's that has no more data.
      close: ends the run for all; the chief's, at an orderly end.
      heartbeat: tells the board that a replica lives.
      wake: wakes the replica's own training op, in the wait that it is fed.
      place: int64 [2], feeds ``wake`` with the round and epoch of a wait; as it
        comes, those that the replica computes for.
      status: int64 vectors that ``read_status`` understands.
    """

    join: tf.Operation
    open: tf.Operation
    initial: tf.Tensor
    leave: tf.Operation
    close: tf.Operation
    heartbeat: tf.Operation
    wake: tf.Operation
    place: tf.Tensor
    status: Sequence[tf.Tensor]


def build_session_ops(
    meeting: Meeting, replica: Replica, *, global_step: tf.Variable
) -> SessionOps:
    """Builds them, free of the caller's devices and control inputs."""
    with apart_from_the_caller(), on_device(meeting.board.device):
        with on_device(replica.device):
            own = replica.place.read_value()
        place = tf.compat.v1.placeholder_with_default(own, [2], name="place")
        none = tf.zeros([meeting.replicas], tf.int64)
        initial = tf.compat.v1.placeholder_with_default(
            none, [meeting.replicas], name="initial"
        )
        return SessionOps(
            join=_join(meeting, replica, global_step),
            open=_open(meeting, replica, initial, global_step),
            initial=initial,
            leave=_leave(meeting, replica),
            close=_close(meeting, replica),
            heartbeat=_heartbeat(meeting, replica),
            wake=meeting.waiting.wake(replica.index, place),
            place=place,
            status=_status(meeting, global_step),
        )


def initial_rows(initial: tf.Tensor, replicas: int) -> dict[int, tf.Tensor]:
    """Returns the rows of the board for each replica's initial tokens, int64 [R]."""
    keys = replica_keys(replicas, ReplicaField.INITIAL)
    return dict(zip(keys, tf.unstack(initial, replicas), strict=True))


def _join(meeting: Meeting, replica: Replica, global_step: tf.Variable) -> tf.Operation:
    board = meeting.board
    # After a run's end, one is early for the next.
    run = tf.reduce_sum(board.read([Field.RUN, Field.CLOSED]))
    here = board.write(
        {
            replica_key(replica.index, ReplicaField.HEARD): board.now(),
            replica_key(replica.index, ReplicaField.LEFT): 0,
            replica_key(replica.index, ReplicaField.JOINED): mark(run),
        }
    )
    with tf.control_dependencies([here]):
        told = _notify(meeting, replica)
        place = board.read([Field.ROUND, Field.EPOCH])
        # Of the board's the chief may not have written any yet.
        step = tf.cast(global_step.read_value(), tf.int64)
        stand = tf.concat([place, step[tf.newaxis]], axis=0)
    return tf.group(told, replica.goes_on_at(stand))


def _notify(meeting: Meeting, replica: Replica) -> tf.Operation:
    """Has the chief look at the board again."""
    ticket, nothing = make_notice(replica.index), meeting.arrivals.payload.of_nothing()
    return meeting.arrivals.queue.enqueue([ticket, *nothing])


def _open(
    meeting: Meeting, replica: Replica, initial: tf.Tensor, global_step: tf.Variable
) -> tf.Operation:
    """Begins an epoch, and another run where the last has ended.

    What was interrupted before does not reach into the epoch. Initial tokens are
    written with it, as replicas begin their steps when they see it.
    """
    board = meeting.board
    payloads = [meeting.arrivals.payload, *(lane.payload for lane in meeting.lanes)]
    forgotten = [op for payload in payloads for op in payload.forget()]
    with tf.control_dependencies(forgotten):
        stand = board.read([Field.ROUND, Field.RUN, Field.CLOSED])
        step = global_step.read_value()
        opened = board.write(
            {
                Field.EPOCH: board.now(),
                Field.CLOSED: 0,
                Field.CHIEF: replica.index,
                Field.FIRST_ROUND: stand[0],
                Field.RUN: stand[1] + stand[2],
                Field.STEP: step,
                Field.FIRST_STEP: step,
                **initial_rows(initial, meeting.replicas),
            }
        )
    with tf.control_dependencies([opened]):
        return tf.group(
            meeting.waiting.send_all(Token.LOOK), _join(meeting, replica, global_step)
        )


def _leave(meeting: Meeting, replica: Replica) -> tf.Operation:
    """Leaves the run that it joined, which may have ended long ago."""
    board = meeting.board
    joined = board.read([replica_key(replica.index, ReplicaField.JOINED)])[0]
    gone = board.write(
        {
            replica_key(replica.index, ReplicaField.HEARD): board.now(),
            replica_key(replica.index, ReplicaField.LEFT): joined,
        }
    )
    with tf.control_dependencies([gone]):
        return _notify(meeting, replica)


def _close(meeting: Meeting, replica: Replica) -> tf.Operation:
    """Ends the run that it joined, and no later one."""
    board = meeting.board
    joined = replica_key(replica.index, ReplicaField.JOINED)
    stand = board.read([joined, Field.RUN, Field.CLOSED])
    is_own = tf.cast(tf.equal(stand[0], mark(stand[1])), tf.int64)
    closed = board.write({Field.CLOSED: tf.maximum(is_own, stand[2])})
    with tf.control_dependencies([closed]):
        return meeting.waiting.send_all(Token.LOOK)


def _heartbeat(meeting: Meeting, replica: Replica) -> tf.Operation:
    board = meeting.board
    return board.write({replica_key(replica.index, ReplicaField.HEARD): board.now()})


def _status(meeting: Meeting, global_step: tf.Variable) -> list[tf.Tensor]:
    board, replicas = meeting.board, meeting.replicas
    step = tf.reshape(tf.cast(global_step.read_value(), tf.int64), [1])
    about_run = tf.concat(
        [board.read(list(Field)), tf.reshape(board.now(), [1]), step], axis=0
    )
    about_replicas = [board.read(replica_keys(replicas, f)) for f in ReplicaField]
    about_replicas.append(tf.constant(meeting.arrivals.quota, tf.int64))
    return [about_run, tf.stack(about_replicas), board.read(ring_keys())]
