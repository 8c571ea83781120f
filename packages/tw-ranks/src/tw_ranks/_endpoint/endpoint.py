"""This rank as exchanges need it: its number, their engine, their keys."""

import functools
import logging
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf

from tw_ranks._endpoint.hosts import Hosts
from tw_ranks._endpoint.keys import Keys
from tw_ranks._endpoint.progress import Progress
from tw_ranks._endpoint.reports import Reports
from tw_ranks._engines.choice import Engine
from tw_ranks._engines.mpi import MpiEngine

_log = logging.getLogger(__name__)
_MAX_COMPILED = 256
"""Each takes 0.3 MiB; a program with new shapes in every step adds more forever."""


@dataclass(frozen=True)
class Endpoint:
    """This rank, as its exchanges see it."""

    rank: int
    size: int
    carrier: "Carrier"
    progress: Progress
    reports: Reports
    keys: Keys
    bucket_bytes: int | None = None  # of gradients that are sent together; None: all
    hosts: Hosts | None = None  # None if each rank has a machine of its own, or none
    built: "BuiltExchanges" = field(default_factory=lambda: BuiltExchanges())

    @property
    def mpi(self) -> MpiEngine | None:
        """This process in MPI, if that is the engine."""
        return self.carrier.mpi


class Carrier:
    """The carrier of exchanges: the chosen engine, unless NCCL fails its test."""

    def __init__(self, engine: Engine, mpi: MpiEngine | None) -> None:
        self.engine, self.mpi = engine, mpi
        self.is_proven = False

    def prove(self, find_fault: Callable[[], str]) -> None:
        """Tests NCCL once: ``find_fault`` returns why it cannot be used, or "".

        If it cannot, an engine chosen by "auto" falls back to TensorFlow's ring, and
        one that was asked for raises RuntimeError.
        """
        self.is_proven = True  # Set first: an aborted test is not repeated.
        why = find_fault()
        if not why:
            return
        falls_back = self.engine.falls_back
        reason = why if falls_back else self.engine.reason
        self.engine = Engine("tensorflow", reason, falls_back=falls_back)
        if not falls_back:
            raise RuntimeError(
                f'join: engine="nccl" cannot be used: {why}. Use "tensorflow".'
            )
        _log.warning("join: engine 'tensorflow' instead of 'nccl', as %s.", why)

    @functools.cached_property
    def ordering_token(self) -> tf.Variable:
        """A variable that all of NCCL's collectives take, so that they are ordered."""
        with tf.init_scope():
            return tf.Variable(0.0, trainable=False, name="tw_ranks_order")


class BuiltExchanges:
    """Exchanges that were built, and may be run again."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._compiled: OrderedDict[int, Callable[..., Any]] = OrderedDict()
        self._of_steps: dict[int, Any] = {}
        # Session graphs in which an op holds a thread while it waits.
        self._holding_threads: weakref.WeakSet[Any] = weakref.WeakSet()

    @property
    def of_steps(self) -> Mapping[int, Any]:
        """Exchanges of training steps, by first key, for ranks without data."""
        return self._of_steps

    def add_to_step(self, key: int, exchange: Any) -> None:
        """Adds an exchange of a training step."""
        self._of_steps[key] = exchange

    def hold_thread(self, graph: Any) -> bool:
        """Notes an op that holds a thread; returns whether it is its graph's first."""
        is_first = graph not in self._holding_threads
        self._holding_threads.add(graph)
        return is_first

    def compile(
        self, key: int, trace: Callable[[], Callable[..., Any]]
    ) -> Callable[..., Any]:
        """Returns the compiled function of a key; the last few hundred are kept."""
        with self._lock:
            compiled = self._compiled.pop(key, None)
        compiled = trace() if compiled is None else compiled
        with self._lock:
            self._compiled[key] = compiled
            while len(self._compiled) > _MAX_COMPILED:
                self._compiled.popitem(last=False)
        return compiled
