"""Functions that are traced side by side and meet on the way.

Each tower's function runs in its own thread, one thread at a time: a thread runs until
it reaches a meeting or returns, and then the next one runs. When all have arrived,
their values are combined in the caller's thread, and every tower continues with its
answer. So ops are created in the same order in every trace, and those of a meeting
after all that any tower built before it and before all that any builds after it.
"""

import contextvars
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, TypeVar

import tensorflow as tf

from tw_core import Tower, tracing
from tw_core.modes import without_autograph
from tw_core.tracing import may_meet

_T = TypeVar("_T")
_STOP_S = 60.0


class _Ended(BaseException):
    """Unwinds a thread that was given up; no ``except Exception`` catches it."""


class _Here(threading.local):
    thread: "_TowerThread | None" = None


_here = _Here()


def tower_index() -> int | None:
    """Returns the index of the tower that is run here; None outside of towers.

    Where a step is traced once for all towers, tower 0's is run.
    """
    if may_meet():
        return 0
    return None if _here.thread is None else _here.thread.index


def meet(place: Any, brought: Any, *, answer: Any = None, waits: bool = False) -> Any:
    """Meets all towers; returns ``combine``'s answer. As ``tw_core.tracing.meet``.

    ``place`` names the meeting; equal in all towers.
    """
    if may_meet():
        return tracing.meet(place, brought, answer=answer, waits=waits)
    thread = _here.thread
    if thread is None:
        raise RuntimeError("meet: is for functions that run_in_lockstep runs.")
    tracing.check_reached(place)
    return thread.meet(place, brought)


def run_in_lockstep(
    fns: Sequence[Callable[[], _T]],
    towers: Sequence[Tower],
    combine: Callable[[Any, list[Any]], Sequence[Any]],
    *,
    scopes: Sequence[Sequence[AbstractContextManager[Any]]] = (),
) -> list[_T]:
    """Runs one function per tower, on its device and under its name.

    ``combine`` takes a place and the [K] values brought there, and returns [K] answers.
    It runs in the caller's thread, scopes and device. ``scopes``, [K] lists or empty,
    are entered in the towers' threads. The first error is raised with a note of its
    tower.
    """
    contexts, beside = _graph_contexts(), tracing.side_by_side()
    own = scopes or [()] * len(towers)
    threads = [
        _TowerThread(fn, tower, [contexts(), beside(tower.index), *more])
        for fn, tower, more in zip(fns, towers, own, strict=True)
    ]
    try:
        while any(not thread.done for thread in threads):
            for thread in threads:
                thread.go_on()
            if not all(thread.done for thread in threads):
                _answer(threads, combine)
    finally:
        for thread in threads:
            thread.end()
    return [thread.result for thread in threads]


@contextmanager
def naming(tower: Tower) -> Iterator[None]:
    """Notes a tower in errors that are raised inside."""
    try:
        yield
    except BaseException as error:
        error.add_note(f"(in {tower.name} of {tower.total}, on {tower.device})")
        raise


def _answer(
    threads: Sequence["_TowerThread"],
    combine: Callable[[Any, list[Any]], Sequence[Any]],
) -> None:
    places = [None if thread.done else thread.place for thread in threads]
    if any(place != places[0] for place in places):
        raise ValueError(
            "towers must take the same steps in the same order; here they came to "
            f"{[place or 'the end' for place in places]}. What a train_step does must "
            "not depend on which copy of the model it is."
        )
    answers = combine(places[0], [thread.brought for thread in threads])
    for thread, answer in zip(threads, answers, strict=True):
        thread.brought, thread.answer = None, answer


def _graph_contexts() -> Callable[[], AbstractContextManager[Any]]:
    """Returns a factory of contexts in which a thread builds where the caller does."""
    if tf.executing_eagerly():
        return ExitStack
    graph = tf.compat.v1.get_default_graph()
    # Else the threads would share one stack of devices and control dependencies.
    graph.switch_to_thread_local()
    scope = graph.get_name_scope()

    @contextmanager
    def build_here() -> Iterator[None]:
        with graph.as_default(), tf.name_scope(f"{scope}/" if scope else ""):
            yield

    return build_here


class _TowerThread:
    """A tower's function in a thread, which runs only while ``go_on`` waits for it."""

    def __init__(
        self,
        fn: Callable[[], Any],
        tower: Tower,
        scopes: Sequence[AbstractContextManager[Any]],
    ) -> None:
        self._fn, self._tower, self._scopes = fn, tower, scopes
        self.index = tower.index
        self._may_run, self._has_run = threading.Semaphore(0), threading.Semaphore(0)
        self._given_up = False
        self.place: Any = None
        self.brought: Any = None
        self.answer: Any = None
        self.result: Any = None
        self.error: BaseException | None = None
        self.done = False
        context = contextvars.copy_context()
        self._thread = threading.Thread(
            target=context.run, args=(self._run,), name=tower.name, daemon=True
        )
        self._thread.start()

    def go_on(self) -> None:
        """Runs the function up to its next meeting or its end; raises its error."""
        if self.done:
            return
        self._may_run.release()
        self._has_run.acquire()
        if self.error is not None and not self._given_up:
            with naming(self._tower):
                raise self.error

    def meet(self, place: Any, brought: Any) -> Any:
        """Hands control to the caller; returns with the answer."""
        self.place, self.brought = place, brought
        self._has_run.release()
        self._may_run.acquire()
        if self._given_up:
            raise _Ended
        return self.answer

    def end(self) -> None:
        """Unwinds the function if it has not ended; waits a bounded time for that."""
        self._given_up = True
        self._may_run.release()
        self._thread.join(_STOP_S)

    def _run(self) -> None:
        self._may_run.acquire()
        _here.thread = self
        try:
            if not self._given_up:
                with ExitStack() as stack:
                    stack.enter_context(self._scopes[0])
                    stack.enter_context(self._tower.scope())
                    for scope in self._scopes[1:]:
                        stack.enter_context(scope)
                    self.result = without_autograph(self._fn)()
        except _Ended:
            pass
        except BaseException as error:
            self.error = error
        self.done = True
        self._has_run.release()
