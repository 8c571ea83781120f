"""The batches on the devices, and loading the next one while the current one trains.

A buffer holds one batch in the variables. Training always reads the current buffer; a
load in the background fills the other one. After a load that was refused, or failed
halfway, neither its batch nor the one that it was to replace is trained on.

Several threads may call. A load into rows that another thread trains on is refused,
and so is training on rows that are being replaced: if it waited, the order of threads
would decide which batch a call trains on.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

from tw_core import DeadlineError, Tower
from tw_core.internal import (
    CallThread,
    Recorder,
    Wait,
    add_report,
    check_flag,
    check_number,
    check_whole_number,
    repeated_devices,
)
from tw_rlload._loading.columns import Columns, PreparedLoad, prepare
from tw_rlload._loading.plan import LoadReport, Remainder, check_options, cut_batch
from tw_rlload._loading.specs import WEIGHTS, ColumnSpec
from tw_rlload._loading.staging import (
    ALL_TOWERS,
    StagingPool,
    Writer,
    fill,
    make_data_variables,
)

_log = logging.getLogger(__name__)


class Loaded(NamedTuple):
    """A batch that can be trained on."""

    buffer: int
    report: LoadReport


class _Run(NamedTuple):
    method: str
    buffer: int
    trainer: object


class Buffers:
    """Batches on the devices, one per buffer; ``specs`` has weights, if any, last."""

    def __init__(
        self,
        owner: str,
        towers: Sequence[Tower],
        specs: Sequence[ColumnSpec],
        *,
        max_per_device_batch_size: int,
        remainder: Remainder,
        check_finite: bool,
        num_buffers: int,
    ) -> None:
        """Checks the options, and makes the variables, with no rows yet."""
        check_options(len(towers), max_per_device_batch_size, remainder)
        devices = [tower.device for tower in towers]
        if twice := repeated_devices(devices):
            raise ValueError(
                f"Every tower needs its own device; {twice} were passed twice in "
                f"{devices}."
            )
        check_flag(check_finite=check_finite)
        if check_whole_number(num_buffers=num_buffers) not in (1, 2):
            raise ValueError(
                "num_buffers must be 1, or 2 to load the next batch while the current "
                f"one trains; got {num_buffers}."
            )
        self._owner = owner
        cut = partial(
            cut_batch,
            num_devices=len(towers),
            maximum=max_per_device_batch_size,
            remainder=remainder,
        )
        self._prepare = partial(prepare, specs, cut=cut, check_finite=check_finite)
        self.specs = (*specs, WEIGHTS) if remainder == "pad" else tuple(specs)
        self.variables = make_data_variables(towers, self.specs, num_buffers)
        self._staging = [StagingPool() for _ in range(num_buffers)]
        self._loaded: Loaded | None = None
        self._reason = "nothing has been loaded yet"
        self._pending: Future[Loaded] | None = None
        # One thread for all loads: TensorFlow's setup for a new thread takes as long as
        # a small load.
        self._thread: CallThread | None = None
        self._towers = tuple(f"tower {k}" for k in range(len(towers)))
        self._events = Recorder(f"{self._owner} of {len(towers)} towers")
        self._loading: str | None = None
        self._runs: list[_Run] = []
        # Guards which batch is current, loading or trained on; never held while rows
        # are copied or a step runs.
        self._lock = threading.Lock()
        self._said: set[str] = set()

    @property
    def report(self) -> LoadReport | None:
        """The report of the last load; None where nothing is loaded."""
        loaded = self._loaded
        return loaded.report if loaded else None

    @contextmanager
    def training(self, trainer: object, method: str) -> Iterator[Loaded]:
        """Keeps the current batch from being replaced while it is trained on."""
        with self._lock:
            loaded = self._require()
            mine = [run.method for run in self._runs if run.trainer is trainer]
            if mine:
                raise RuntimeError(
                    f"{mine[0]} has not returned yet, and each call trains on the "
                    "variables that the last one left. Make one call at a time."
                )
            run = _Run(method, loaded.buffer, trainer)
            self._runs.append(run)
        self._events.began(method, "training on buffer", loaded.buffer)
        try:
            yield loaded
        finally:
            self._events.ended(method, "training on buffer", loaded.buffer)
            with self._lock:
                self._runs.remove(run)

    def load(
        self,
        method: str,
        inputs: Columns,
        states: Columns,
        bind: Callable[[], Writer],
        *,
        timeout_s: float | None,
    ) -> LoadReport:
        """Replaces the current batch; after ``timeout_s`` loads in the background."""
        if timeout_s is not None:
            timeout_s = check_number(timeout_s=timeout_s, at_least=0)

        def work(buffer: int) -> Loaded:
            with self._events.during(ALL_TOWERS, "checking the batch"):
                writer = bind()
                prepared = self._prepare(inputs, states)
            self._forget("the last load failed halfway")
            self._fill(prepared, writer, buffer)
            return self._describe(prepared, buffer)

        with self._one_load(method, in_background=False) as buffer:
            if timeout_s is None:
                return self._make_current(work(buffer))
            future = self._start(partial(work, buffer))
            try:
                is_done = bool(wait([future], timeout_s).done)
            except BaseException:  # Ctrl-C
                self._pending = future
                raise
            if not is_done:
                self._forget("the last load takes too long; use_next waits for it")
                self._pending = future
                told = "call use_next to wait longer. There is no batch to train on."
                raise self._too_late(method, timeout_s, told)
            return self._make_current(future.result())

    def load_next(self, inputs: Columns, states: Columns, writer: Writer) -> None:
        """Checks a batch, then loads it in a thread; the current one stays."""
        if len(self._staging) == 1:
            raise RuntimeError(
                "load_next needs a second buffer for the next batch; make the "
                f"{self._owner} with num_buffers=2 (twice the memory)."
            )
        with self._one_load("load_next", in_background=True) as buffer:
            prepared = self._prepare(inputs, states)
            loaded = self._describe(prepared, buffer)
            self._say_once(
                *("memory", logging.INFO),
                "%s: two buffers hold up to %.1f MB on %d devices, twice the batch",
                *(loaded.report.bytes_resident / 1e6, loaded.report.num_devices),
            )

            def work() -> Loaded:
                self._fill(prepared, writer, buffer)
                return loaded

            self._pending = self._start(work)

    def use_next(self, timeout_s: float | None) -> LoadReport:
        """Waits for the load in the background and makes its batch the current one."""
        if timeout_s is not None:
            timeout_s = check_number(timeout_s=timeout_s, at_least=0)
        with self._lock:
            self._refuse_second_load()
            pending = self._pending
        if pending is None:
            raise RuntimeError("No load is under way; call load_next first.")
        if timeout_s is not None and not wait([pending], timeout_s).done:
            told = "call again to wait longer. The current batch can be trained on."
            if self._loaded is None:
                told = "call again to wait longer. There is no batch to train on."
            raise self._too_late("use_next", timeout_s, told)
        try:
            loaded = pending.result()
        except Exception as error:
            with self._settled(pending):
                self._forget(f"the load in the background failed: {error}")
            raise RuntimeError(f"The load in the background failed: {error}") from error
        with self._settled(pending):
            return self._make_current(loaded)

    @contextmanager
    def _one_load(self, method: str, *, in_background: bool) -> Iterator[int]:
        """Yields the buffer to load into, and refuses other loads meanwhile."""
        with self._lock:
            self._refuse_second_load()
            if self._pending is not None:
                raise RuntimeError(
                    "A load is under way in the background; call use_next first."
                )
            current = self._loaded.buffer if self._loaded else int(in_background)
            buffer = 1 - current if in_background else current
            runs = sorted({run.method for run in self._runs if run.buffer == buffer})
            if runs:
                raise RuntimeError(
                    f"{' and '.join(runs)} has not returned yet, and still trains on "
                    "the rows that this load would replace; nothing was changed. Wait "
                    "until it returns, or load into another buffer: num_buffers=2 and "
                    "load_next."
                )
            self._loading = method
            if not in_background:
                self._forget("the last load was refused")
        try:
            yield buffer
        finally:
            self._loading = None

    @contextmanager
    def _settled(self, pending: object) -> Iterator[None]:
        with self._lock:
            if self._pending is not pending:
                raise RuntimeError(
                    "Another thread's use_next has taken this batch; call it once for "
                    "each load_next."
                )
            self._pending = None
            yield

    def _start(self, work: Callable[[], Loaded]) -> "Future[Loaded]":
        """Runs a load in the thread for loads, which runs one at a time."""
        if self._thread is None:
            self._thread = CallThread("tw-rlload")
        return self._thread.submit(work)

    def _too_late(self, method: str, timeout_s: float, told: str) -> DeadlineError:
        """Returns the error of a load that takes too long, naming what it writes."""
        now = time.monotonic()
        inside = {
            one.who: f"{one.what} for {now - one.since_s:.1f} s"
            for one in self._events.open
            if one.who in (ALL_TOWERS, *self._towers)
        }
        here = [k for k, name in enumerate(self._towers) if name in inside]
        begun = here[0] if here else 0  # Towers are filled one after the other.
        named = "; ".join(f"{who}: {what}" for who, what in inside.items())
        who = f"{self._owner}.{method}"  # A wait's report is read without a traceback.
        error = DeadlineError(
            f"{who}: the batch is still loading after {timeout_s} s "
            f"({named or 'between two columns'}); {told}"
        )
        late = Wait(
            who=who,
            what="the load of a batch",
            waited_s=timeout_s,
            deadline_s=timeout_s,
            arrived=self._towers[:begun],
            missing=dict.fromkeys(self._towers[begun:], "not started") | inside,
        )
        return add_report(error, late, self._events)

    def _fill(self, prepared: PreparedLoad, writer: Writer, buffer: int) -> None:
        try:
            fill(prepared, writer, self._staging[buffer], buffer, self._events)
        except BaseException:
            # Frees a half-loaded batch. The original failure (a closed session) may
            # make this fail too, which must not hide it.
            try:
                writer.empty(buffer)
            except Exception:
                _log.warning("%s: could not free a half-loaded batch", self._owner)
            raise

    def _describe(self, prepared: PreparedLoad, buffer: int) -> Loaded:
        plan = prepared.plan
        size = plan.num_devices * sum(prepared.chunk_sizes)
        total = size * len(self._staging)
        if plan.rows_dropped:
            self._say_once(
                *("dropped", logging.WARNING),
                "%s: %d of %d rows do not fill a step and were dropped (logged once; "
                "report.rows_dropped has each load's). remainder='pad' keeps them.",
                *(plan.rows_dropped, plan.rows_given),
            )
        report = LoadReport(**vars(plan), bytes_loaded=size, bytes_resident=total)
        return Loaded(buffer, report)

    def _make_current(self, loaded: Loaded) -> LoadReport:
        self._loaded = loaded
        return loaded.report

    def _say_once(self, what: str, level: int, message: str, *values: object) -> None:
        if what not in self._said:
            self._said.add(what)
            _log.log(level, message, self._owner, *values)

    def _forget(self, reason: str) -> None:
        self._loaded, self._reason = None, reason

    def _require(self) -> Loaded:
        # Read before _loaded: a load that ends in between has set the batch by then.
        loading = self._loading
        if self._loaded is not None:
            return self._loaded
        if loading is not None:
            raise RuntimeError(
                f"{loading} is replacing the batch and has not returned yet; wait "
                "until it does."
            )
        raise RuntimeError(
            f"There is no batch to train on: {self._reason}. Load one first."
        )

    def _refuse_second_load(self) -> None:
        if self._loading is not None:
            raise RuntimeError(
                f"{self._loading} has not returned yet, and one batch loads at a time; "
                "wait until it does."
            )
