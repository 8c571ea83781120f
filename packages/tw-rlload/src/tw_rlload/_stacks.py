"""Which batch is on the devices, and loading the next one meanwhile.

A stack is one batch's place in the variables. Training always reads the current
stack; a load in the background fills the other one. What was refused, or failed
half-way, is never trained on, and neither is what was there before.
"""

import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass
from operator import index

from tw_rlload._columns import Columns
from tw_rlload._load_plan import LoadPlan
from tw_rlload._load_report import LoadReport, make_report
from tw_rlload._loading import LoadOptions, PreparedLoad, Writer, fill_stack, prepare
from tw_rlload._staging import StagingPool

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


class Stacks:
    """The batches on the devices."""

    def __init__(self, options: LoadOptions, *, owner: str) -> None:
        """Starts with nothing loaded.

        Args:
          options: of every load.
          owner: class that the user sees; opens messages.

        Raises:
          ValueError: neither 1 nor 2 stacks.
        """
        if options.stacks not in (1, 2):
            raise ValueError(
                f"{owner}: stacks must be 1, or 2 to load the next batch while the "
                f"current one trains; got {options.stacks}."
            )
        self._options, self._owner = options, owner
        self._staging = [StagingPool() for _ in range(options.stacks)]
        self._loaded: Loaded | None = None
        self._reason = "nothing has been loaded yet"
        self._pending: _Pending | None = None
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
        if self._loaded is None:
            raise RuntimeError(
                f"{caller}: there is no batch to train on: {self._reason}. Load one "
                "first."
            )
        return self._loaded

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
          RuntimeError: a load is under way in the background.
          ValueError, TypeError: the batch was refused; see ``prepare``.
        """
        self._refuse_while_loading(caller)
        stack = self._loaded.stack if self._loaded else 0
        self._forget("the last load was refused")
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
          RuntimeError: one stack only, or a load is under way already.
          ValueError, TypeError: the batch was refused; nothing changed.
        """
        if self._options.stacks == 1:
            raise RuntimeError(
                f"{caller}: needs a second place for the next batch; make the "
                f"{self._owner} with stacks=2 (twice the memory)."
            )
        self._refuse_while_loading(caller)
        prepared = prepare(self._options, inputs, states, caller=caller)
        stack = 1 - self._loaded.stack if self._loaded else 0
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
          RuntimeError: no load is under way, or it failed; then nothing is
            loaded.
          TimeoutError: it takes longer; it goes on, and so does the current
            batch.
        """
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
            self._pending = None
            self._forget(f"the load in the background failed: {error}")
            raise RuntimeError(
                f"{caller}: the load in the background failed: {error}"
            ) from error
        self._pending = None
        return self._make_current(pending.loaded)

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

    def _refuse_while_loading(self, caller: str) -> None:
        if self._pending is not None:
            raise RuntimeError(
                f"{caller}: a load is under way in the background; call use_next first."
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
    if index(batch_index) not in offsets:
        raise IndexError(
            f"optimize: batch_index must be one of report.batch_offsets, "
            f"{list(offsets)}; got {batch_index}."
        )
    return index(batch_index) // loaded.plan.sequence_length
