"""Ranks whose data ends before that of other ranks.

Either a rank that is done keeps taking part in the exchanges of each step, with zeros,
until all are done; or the run ends on all ranks as soon as the first is done.

A batch may have weight 0, e.g. if all its rows are masked. So the weight of a rank that
is done is -0.0, and that of any other 0.0 or more: their sum is -0.0 if and only if all
are done. Adding -0.0 also leaves every bit of any sum as it is.
"""

import contextlib
import math
import threading
from collections.abc import Iterable, Iterator
from typing import TypeVar

import tensorflow as tf

from tw_ranks import _tf_compat
from tw_ranks._agreement import END, PROOF, Exchange
from tw_ranks._endpoint.endpoint import Endpoint
from tw_ranks._exchanges.collectives import add_up
from tw_ranks._exchanges.gradients import follow_exchange
from tw_ranks._exchanges.running import prove_nccl, run_collectives
from tw_ranks._group import ProcessGroup, endpoint_of

_Batch = TypeVar("_Batch")
_END = Exchange(END, ())


def finish(group: ProcessGroup) -> int:
    """Takes part in other ranks' steps, with zeros, until all ranks have finished.

    Every rank calls it when its data has ended, instead of running more steps, even if
    it had no data at all. It takes part in all sums and means that other ranks have
    traced, as often as they run them. Weighted means are over the ranks that
    contribute.

    Args:
      group: the ranks.

    Returns:
      The number of other ranks' steps that this rank took part in.

    Raises:
      RuntimeError: other ranks have started a collective in which a rank without data
        cannot take part, such as a broadcast. They get a ``RankTimeoutError`` that
        explains it.
      RankTimeoutError: a rank is missing; or others are in a collective that they
        have run before, in which a rank without data cannot take part.
    """
    endpoint = endpoint_of(group)
    if endpoint.size == 1:
        return 0
    keys, graph = endpoint.keys, tf.Graph()
    shares: dict[int, _Share] = {}
    turns = _Turns()

    def is_over() -> bool:
        failed = any(share.error is not None for share in shares.values())
        return failed or (bool(shares) and all(s.is_done for s in shares.values()))

    while True:
        for key in endpoint.built.of_steps.keys() - shares.keys():
            shares[key] = _Share(endpoint, key, turns)
        found = keys.follow(is_over, is_idle=not shares)
        if found is None or found == _END:
            break
        if found.kind == PROOF:
            prove_nccl(endpoint)
        else:
            follow_exchange(found, endpoint, graph)
    if not any(share.error for share in shares.values()):
        for share in shares.values():  # All ranks are done, so each ends soon.
            share.join()
    for share in shares.values():
        if share.error is not None:
            raise share.error
    keys.agree(_END)  # Later exchanges do not belong to these steps.
    return max((share.steps for share in shares.values()), default=0)


class _Share(threading.Thread):
    """A thread that takes part in one exchange of each step until all are done.

    Other ranks may run the exchanges of a step in any order, so each has a thread; but
    those of NCCL have one order on all ranks, and take ``turns``.
    """

    def __init__(self, endpoint: Endpoint, key: int, turns: "_Turns") -> None:
        """Starts the thread."""
        super().__init__(name="tw-ranks-finish", daemon=True)
        self.steps = 0
        self.is_done = False
        self.error: BaseException | None = None
        self._keys, self._key, self._turns = endpoint.keys, key, turns
        self._exchange = endpoint.built.of_steps[key]
        if self._exchange.uses_nccl:
            turns.enter(key)
        self.start()

    def run(self) -> None:
        """Takes part in step after step."""
        try:
            with _tf_compat.eager_mode():
                while True:
                    with self._turns.take(self._key):
                        results = self._exchange.run_with_nothing()
                        weight = self._exchange.find_weight(results)
                    if _is_end(weight):
                        break
                    self.steps += 1
            self.is_done = True
        except BaseException as error:  # ``finish`` raises it in its caller's thread.
            self.error = error
        self._turns.leave(self._key)
        self._keys.look_again()


class _Turns:
    """Makes exchanges run in the order of their keys, all equally often.

    Keys have the order in which ranks described the exchanges, which is the step's.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._taken: dict[int, int] = {}  # Turns by key.

    def enter(self, key: int) -> None:
        """Adds an exchange, which begins at the others' current turn."""
        with self._changed:
            self._taken[key] = min(self._taken.values(), default=0)

    @contextlib.contextmanager
    def take(self, key: int) -> Iterator[None]:
        """Waits for an exchange's turn, but not if it has not entered."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_next(key))
        yield
        with self._changed:
            if key in self._taken:
                self._taken[key] += 1
            self._changed.notify_all()

    def leave(self, key: int) -> None:
        """Removes an exchange, so that the others do not wait for it."""
        with self._changed:
            self._taken.pop(key, None)
            self._changed.notify_all()

    def _is_next(self, key: int) -> bool:
        own = self._taken.get(key)
        return own is None or all(
            taken > own if other < key else taken >= own
            for other, taken in self._taken.items()
            if other != key
        )


def _is_end(weight: tf.Tensor) -> bool:
    """Whether the total weight is -0.0: all ranks are done."""
    total = float(weight[0])
    return total == 0.0 and math.copysign(1.0, total) < 0.0


def until_first_end(
    batches: Iterable[_Batch], *, group: ProcessGroup
) -> Iterator[_Batch]:
    """Yields batches until any rank has none left, then ends on all ranks.

    Before each batch ranks exchange whether they have one, which costs as much as the
    smallest sum.

    Args:
      batches: this rank's batches.
      group: the ranks.

    Yields:
      The batches.

    Raises:
      RankTimeoutError: a rank is missing.
    """
    for batch in batches:
        if not _all_have(True, group):
            return
        yield batch
    _all_have(False, group)


def _all_have(has_one: bool, group: ProcessGroup) -> bool:
    endpoint = endpoint_of(group)
    if endpoint.size == 1:
        return has_one
    with _tf_compat.eager_mode():
        [least] = run_collectives(
            lambda brought, keys: [add_up(brought[0], endpoint, keys[0], "Min")],
            [tf.constant([int(has_one)], tf.int32)],
            endpoint=endpoint,
            exchange=Exchange("whether all have a batch", ()),
        )
        return bool(least[0])
