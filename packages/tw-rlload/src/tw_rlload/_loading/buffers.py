"""Which batch is on the devices, and loading the next one meanwhile.

A stack is one batch's place in the variables. Training always reads the current
stack; a load in the background fills the other one. What was refused, or failed
half-way, is never trained on, and neither is what was there before.

Several threads may call. A load into rows that another thread trains on is refused,
and so is training on rows that are being replaced: were it made to wait, the order of
threads would decide which batch a call trains on.
"""

import logging
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import contextmanager
from dataclasses import dataclass

from tw_core.checks import check_number, check_whole_number
from tw_rlload._loading.columns import Columns
from tw_rlload._loading.load import (
    LoadOptions,
    PreparedLoad,
    Writer,
    fill_stack,
    prepare,
)
from tw_rlload._loading.plan import LoadPlan
from tw_rlload._loading.report import LoadReport, make_report
from tw_rlload._loading.staging import StagingPool

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Loaded:
    """A batch that can be trained on.

    Attributes:
      stack: where it lies.
      plan: how it was cut.
      report: what became of its rows.
    """

    stack: int
    plan: LoadPlan
    report: LoadReport


@dataclass(frozen=True)
class _Pending:
    future: "Future[None]"
    loaded: Loaded


@dataclass(frozen=True, eq=False)
class _Run:
    method: str
    stack: int
    trainer: object


class Stacks:
    """The batches on the devices."""

    def __init__(self, options: LoadOptions, *, owner: str) -> None:
        """Starts with nothing loaded.

        Args:
          options: of every load.
          owner: class that the user sees; opens messages.

        Raises:
          TypeError: stacks is no whole number.
          ValueError: neither 1 nor 2 stacks.
        """
        if check_whole_number(owner, stacks=options.stacks) not in (1, 2):
            raise ValueError(
                f"{owner}: stacks must be 1, or 2 to load the next batch while the "
                f"current one trains; got {options.stacks}."
            )
        self._options, self._owner = options, owner
        self._staging = [StagingPool() for _ in range(options.stacks)]
        self._loaded: Loaded | None = None
        self._reason = "nothing has been loaded yet"
        self._pending: _Pending | None = None
        self._loading: str | None = None
        self._runs: list[_Run] = []
        # Guards the four above; never held while rows are copied or a step runs.
        self._lock = threading.Lock()
        self._said: set[str] = set()

    @property
    def loaded(self) -> Loaded | None:
        """The current batch, if there is one."""
        return self._loaded

    def require(self, caller: str) -> Loaded:
        """Returns the current batch.

        Raises:
          RuntimeError: there is none, with the reason.
        """
        loading = self._loading
        if self._loaded is None:
            if loading is not None:
                raise RuntimeError(
                    f"{caller}: {loading} is replacing the batch and has not returned "
                    "yet; wait until it does."
                )
            raise RuntimeError(
                f"{caller}: there is no batch to train on: {self._reason}. Load one "
                "first."
            )
        return self._loaded

    @contextmanager
    def training(self, trainer: object, *, caller: str) -> Iterator[Loaded]:
        """Keeps the current batch from being replaced while it is trained on.

        Args:
          trainer: whose variables change; it makes one call at a time.
          caller: method that the user called; opens messages.

        Yields:
          The current batch.

        Raises:
          RuntimeError: there is none, with the reason; or another call of the same
            trainer has not returned.
        """
        with self._lock:
            loaded = self.require(caller)
            mine = [run.method for run in self._runs if run.trainer is trainer]
            if mine:
                raise RuntimeError(
                    f"{caller}: {mine[0]} has not returned yet, and each call trains "
                    "on the variables that the last one left. Make one call at a time."
                )
            run = _Run(caller, loaded.stack, trainer)
            self._runs.append(run)
        try:
            yield loaded
        finally:
            with self._lock:
                self._runs.remove(run)

    def load(
        self,
        inputs: Columns,
        states: Columns,
        bind: Callable[[], Writer],
        *,
        caller: str,
    ) -> Loaded:
        """Replaces the current batch; returns when the new one is there.

        Args:
          inputs: columns with one row a row.
          states: columns with one row a sequence.
          bind: gives the writer of the mode; may refuse to.
          caller: method that the user called; opens messages.

        Raises:
          RuntimeError: another load is under way, or the current batch is being
            trained on; then nothing changed.
          ValueError, TypeError: the batch was refused; see ``prepare``.
        """
        with self._one_load(caller, beside_current=False) as stack:
            writer = bind()
            prepared = prepare(self._options, inputs, states, caller=caller)
            self._forget("the last load failed half-way")
            self._fill(prepared, writer, stack)
            return self._make_current(self._describe(prepared, stack))

    def load_next(
        self, inputs: Columns, states: Columns, writer: Writer, *, caller: str
    ) -> None:
        """Checks a batch, then loads it in a thread; the current one stays.

        Args:
          inputs: as in ``load``; not to be changed before ``use_next``.
          states: as in ``load``.
          writer: of the mode.
          caller: method that the user called; opens messages.

        Raises:
          RuntimeError: one stack only, a load is under way already, or the batch
            before the current one is still being trained on.
          ValueError, TypeError: the batch was refused; nothing changed.
        """
        if self._options.stacks == 1:
            raise RuntimeError(
                f"{caller}: needs a second place for the next batch; make the "
                f"{self._owner} with stacks=2 (twice the memory)."
            )
        with self._one_load(caller, beside_current=True) as stack:
            prepared = prepare(self._options, inputs, states, caller=caller)
            loaded = self._describe(prepared, stack)
            self._say_memory(loaded.report)
            executor = ThreadPoolExecutor(1, thread_name_prefix="tw-rlload")
            future = executor.submit(self._fill, prepared, writer, stack)
            self._pending = _Pending(future, loaded)
            executor.shutdown(wait=False)

    def use_next(self, timeout_seconds: float, *, caller: str) -> Loaded:
        """Waits for the load in the background and makes its batch the current one.

        Args:
          timeout_seconds: how long to wait, at most.
          caller: method that the user called; opens messages.

        Raises:
          RuntimeError: no load is under way, it failed (then nothing is loaded),
            or another thread made its batch the current one.
          TypeError, ValueError: ``timeout_seconds`` is no number, or below 0.
          TimeoutError: it takes longer; it goes on, and so does the current
            batch.
        """
        timeout_seconds = check_number(
            caller, timeout_seconds=timeout_seconds, at_least=0
        )
        with self._lock:
            self._refuse_second_load(caller)
            pending = self._pending
        if pending is None:
            raise RuntimeError(f"{caller}: no load is under way; call load_next first.")
        try:
            pending.future.result(timeout_seconds)
        except FutureTimeoutError as error:
            raise TimeoutError(
                f"{caller}: the next batch is still loading after {timeout_seconds} s; "
                "call again to wait longer. The current batch can be trained on."
            ) from error
        except Exception as error:
            with self._settled(pending, caller):
                self._forget(f"the load in the background failed: {error}")
            raise RuntimeError(
                f"{caller}: the load in the background failed: {error}"
            ) from error
        with self._settled(pending, caller):
            return self._make_current(pending.loaded)

    @contextmanager
    def _one_load(self, caller: str, *, beside_current: bool) -> Iterator[int]:
        """Gives the stack to load into, and keeps other loads out of all of them."""
        with self._lock:
            self._refuse_second_load(caller)
            if self._pending is not None:
                raise RuntimeError(
                    f"{caller}: a load is under way in the background; call use_next "
                    "first."
                )
            current = self._loaded.stack if self._loaded else int(beside_current)
            stack = 1 - current if beside_current else current
            self._refuse_under_training(stack, caller)
            self._loading = caller
            if not beside_current:
                self._forget("the last load was refused")
        try:
            yield stack
        finally:
            self._loading = None

    @contextmanager
    def _settled(self, pending: _Pending, caller: str) -> Iterator[None]:
        with self._lock:
            if self._pending is not pending:
                raise RuntimeError(
                    f"{caller}: another thread's {caller} has taken this batch; call "
                    "it once for each load_next."
                )
            self._pending = None
            yield

    def _fill(self, prepared: PreparedLoad, writer: Writer, stack: int) -> None:
        try:
            fill_stack(prepared, writer, self._staging[stack], stack)
        except BaseException:
            self._empty_after_failure(writer, stack)
            raise

    def _empty_after_failure(self, writer: Writer, stack: int) -> None:
        # Frees what was half-loaded. The failure that led here may stop this too
        # (a closed session), and must not be hidden by it.
        try:
            writer.empty(stack)
        except Exception:
            _log.warning("%s: could not free a half-loaded batch", self._owner)

    def _describe(self, prepared: PreparedLoad, stack: int) -> Loaded:
        report = make_report(
            prepared.plan,
            bytes_loaded=prepared.num_bytes,
            stacks=self._options.stacks,
        )
        return Loaded(stack, prepared.plan, report)

    def _make_current(self, loaded: Loaded) -> Loaded:
        self._loaded = loaded
        report = loaded.report
        if report.rows_dropped and "dropped" not in self._said:
            self._said.add("dropped")
            _log.warning(
                "%s: %d of %d rows do not fill a step and were dropped (said once; "
                "report.rows_dropped tells each time). tail='pad' keeps them.",
                *(self._owner, report.rows_dropped, report.rows_given),
            )
        return loaded

    def _say_memory(self, report: LoadReport) -> None:
        if "memory" not in self._said:
            self._said.add("memory")
            _log.info(
                "%s: two stacks hold up to %.1f MB on %d devices, twice the batch",
                *(self._owner, report.bytes_resident / 1e6, report.num_devices),
            )

    def _forget(self, reason: str) -> None:
        self._loaded, self._reason = None, reason

    def _refuse_second_load(self, caller: str) -> None:
        if self._loading is not None:
            raise RuntimeError(
                f"{caller}: {self._loading} has not returned yet, and one batch loads "
                "at a time; wait until it does."
            )

    def _refuse_under_training(self, stack: int, caller: str) -> None:
        methods = sorted({run.method for run in self._runs if run.stack == stack})
        if methods:
            raise RuntimeError(
                f"{caller}: {' and '.join(methods)} has not returned yet, and still "
                "trains on the rows that this load would replace; nothing was "
                "touched. Wait until it returns, or load beside them: stacks=2 and "
                "load_next."
            )


def step_start(loaded: Loaded, batch_index: int) -> int:
    """Returns the number of the first sequence of a step.

    Args:
      loaded: the current batch.
      batch_index: where the step starts, in rows of a device.

    Raises:
      IndexError: no step starts there.
      TypeError: it is no integer.
    """
    offsets = loaded.plan.batch_offsets
    first = check_whole_number("optimize", batch_index=batch_index)
    if first not in offsets:
        raise IndexError(
            f"optimize: batch_index must be one of report.batch_offsets, "
            f"{list(offsets)}; got {batch_index}."
        )
    return first // loaded.plan.sequence_length
