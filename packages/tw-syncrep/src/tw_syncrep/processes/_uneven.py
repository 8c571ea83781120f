"""Ranks whose data ends before that of others.

Either the rank that is done goes on taking part in the exchanges of each step, with
zeros, until all are done; or the run ends for all at the first end.

A batch may weigh nothing, as one does whose rows are all masked. So the weight of a
rank that is done is -0.0, and that of any other 0.0 or more: their sum is -0.0 where
all are done, and nowhere else. Nor does adding -0.0 change a bit of any sum.
"""

import math
import threading
from collections.abc import Iterable, Iterator
from typing import TypeVar

import tensorflow as tf

from tw_syncrep import _tf_compat
from tw_syncrep.processes._agreement import END, Exchange
from tw_syncrep.processes._collectives import add_up, run_collectives
from tw_syncrep.processes._gradient_exchange import follow_exchange
from tw_syncrep.processes._group import ProcessGroup

_Batch = TypeVar("_Batch")
_END = Exchange(END, ())


def finish(group: ProcessGroup) -> int:
    """Takes part in the others' steps, with nothing, until all ranks have finished.

    To be called where this rank's data has ended, instead of more steps, by all ranks;
    also by one that had no data at all. It takes part in all sums and means that others
    have traced, each as often as they do it. Means that were given weights are over
    those that brought something.

    Args:
      group: the ranks.

    Returns:
      How many steps of others this rank took part in.

    Raises:
      RuntimeError: others have begun what a rank without data cannot take part in, such
        as a broadcast. They get a ``ReplicaTimeoutError`` that says so.
      ReplicaTimeoutError: a rank is missing; or others are in a collective that they
        have run before, in which a rank without data cannot take part.
    """
    if group.size == 1:
        return 0
    graph = tf.Graph()
    shares: dict[int, _Share] = {}

    def is_over() -> bool:
        failed = any(share.error is not None for share in shares.values())
        return failed or (bool(shares) and all(s.is_done for s in shares.values()))

    while True:
        for key in group.of_step.keys() - shares.keys():
            shares[key] = _Share(group, key)
        found = group.follow(is_over, is_idle=not shares)
        if found is None or found == _END:
            break
        follow_exchange(found, group, graph)
    if not any(share.error for share in shares.values()):
        for share in shares.values():  # Others are over, so this one soon is.
            share.join()
    for share in shares.values():
        if share.error is not None:
            raise share.error
    group.agree(_END)  # What they do next is not of these steps.
    return max((share.steps for share in shares.values()), default=0)


class _Share(threading.Thread):
    """A thread that takes part in one exchange of each step until all are done.

    Others may do the exchanges of a step in any order, so each has a thread.
    """

    def __init__(self, group: ProcessGroup, key: int) -> None:
        """Starts the thread.

        Args:
          group: the ranks.
          key: of one of ``group.of_step``.
        """
        super().__init__(name="tw-syncrep-finish", daemon=True)
        self.steps = 0
        self.is_done = False
        self.error: BaseException | None = None
        self._group, self._key = group, key
        self.start()

    def run(self) -> None:
        """Takes part, round after round."""
        exchange, find_weight = self._group.of_step[self._key]
        try:
            with _tf_compat.eager_mode():
                while not _is_end(find_weight(exchange.run_with_nothing())):
                    self.steps += 1
            self.is_done = True
        except BaseException as error:  # Is raised by who called ``finish``.
            self.error = error
        self._group.look_again()


def _is_end(weight: tf.Tensor) -> bool:
    """Tells -0.0, the weight of ranks that are all done, from 0.0 and NaN."""
    total = float(weight[0])
    return total == 0.0 and math.copysign(1.0, total) < 0.0


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
            lambda brought, keys: [add_up(brought[0], group, keys[0], "Min")],
            [tf.constant([int(has_one)], tf.int32)],
            [tf.TensorSpec([1], tf.int32)],
            group=group,
            exchange=Exchange("whether all have a batch", ()),
        )
        return bool(least[0])
