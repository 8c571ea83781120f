"""Recording steps: ``record_steps``."""

import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import tensorflow as tf

from tw_core.internal import check_kind, check_list, check_text, check_whole_number
from tw_doctor._tf_compat import read_profile
from tw_doctor._timeline.intervals import RecordedStep
from tw_doctor._timeline.pace import Pace
from tw_doctor._timeline.step_stats import step_of_stats
from tw_doctor._timeline.summary import Summary, summarize
from tw_doctor._timeline.trace import trace_of, write_trace
from tw_doctor._timeline.xplane import MARK, steps_of_space
from tw_reduce import ReducerState

v1 = tf.compat.v1
_SETTLE_SECONDS = 0.02


def record_steps(
    num_steps: int = 10,
    *,
    graph: tf.Graph | None = None,
    reducers: Sequence[ReducerState] = (),
) -> "StepRecorder":
    """Records what every device does in a few steps of training.

    ::

        with tw_doctor.record_steps(10) as steps:
            for batch in batches:
                with steps.step():
                    train_step(batch)
        print(steps.summary())
        steps.write("trace.json")  # opens in Perfetto and in chrome://tracing
        steps.draw("timeline.png")

    Marked steps are recorded until there are ``num_steps``; the first three are only
    timed, so that tracing is left out and the cost of recording is known. Steps shorter
    than 20 ms, or of so many operations that recording adds more than 5 % to them, are
    sampled, so that recording adds no more than that to the run; the summary reports
    it. Without marks everything in the block is recorded, and its last ``num_steps``
    calls of a ``tf.function`` or a session are the steps: such a block should be short.
    ``run`` and ``hook`` record sessions, also over servers; everything else is recorded
    by TensorFlow's profiler, which can record once at a time. On GPUs a call can return
    before its work is done: fetch a result inside the step.

    Args:
      num_steps: how many steps to keep, at least 1.
      graph: graph of a session that is called inside without ``run`` or ``hook``, such
        as by a callable; shows the devices of its ops where their sends do not.
      reducers: reducers with memory that the steps use; the summary and the picture
        report what a tower sends. In ``fit`` the Keras callback finds them.

    Returns:
      The recorder, for a ``with`` statement.

    Raises:
      TypeError: ``num_steps`` is not a whole number, ``graph`` not a graph,
        ``reducers`` not a list of them.
      ValueError: ``num_steps`` is less than 1.
    """
    check_whole_number(num_steps=num_steps, at_least=1)
    if graph is not None and not isinstance(graph, tf.Graph):
        raise TypeError(
            f"record_steps: graph must be a tf.Graph; got {type(graph).__name__}."
        )
    return StepRecorder(num_steps, graph, reducers)


class StepRecorder:
    """Recorded steps, made by ``record_steps``, which describes its arguments.

    Args:
      num_steps: as for ``record_steps``.
      graph: as for ``record_steps``.
      reducers: as for ``record_steps``.
    """

    def __init__(
        self,
        num_steps: int,
        graph: tf.Graph | None = None,
        reducers: Sequence[ReducerState] = (),
    ) -> None:
        for own in check_list(reducers=reducers, of="reducers", empty=True):
            check_kind(ReducerState, "a list of tw_reduce.ReducerState", reducers=own)
        self._num_steps = num_steps
        self._reducers = tuple(reducers)
        self._graph = graph
        self._pace = Pace(num_steps)
        self._steps: list[RecordedStep] = []
        self._metadata: list[tuple[Any, int, float, float, float]] = []
        self._profiler = _Profiler()
        self._is_open = self._has_marks = self._in_step = False
        self._batch: Any = None  # the step that Keras is in
        self._number = -1  # of the program's step that began last
        self._failed: set[int] = set()  # the steps that an error ended
        self._before: float | None = None  # when the step before ended
        self._zero = self._epoch = 0.0

    def __enter__(self) -> Self:
        """Begins recording.

        Raises:
          RuntimeError: the recorder was used before, or TensorFlow's profiler is in
            use.
        """
        if self._zero:
            raise RuntimeError(
                "record_steps: a recorder records once. Call record_steps again."
            )
        self._profiler.start()
        self._is_open = True
        self._zero = time.perf_counter()
        self._epoch = time.time() - self._zero
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Ends recording; keeps what was recorded before an error.

        Raises:
          RuntimeError: TensorFlow's profiler was ended inside the block; an error of
            the block itself takes precedence.
        """
        self._is_open = False
        try:
            self._read_profiler()
        except RuntimeError:
            if error is None:
                raise
        finally:
            self._read_metadata()

    @property
    def steps(self) -> tuple[RecordedStep, ...]:
        """The recorded steps, in order."""
        return tuple(self._steps)

    @contextmanager
    def step(self) -> Iterator[None]:
        """Marks the calls inside as one step of training.

        Raises:
          RuntimeError: outside of the recorder's ``with`` block, or inside another
            step; TensorFlow's profiler is in use, or was ended since it was started.
        """
        is_recorded = self._next_is_recorded()
        if is_recorded and not self._profiler.is_on:
            self._owing(self._profiler.start)
        start, number = time.perf_counter(), self._number
        self._in_step = True
        try:
            with tf.profiler.experimental.Trace(MARK, step_num=number):
                yield
        except BaseException:
            self._failed.add(number)
            raise
        finally:
            self._in_step = False
        self._passed(start, is_recorded=is_recorded)
        if self._profiler.is_on and self._pace.ends_window():
            self._owing(self._read_profiler)

    def run(
        self,
        session: Any,
        fetches: Any,
        feed_dict: Mapping[Any, Any] | None = None,
    ) -> Any:
        """Runs a session as one step, and records it on all tasks that take part.

        Args:
          session: a ``tf.compat.v1.Session``, over servers or not.
          fetches: as for ``session.run``.
          feed_dict: as for ``session.run``.

        Returns:
          The result of ``session.run``.

        Raises:
          RuntimeError: outside of the recorder's ``with`` block, or inside ``step()``.
        """
        is_recorded = self._next_is_recorded()
        metadata = v1.RunMetadata()
        start = time.perf_counter()
        if is_recorded:
            result = session.run(fetches, feed_dict, _trace_of(session), metadata)
        else:
            result = session.run(fetches, feed_dict)
        self._session_passed(start, metadata if is_recorded else None)
        return result

    def hook(self) -> Any:
        """Makes a hook that records the steps of a monitored session.

        Returns:
          A ``tf.compat.v1.train.SessionRunHook``; each ``run`` of its session is a
          step, on all tasks that take part.
        """
        return _RecordingHook(self)

    def keras_callback(self) -> Any:
        """Makes a callback that records the steps of Keras's ``fit``.

        Returns:
          A ``keras.callbacks.Callback``; a step is one batch of Keras, or several with
          ``steps_per_execution``.
        """
        import keras

        recorder = self

        class RecordSteps(keras.callbacks.Callback):  # type: ignore[misc]
            """Marks each batch of ``fit`` as a step."""

            def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
                step = recorder.step()
                step.__enter__()
                recorder._batch = step

            def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
                step, recorder._batch = recorder._batch, None
                if step is not None:
                    step.__exit__(None, None, None)
                recorder._reducers = tuple(getattr(self.model, "reducer_states", ()))

        return RecordSteps()

    def summary(self) -> Summary:
        """Returns a summary of where the time of the recorded steps went.

        Returns:
          Rows with part, device, tower, milliseconds, share of the wall time, bytes and
          the reason of a wait; ``str`` of it is a table.

        Raises:
          RuntimeError: no step was recorded.
        """
        note = ""
        if self._has_marks and self._pace.is_sampled:
            count = self._pace.windows
            windows = f"{count} window{'s' * (count != 1)}"
            note = (
                f"Steps of {self._pace.plain_ms:.1f} ms without recording are sampled: "
                f"{len(self._steps)} of {self._pace.seen} steps, in {windows}."
            )
        steps, unknown = self._recorded(), ""
        if not any(step.devices for step in steps):
            unknown = (
                "No device was recorded: TensorFlow names none for eager operations. "
                "Record a tf.function or a session; fit without run_eagerly."
            )
        notes = "\n".join(filter(None, [note, unknown, *self._sent()]))
        return summarize(steps, cost=self._pace.cost, note=notes)

    def write(self, path: str | Path, *, task: str = "") -> None:
        """Writes the recorded steps as a trace file.

        Args:
          path: file to write; JSON, which Perfetto (https://ui.perfetto.dev) and
            chrome://tracing open.
          task: name of this task, in a program of several processes.

        Raises:
          RuntimeError: no step was recorded.
          TypeError: ``task`` is not a string.
          OSError: the file cannot be written.
        """
        check_text(task=task, empty=True)
        steps = self._recorded()
        trace = trace_of(steps, task=task, epoch=self._epoch)
        write_trace(trace, path)

    def draw(self, path: str | Path, *, step: int | None = None) -> None:
        """Draws one step as a picture: a band per device, with its waits.

        Args:
          path: file to write; its suffix selects the format, e.g. ``.png``.
          step: index of the recorded step; None for the one of median length.

        Raises:
          RuntimeError: no step was recorded.
          IndexError: there is no such step.
          ImportError: matplotlib is missing; the extra ``tw-doctor[draw]`` installs it.
          OSError: the file cannot be written.
        """
        from tw_doctor._timeline.drawing import draw_step

        steps = self._recorded()
        if step is None:
            by_length = sorted(steps, key=lambda own: own.seconds)
            chosen = by_length[len(by_length) // 2]
        else:
            index = check_whole_number(step=step)
            if not -len(steps) <= index < len(steps):
                raise IndexError(f"draw: there are {len(steps)} steps; got {index}.")
            chosen = steps[index]
        draw_step(chosen, path, self._sent())

    def _sent(self) -> list[str]:
        return [f"Per step a tower sends {own.describe()}." for own in self._reducers]

    def _recorded(self) -> list[RecordedStep]:
        if self._is_open:
            raise RuntimeError(
                "Steps are still being recorded; read them after the block of "
                "record_steps."
            )
        if self._steps:
            return self._steps
        if self._has_marks:
            raise RuntimeError(
                f"{self._pace.seen} steps were marked and none recorded. The first "
                "three are only timed: let more of them run inside the block."
            )
        raise RuntimeError(
            "No step was recorded. Call a tf.function or a session inside the block, "
            "or mark steps with `with steps.step():`."
        )

    def _next_is_recorded(self) -> bool:
        if not self._is_open:
            raise RuntimeError(
                "Steps are recorded inside of a block `with record_steps() as steps:`."
            )
        self._batch = None  # Closes one that failed, which Keras does not report.
        if self._in_step:
            raise RuntimeError(
                "This step is inside another marked step; steps cannot be nested. Mark "
                "either the outer or the inner one."
            )
        if not self._has_marks:
            # The profile so far was for a program without marks.
            self._has_marks = True
            self._profiler.stop()
        self._number += 1
        return self._pace.records_next()

    def _passed(self, start: float, *, is_recorded: bool) -> float:
        self._before = time.perf_counter()
        self._pace.passed(1e3 * (self._before - start), is_recorded=is_recorded)
        return self._before

    def _owing(self, work: Any) -> None:
        """Does the work needed around a window, and notes the time it took."""
        start = time.perf_counter()
        work()
        self._pace.window_changed(1e3 * (time.perf_counter() - start))

    def _session_passed(self, start: float, metadata: Any) -> None:
        before = start if self._before is None else self._before
        end = self._passed(start, is_recorded=metadata is not None)
        if metadata is None:
            return
        self._metadata.append((metadata, self._number, before, start, end))
        if self._pace.ends_window():
            self._pace.window_changed(0.0)

    def _read_metadata(self) -> None:
        """Reads at the end, since reading takes longer than a short step."""
        for metadata, number, *times in self._metadata:
            begin, start, end = (time - self._zero for time in times)
            own = {"begin": begin, "start": start, "end": end}
            epoch = self._epoch + self._zero
            step = step_of_stats(metadata.step_stats, number, **own, epoch=epoch)
            self._steps.append(step)
        self._metadata.clear()

    def _read_profiler(self) -> None:
        space = self._profiler.stop()
        if space is not None:
            wanted = self._num_steps - len(self._steps)
            found = steps_of_space(space, last=wanted, graph=self._graph)
            self._steps += [own for own in found if own.number not in self._failed]


class _RecordingHook(v1.train.SessionRunHook):  # type: ignore[misc,name-defined]
    """Asks for a trace of the runs that are recorded."""

    def __init__(self, recorder: StepRecorder) -> None:
        self._recorder = recorder
        self._start = 0.0
        self._is_recorded = False

    def before_run(self, run_context: Any) -> Any:
        self._is_recorded = self._recorder._next_is_recorded()
        self._start = time.perf_counter()
        options = _trace_of(run_context.session) if self._is_recorded else None
        return v1.train.SessionRunArgs(fetches=None, options=options)

    def after_run(self, run_context: Any, run_values: Any) -> None:
        metadata = run_values.run_metadata if self._is_recorded else None
        self._recorder._session_passed(self._start, metadata)


class _Profiler:
    """TensorFlow's profiler, writing to temporary folders."""

    def __init__(self) -> None:
        self._folder: Path | None = None

    @property
    def is_on(self) -> bool:
        return self._folder is not None

    def start(self) -> None:
        folder = Path(tempfile.mkdtemp(prefix="tw-doctor-"))
        try:
            tf.profiler.experimental.start(str(folder))
        except tf.errors.AlreadyExistsError:
            shutil.rmtree(folder)
            raise RuntimeError(
                "record_steps: TensorFlow's profiler is in use, and a process has only "
                "one. End the other recording first (tf.profiler.experimental.stop)."
            ) from None
        self._folder = folder

    def stop(self) -> Any:
        """Ends recording; returns the ``XSpace``, or None if nothing was on."""
        if self._folder is None:
            return None
        folder, self._folder = self._folder, None
        # A call returns a little before its threads have recorded their last events.
        time.sleep(_SETTLE_SECONDS)
        try:
            tf.profiler.experimental.stop()
            return read_profile(folder)
        except tf.errors.UnavailableError:
            raise RuntimeError(
                "record_steps: other code stopped TensorFlow's profiler; its recording "
                "is lost. Do not call tf.profiler.experimental.stop inside the block."
            ) from None
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def _trace_of(session: Any) -> Any:
    """Returns trace options: full for GPUs and servers only, since it costs more."""
    devices = session.list_devices()
    is_plain = all(
        own.device_type != "GPU" and own.name.startswith("/job:localhost/")
        for own in devices
    )
    level = v1.RunOptions.SOFTWARE_TRACE if is_plain else v1.RunOptions.FULL_TRACE
    return v1.RunOptions(trace_level=level)
