"""What a session counts and runs beside its calls: batches, and the chief's rounds."""

import threading
from collections.abc import Callable

import tensorflow as tf

from tw_syncrep._protocol.graph import SyncGraph


class BatchStamps:
    """Numbers a replica's batches, so that each counts once.

    Where a session is replaced in a call, TensorFlow makes the call again, with the
    same feed: its batch keeps its stamp. Stamps grow from the session's number, a time.

    >>> stamps = BatchStamps()
    >>> stamps.begin_session(100)
    >>> stamps.begin_call()
    101
    >>> stamps.begin_session(200)
    >>> stamps.begin_call()
    101
    >>> stamps.end_call()
    >>> stamps.begin_call()
    201
    """

    def __init__(self) -> None:
        """Has numbered none."""
        self._last = 0
        self._number = 0
        self._has_returned = True
        self._is_again = False

    def begin_session(self, number: int) -> None:
        """Records that a session has joined; an open call comes again."""
        self._number = number
        self._is_again = not self._has_returned

    def begin_call(self) -> int:
        """Returns the stamp of a training call's batch."""
        if not self._is_again:
            self._last = max(self._last, self._number) + 1
        self._has_returned = self._is_again = False
        return self._last

    def end_call(self) -> None:
        """Records that the call has returned."""
        self._has_returned = True


def start_rounds(
    session: tf.compat.v1.Session,
    graph: SyncGraph,
    incarnation: int,
    on_failure: Callable[[Exception], None],
) -> threading.Event:
    """Starts a thread that runs the chief's rounds until its session is closed.

    It is not one of the coordinator's threads: those are waited for at the end, and
    this one waits for gradients that then do not come.

    Args:
      session: not wrapped.
      graph: with the op of a round.
      incarnation: that the session has begun.
      on_failure: gets what a round raised, such as the loss of its server, which the
        replica's own step need not have noticed: the session must be replaced.

    Returns:
      Once it is set, no further round begins and no failure is reported.
    """
    run_round = session.make_callable(graph.round_op, [graph.incarnation])
    stopped = threading.Event()

    def run() -> None:
        while not stopped.is_set():
            try:
                run_round(incarnation)
            except Exception as error:
                if not stopped.is_set():
                    on_failure(error)
                return

    threading.Thread(target=run, name="tw-syncrep-chief", daemon=True).start()
    return stopped
