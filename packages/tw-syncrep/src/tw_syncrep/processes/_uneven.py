"""Ranks whose data ends before that of others.

Either the rank that is done goes on taking part in the exchanges of each step, with
zeros and with weight zero, until all are done; or the run ends for all at the first
end.
"""

from collections.abc import Iterable, Iterator
from typing import TypeVar

import tensorflow as tf

from tw_syncrep import _tf_compat
from tw_syncrep.processes._agreement import Exchange
from tw_syncrep.processes._collectives import add_up, run_collectives
from tw_syncrep.processes._group import ProcessGroup

_Batch = TypeVar("_Batch")


def finish(group: ProcessGroup) -> int:
    """Takes part in the others' steps, with nothing, until all ranks have finished.

    To be called where this rank's data has ended, instead of more steps, by all ranks.
    A step is all sums and means that this rank has traced, in this order: what is done
    now and then (a validation's mean) needs a group without ``finish``. Means that were
    given weights are over those that brought something.

    Args:
      group: the ranks.

    Returns:
      How many steps of others this rank took part in.

    Raises:
      RuntimeError: this rank has traced no step, so it does not know what others do.
      ReplicaTimeoutError: a rank is missing.
    """
    if group.size == 1:
        return 0
    if not group.of_step:
        raise RuntimeError(
            "finish: this rank has not traced a training step yet, so it cannot take "
            "part in the others'; give each rank at least one batch, e.g. an empty one."
        )
    steps = 0
    with _tf_compat.eager_mode():
        while True:
            for place, (exchange, find_weight) in enumerate(group.of_step.values()):
                weight = find_weight(exchange.run_with_nothing())
                if place == 0 and not float(weight[0]):
                    return steps
            steps += 1


def until_first_end(
    batches: Iterable[_Batch], *, group: ProcessGroup
) -> Iterator[_Batch]:
    """Yields batches until a rank has none left; then it ends for all.

    Before each batch ranks tell each other whether they have one, which costs as much
    as the smallest sum.

    Args:
      batches: of this rank.
      group: the ranks.

    Yields:
      The batches.

    Raises:
      ReplicaTimeoutError: a rank is missing.
    """
    for batch in batches:
        if not _all_have(True, group):
            return
        yield batch
    _all_have(False, group)


def _all_have(has_one: bool, group: ProcessGroup) -> bool:
    if group.size == 1:
        return has_one
    with _tf_compat.eager_mode():
        [least] = run_collectives(
            lambda brought, key: [add_up(brought[0], group, key, "Min")],
            [tf.constant([int(has_one)], tf.int32)],
            [tf.TensorSpec([1], tf.int32)],
            group=group,
            exchange=Exchange("whether all have a batch", ()),
        )
        return bool(least[0])
