"""The keys by which exchanges of different ranks match: all ranks agree on each."""

import logging
import threading
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import tensorflow as tf

from tw_ranks import _tf_compat
from tw_ranks._agreement import Exchange, without_paths
from tw_ranks._endpoint.progress import Progress
from tw_ranks._endpoint.reports import AGREEMENT, Reports

_log = logging.getLogger(__name__)


class DifferenceError(tf.errors.FailedPreconditionError, ValueError):  # type: ignore[misc]
    """Ranks' exchanges differ; Horovod's programs expect TensorFlow's error."""


class Keys:
    """Finds the key of each exchange, by describing new ones to the other ranks."""

    def __init__(
        self,
        progress: Progress,
        reports: Reports,
        start_runtime: Callable[[], None] | None,
    ) -> None:
        self._progress, self._reports = progress, reports
        self._start_runtime = start_runtime
        self._keys: dict[tuple[Exchange, int, bool], int] = {}
        self._paths: dict[str, str] = {}  # Of variables: rank 0's by this rank's.
        self._uses: weakref.WeakKeyDictionary[Any, dict[Exchange, int]] = (
            weakref.WeakKeyDictionary()
        )
        self._describing = threading.RLock()

    def note_use(
        self, exchange: Exchange, graph: Any, num_keys: int, *, by_name: bool
    ) -> int:
        """Returns the first of a collective's keys, on which all ranks agree.

        A collective that is built again, in another graph or after a change of the
        batch, keeps its keys; a second one of the same kind in one graph gets its own.
        Waits for all ranks if it is new, unless it is matched ``by_name``: named ones
        may be built in any order. ``graph`` is None if it runs immediately.
        """
        self._progress.note_thread()
        with self._describing:
            uses = {} if graph is None else self._uses.setdefault(graph, {})
            # Variables may have new paths on some ranks alone: all compare them again.
            is_compared = exchange.of_variables and graph is None
            told = self._with_paths(exchange)
            known = without_paths(told) if is_compared else told
            place = uses.get(known, 0)
            key = self._keys.get((known, place, by_name))
            if key is None or is_compared:
                count = num_keys if key is None else 0
                found = self.agree(exchange, count, by_name=by_name)
                key = found if key is None else key
                told = self._with_paths(exchange)  # Rank 0 may have sent others.
                known = known if is_compared else told
                self._keys[known, place, by_name] = key
                self._progress.note_agreed(key, told)
            uses[known] = place + 1
            if graph is not None:
                self._progress.note_traced(exchange.kind)
        return key

    def agree(
        self, exchange: Exchange, num_keys: int = 0, *, by_name: bool = False
    ) -> int:
        """Waits until all ranks have described one exchange; returns its first key.

        Raises ValueError if their descriptions differ.
        """
        member = self._reports.member
        if member is None:
            return 0
        # Once all agree, some ranks may run it at once, which needs all ranks' servers.
        start_runtime, self._start_runtime = self._start_runtime, None
        if start_runtime is not None:
            start_runtime()
        told = self._with_paths(exchange)
        self._progress.note_waiting(None if by_name else told)
        try:
            what = f"{AGREEMENT} {exchange.kind!r}"
            with self._reports.waiting(what, self.num_agreed):
                key, paths = member.agree(told, num_keys, by_name=by_name)
        except ValueError as error:
            unlike = DifferenceError(None, None, str(error))
            raise _tf_compat.kept_by_autograph(unlike) from None
        finally:
            self._progress.note_waiting(None)
        if paths:
            own = [tensor.name for tensor in exchange.tensors]
            self._paths.update(zip(own, paths, strict=True))
            _log.info(
                "Variables with other paths than rank 0's are paired by position: %s.",
                ", ".join(f"{one} with {self._paths[one]}" for one in own),
            )
        return key

    def follow(self, is_over: Callable[[], bool], *, is_idle: bool) -> Exchange | None:
        """Waits for a collective that other ranks describe and this rank has not.

        Returns None if ``is_over``, which is called again after ``look_again``, or if
        all ranks are idle here: they take part in nothing meanwhile.
        """
        member = self._reports.member
        if member is None:
            return None
        try:
            return member.follow(is_over, is_idle=is_idle)
        except TimeoutError:
            raise self._reports.find_absent() from None

    def look_again(self) -> None:
        """Makes ``follow`` call its ``is_over`` again."""
        if self._reports.member is not None:
            self._reports.member.look_again()

    @property
    def num_described(self) -> int:
        """The number of collectives matched by order; the same on all ranks."""
        member = self._reports.member
        return 0 if member is None else member.num_described

    @property
    def num_agreed(self) -> int:
        """The number of collectives on which ranks have agreed."""
        return len(self._keys)

    def _with_paths(self, exchange: Exchange) -> Exchange:
        """Describes variables by rank 0's paths, as far as it has sent them."""
        if not self._paths:
            return exchange
        tensors = (
            replace(t, name=self._paths.get(t.name, t.name)) for t in exchange.tensors
        )
        return replace(exchange, tensors=tuple(tensors))
