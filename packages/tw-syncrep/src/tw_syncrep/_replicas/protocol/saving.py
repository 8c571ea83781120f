"""Holding the rounds while the chief saves, so that no checkpoint mixes two steps.

With backups, rounds go on while the chief is busy. A hold is a call that takes the
baton and keeps it until it is released; a round that is ready waits until then. Holds
and releases are numbered as they are requested, on the table's server: a release ends
every hold requested before it.
"""

from dataclasses import dataclass

import tensorflow as tf

from tw_syncrep._replicas.protocol.run_table import RunField, RunTable
from tw_syncrep.cluster._placement import detached_scope, exact_device_scope


@dataclass(frozen=True)
class HoldOps:
    """The ops that hold the rounds and release them."""

    next: tf.Tensor  # int64 [], the least number of a hold requested after this
    hold: tf.Operation  # returns when released
    held: tf.Tensor  # int64 [], the number of the last hold that began
    release: tf.Operation


def build_hold(table: RunTable) -> HoldOps:
    """Builds the ops, on the table's server."""
    with detached_scope(), exact_device_scope(table.device):
        number = _draw_number(table)
        with tf.control_dependencies([number]):
            baton = table.take_baton()
        with tf.control_dependencies([baton]):
            begun = table.write({RunField.HELD: number})
        queue = _releases(table)
        with tf.control_dependencies([begun]):
            (token,) = tf.while_loop(
                lambda token: token < number,
                lambda _: [queue.dequeue()],
                [tf.constant(0, tf.int64)],
                parallel_iterations=1,
            )
        with tf.control_dependencies([token]):
            hold = table.give_back(baton)
        return HoldOps(
            next=table.read([RunField.DRAWN])[0] + 1,
            hold=hold,
            held=table.read([RunField.HELD])[0],
            release=release_holds(table),
        )


def release_holds(table: RunTable) -> tf.Operation:
    """Returns the op, on the current device, that ends all holds requested before."""
    return _releases(table).enqueue(_draw_number(table))


def _draw_number(table: RunTable) -> tf.Tensor:
    """Draws a number greater than all before it, int64 []."""
    number = table.now(above=[table.read([RunField.DRAWN])[0]])
    with tf.control_dependencies([table.write({RunField.DRAWN: number})]):
        return tf.identity(number)


def _releases(table: RunTable) -> tf.queue.QueueBase:
    name = f"{table.baton}/releases"
    return tf.queue.FIFOQueue(-1, [tf.int64], [[]], shared_name=name, name="releases")
