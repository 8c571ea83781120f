"""Ranks that are threads of one process, and meet in operations of their steps.

The n-th exchange of one rank meets the n-th of the others, and must have its names,
which Keras numbers in each process. Ranks take turns, and run one at a time: threads
that create and assign variables together were seen to get each other's values from
TensorFlow, and to crash it.
"""

import re
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

DEADLINE_S = 170  # ranks that trace wait for each other, and share two cores
_SEEDS_APART = 12_345_679


class Meeting:
    """Where ranks bring arrays, of which one makes the result of all."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.barrier = threading.Barrier(size, timeout=DEADLINE_S)
        self.turn = threading.Lock()
        self._brought: list[Any] = [None] * size
        self._result: Any = None

    def wait(self) -> int:
        """Waits for all ranks, which run meanwhile; returns a number for each."""
        if self.size == 1:
            return 0
        self.turn.release()
        try:
            return self.barrier.wait()
        finally:
            self.turn.acquire()

    def meet(self, rank: int, names: str, own: Any, combine: Any) -> Any:
        self._brought[rank] = re.sub(r"_\d+", "", names), own
        if self.wait() == 0:
            if len({names for names, _ in self._brought}) == 1:
                self._result = combine([own for _, own in self._brought])
            else:
                self._result = RuntimeError(f"ranks part: {self._brought}")
        self.wait()
        result = self._result
        self.wait()  # The next one may replace it.
        if isinstance(result, RuntimeError):
            raise result
        return result


class ThreadGroup:
    """A ``tw_core.ranks.RankGroup`` of threads, for dense tensors."""

    def __init__(self, rank: int, meeting: Meeting) -> None:
        self.rank, self.size, self._meeting = rank, meeting.size, meeting

    def sum(self, tensors: Sequence[Any], *, names: Sequence[str] = ()) -> list[Any]:
        tensors = [tf.convert_to_tensor(own) for own in tensors]

        def exchange(*own: Any) -> Any:
            arrays = [tensor.numpy() for tensor in own]
            return self._meeting.meet(self.rank, str([*names]), arrays, _add)

        sums = tf.py_function(exchange, tensors, [own.dtype for own in tensors])
        for total, own in zip(sums, tensors, strict=True):
            total.set_shape(own.shape)
        return list(sums)

    def broadcast(self, variables: Sequence[Any]) -> None:
        names = str([variable.path for variable in variables])
        own = [np.array(variable) for variable in variables]
        values = self._meeting.meet(self.rank, names, own, lambda brought: brought[0])
        for variable, value in zip(variables, values, strict=True):
            is_seed = "seed_generator_state" in variable.path
            apart = np.array([self.rank * _SEEDS_APART, 0], value.dtype)
            variable.assign(value + apart if is_seed else value)

    def bounded(self, function: Any) -> Any:
        return function

    def tell(self, what: str) -> None:
        raise NotImplementedError

    def wait_for(self, what: str) -> None:
        raise NotImplementedError


def _add(brought: Sequence[Sequence[np.ndarray]]) -> list[np.ndarray]:
    return [np.asarray(sum(column)) for column in zip(*brought, strict=True)]


def call(group: Any, size: int, module: str, name: str, *arguments: Any) -> list[Any]:
    """Has as many threads call a function; returns what each returned."""
    del group  # the process is alone
    function: Callable[..., Any] = getattr(__import__(module), name)
    meeting, results = Meeting(size), [None] * size

    def run(rank: int) -> None:
        try:
            with meeting.turn:
                results[rank] = function(ThreadGroup(rank, meeting), *arguments)
        except BaseException:
            meeting.barrier.abort()
            raise

    threads = [threading.Thread(target=run, args=[rank]) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if meeting.barrier.broken:
        raise RuntimeError("a rank failed: see above")
    return results
