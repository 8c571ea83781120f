"""Recording real steps: sessions, servers, functions and Keras's ``fit``."""

import contextlib
import itertools
import json
import math
import re
import sys
import tempfile
import time

import keras
import numpy as np
import pytest
import tensorflow as tf
from harness.ports import find_free_ports
from hypothesis import example, given, settings
from hypothesis import strategies as st
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

import tw_core
import tw_doctor
import tw_reduce
from tw_core.testing import CPUS
from tw_doctor import StepRecorder, explained, merge_traces
from tw_doctor._timeline import drawing, pace
from tw_reduce import compression

v1 = tf.compat.v1
A, B = (tw_core.devices.canonical_device(device) for device in CPUS[:2])
SIZE = 256
PS, WORKER_0, WORKER_1 = (
    f"/job:{task}"
    for task in (
        "ps/replica:0/task:0",
        "worker/replica:0/task:0",
        "worker/replica:0/task:1",
    )
)


def towers_step(xs, weights):
    """A step of two towers with names as our packages give them."""
    grads = []
    for k, (x, w) in enumerate(zip(xs, weights, strict=True)):
        with tf.device(CPUS[k]), tf.name_scope(f"tower{k}"):
            for _ in range(4):
                x = tf.nn.relu(x @ w)
            grads.append(tf.transpose(x) @ x)
    with tf.device(CPUS[0]), tf.name_scope("all_reduce"):
        total = tf.add_n(grads)
    updates = []
    for k, w in enumerate(weights):
        with tf.device(CPUS[k]), tf.name_scope(f"tower{k}/sgd"):
            updates.append(w.assign_sub(1e-9 * total))
    return updates


def make_graph():
    with tf.Graph().as_default() as graph:
        xs, weights = [], []
        for k, device in enumerate(CPUS[:2]):
            with tf.device(device):
                xs.append(tf.ones([SIZE, SIZE]))
                weights.append(v1.get_variable(f"w{k}", [SIZE, SIZE]))
        step = tf.group(*(u.op for u in towers_step(xs, weights)))
        init = v1.global_variables_initializer()
    return graph, step, init


@pytest.fixture
def session():
    graph, step, init = make_graph()
    with v1.Session(graph=graph, config=tw_core.session_config()) as session:
        session.run(init)
        session.run(step)
        yield session, step


@pytest.fixture(scope="module")
def function():
    xs, weights = [], []
    for device in CPUS[:2]:
        with tf.device(device):
            xs.append(tf.ones([SIZE, SIZE]))
            weights.append(tf.Variable(tf.zeros([SIZE, SIZE])))

    @tf.function(autograph=False)
    def step():
        towers_step(xs, weights)

    step()
    return step


@pytest.fixture(scope="module")
def recorded(function):
    with tw_doctor.record_steps(2) as steps:
        function()
        function()
    return steps


def by_run(steps, session, op):
    for _ in range(60):
        steps.run(session, op)


def by_step(steps, session, op):
    for _ in range(60):
        with steps.step():
            session.run(op)


def without_marks(steps, session, op):
    for _ in range(4):
        session.run(op)


def check_towers(steps, *, least=0.9):
    """Both towers compute where they are, tower 0's device adds, both apply."""
    for step in steps.steps:
        assert step.begin <= step.start < step.end
        assert explained(step) >= least
        parts = {(own.device, own.part, own.tower) for own in step.intervals}
        assert {
            *((A, "forward", 0), (B, "forward", 1)),
            *((A, "reduce", None), (A, "apply", 0), (B, "apply", 1)),
        } <= parts
        assert not {(B, "forward", 0), (A, "forward", 1), (B, "reduce", None)} & parts
        came = {(own.device, own.source) for own in step.arrivals}
        assert {(A, B), (B, A)} <= came


@pytest.mark.parametrize("record", [by_run, by_step, without_marks])
def test_a_sessions_steps_are_recorded(session, record):
    graph = session[1].graph
    with tw_doctor.record_steps(3, graph=graph) as steps:
        record(steps, *session)
    assert len(steps.steps) == 3
    check_towers(steps)


def test_a_hook_records_the_steps_of_a_monitored_session():
    graph, step, _ = make_graph()
    with tw_doctor.record_steps(2) as steps, graph.as_default():
        v1.train.get_or_create_global_step()
        hooks = [steps.hook()]
        with v1.train.MonitoredSession(
            v1.train.ChiefSessionCreator(config=tw_core.session_config()), hooks
        ) as monitored:
            for _ in range(60):
                monitored.run(step)
    assert len(steps.steps) == 2
    check_towers(steps)


@pytest.mark.parametrize("is_marked", [True, False])
def test_a_functions_steps_are_recorded(function, is_marked):
    with tw_doctor.record_steps(3) as steps:
        for _ in range(60 if is_marked else 3):
            if is_marked:
                with steps.step():
                    function()
            else:
                function()
    assert len(steps.steps) == 3
    check_towers(steps)


def test_the_time_before_a_call_belongs_to_the_step(function):
    with tw_doctor.record_steps(3) as steps:
        for _ in range(60):
            time.sleep(0.003)
            with steps.step():
                function()
    late = [step.start - step.begin for step in steps.steps[1:]]
    assert all(seconds >= 0.003 for seconds in late)
    row = next(row for row in steps.summary().rows if "between" in row.waits_for)
    assert row.part == "wait"
    assert row.ms >= 2.0  # of three steps the first has none before it


@pytest.mark.slow(by_day=True)
def test_keras_trains_with_a_callback():
    model = keras.Sequential([keras.Input([8]), keras.layers.Dense(4)])
    model.compile("sgd", "mse")
    x, y = np.ones([64, 8]), np.ones([64, 4])
    with tw_doctor.record_steps(2) as steps:
        callbacks = [steps.keras_callback()]
        model.fit(x, y, batch_size=4, epochs=4, verbose=0, callbacks=callbacks)
    assert len(steps.steps) == 2
    kinds = {own.part for step in steps.steps for own in step.intervals}
    assert {"apply", "backward"} <= kinds


@pytest.mark.slow
def test_what_a_reducer_with_memory_sends_is_told(tmp_path):
    variables = [[tf.Variable(tf.ones([64, 64]))] for _ in range(2)]
    reducer = tw_reduce.ReducerState(compression.power_sgd(rank=1), variables)
    step = tf.function(lambda: reducer([[tf.ones([64, 64])]] * 2), autograph=False)
    step()
    sent = "Per step a tower sends 516 bytes in 2 sums, for gradients of 16,384 bytes."

    class Model(keras.Model):
        def train_step(self, data):
            step()
            return {"loss": tf.zeros([])}

    model = Model()
    model.compile("sgd", "mse")
    with tw_doctor.record_steps(1, reducers=[reducer]) as steps:
        for _ in range(60):
            with steps.step():
                step()
    assert str(steps.summary()).endswith(sent)
    steps.draw(tmp_path / "step.svg")
    assert "516 bytes" in (tmp_path / "step.svg").read_text()
    model.reducer_states = [reducer]
    with tw_doctor.record_steps(1) as steps:
        callbacks = [steps.keras_callback()]
        model.fit(np.ones([60, 1]), batch_size=1, verbose=0, callbacks=callbacks)
    assert steps.summary().note.endswith(sent)


def test_what_a_function_asks_for_tells_its_device_where_nothing_is_sent():
    @tf.function(autograph=False)
    def alone(x):
        with tf.device(CPUS[2]):
            return tf.reduce_sum(x @ x)

    with tf.device(CPUS[2]):
        x = tf.ones([SIZE, SIZE])
    alone(x)
    with tw_doctor.record_steps(2) as steps:
        alone(x)
        alone(x)
    assert {step.last_device for step in steps.steps} == {
        tw_core.devices.canonical_device(CPUS[2])
    }


def test_short_steps_are_sampled_but_for_those_that_fail(function, monkeypatch):
    monkeypatch.setattr(pace, "LONG_MS", math.inf)  # however busy the machine is
    with tw_doctor.record_steps(4) as steps:
        for n in range(7):
            with contextlib.suppress(ZeroDivisionError), steps.step():
                function()
                if n == 4:
                    raise ZeroDivisionError
    assert [step.number for step in steps.steps] == [3, 5, 6]
    assert "are sampled: 3 of 6 steps, in 1 window." in str(steps.summary())
    with tw_doctor.record_steps(2) as steps:
        for _ in range(20):
            with steps.step():
                function()
    text = str(steps.summary())
    assert "without recording are sampled: 2 of 20 steps, in 1 window." in text
    assert "recording added" in text


def test_a_trace_file_has_every_operation_and_wait(recorded, tmp_path):
    path = tmp_path / "trace.json"
    recorded.write(path, task="worker 0")
    assert [own.name for own in tmp_path.iterdir()] == ["trace.json"]
    trace = json.loads(path.read_text())
    spans = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert all(event["dur"] >= 0 for event in spans)
    count = sum(len([o for o in s.intervals if o.device]) for s in recorded.steps)
    of_devices = [e for e in spans if e["cat"] not in ("wait", "step", "program")]
    assert len(of_devices) == count
    assert sum(event["cat"] == "step" for event in spans) == 2
    by_thread = {}
    for event in of_devices:
        by_thread.setdefault((event["pid"], event["tid"]), []).append(event)
    for events in by_thread.values():
        for one, other in itertools.pairwise(events):
            assert one["ts"] + one["dur"] <= other["ts"] + 0.002
    names = {e["args"]["name"] for e in trace["traceEvents"] if e["ph"] == "M"}
    assert {f"worker 0 {A}", f"worker 0 {B}", "worker 0 program", "waits"} <= names
    starts = {e["id"] for e in trace["traceEvents"] if e["ph"] == "s"}
    assert starts
    assert starts == {e["id"] for e in trace["traceEvents"] if e["ph"] == "f"}


def test_a_picture_is_drawn_where_matplotlib_is(recorded, tmp_path, monkeypatch):
    for name in ("step.png", "step.svg"):
        recorded.draw(tmp_path / name, step=-1)
        assert (tmp_path / name).stat().st_size > 5000
    assert "<svg" in (tmp_path / "step.svg").read_text()
    with pytest.raises(IndexError, match=r"draw: there are 2 steps; got 2\."):
        recorded.draw(tmp_path / "x.png", step=2)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match="pip install matplotlib"):
        recorded.draw(tmp_path / "x.png")


@pytest.mark.parametrize("wide", [8.4, 4.6])
def test_a_picture_cuts_no_text_and_names_every_colour(recorded, wide):
    figure = drawing.figure_of(recorded.steps[0], wide=wide)
    renderer = FigureCanvasAgg(figure).get_renderer()
    figure.draw(renderer)
    [axes], [key] = figure.axes, figure.legends
    texts = [*axes.texts, *figure.texts, *key.get_texts()]
    assert any(own.get_text().startswith("/device:CPU:0: ") for own in texts)
    for own in texts:
        assert "…" not in own.get_text()
        box = own.get_window_extent(renderer)
        assert figure.bbox.contains(box.x0, box.y0), own
        assert figure.bbox.contains(box.x1, box.y1), own
    named = {own.get_facecolor() for own in key.get_patches()}
    bars = axes.collections
    assert bars
    assert {tuple(color) for own in bars for color in own.get_facecolor()} <= named


def test_bars_fill_as_much_of_a_band_as_its_percentage_says(
    recorded, tmp_path, monkeypatch
):
    drawn = []
    monkeypatch.setattr(
        Figure, "savefig", lambda figure, *_, **__: drawn.append(figure)
    )
    recorded.draw(tmp_path / "x.png")
    [axes] = drawn[0].axes
    heads = [own for own in axes.texts if own.get_text().endswith("% busy")]
    heads += [own for own in axes.texts if "% busy;" in own.get_text()]
    assert len(heads) == 2
    (_, step), colored = axes.get_xlim(), axes.collections
    for head in heads:
        filled = 0.0
        for bars in (own for own in colored if own.get_hatch() is None):
            for path in bars.get_paths():
                (left, low), (right, high) = path.vertices.min(0), path.vertices.max(0)
                if 0 < head.get_position()[1] - low < 0.7:  # in the band below the head
                    filled += (right - left) * (high - low)
        busy = int(re.search(r"(\d+)% busy", head.get_text())[1]) / 100
        assert filled / (drawing._HEIGHT * step) == pytest.approx(busy, abs=0.006)


def test_an_operation_that_took_no_measurable_time_fills_nothing():
    spans = {"forward": [(0.0, 4.0)], "apply": [(1.0, 1.0), (6.0, 7.0)]}
    boxes = list(drawing._boxes(spans, 0.0, 0.01))
    assert boxes == [
        ("forward", (0.0, 4.0, 0.0, 1.0)),
        ("apply", (6.0, 7.0, 0.0, 1.0)),
    ]


def test_recorders_refuse_what_they_cannot_do(function, tmp_path):
    steps = tw_doctor.record_steps()
    assert isinstance(steps, StepRecorder)
    with pytest.raises(RuntimeError, match="inside of a block"), steps.step():
        pass
    with steps:
        with pytest.raises(RuntimeError, match="after the block of record_steps"):
            steps.summary()
        with (
            pytest.raises(RuntimeError, match="profiler is in use"),
            tw_doctor.record_steps(),
        ):
            pass
    with pytest.raises(RuntimeError, match="No step was recorded"):
        steps.write(tmp_path / "trace.json")
    with pytest.raises(RuntimeError, match="a recorder records once"), steps:
        pass
    with tw_doctor.record_steps() as few:
        for _ in range(2):
            with few.step():
                function()
    with pytest.raises(RuntimeError, match="2 steps were marked and none recorded"):
        few.draw(tmp_path / "x.png")
    assert not list(tmp_path.iterdir())


def test_a_trace_that_cannot_be_written_leaves_nothing(recorded, tmp_path, monkeypatch):
    recorded.write(tmp_path / "own.json", task="a")
    kept = list(tmp_path.iterdir())
    for folder in (tmp_path, ".", "/"):
        with pytest.raises(IsADirectoryError, match=r"path must be that of a file;"):
            recorded.write(folder)
    with pytest.raises(IsADirectoryError, match=r"trace\.json"):
        merge_traces(kept, tmp_path)
    with pytest.raises(FileNotFoundError):
        recorded.write(tmp_path / "missing" / "trace.json")
    monkeypatch.setattr(type(tmp_path), "replace", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        recorded.write(tmp_path / "trace.json")
    assert list(tmp_path.iterdir()) == kept
    assert not [own for own in tmp_path.parent.iterdir() if "unfinished" in own.name]


def test_a_profiler_that_others_end_is_named(function):
    ended = pytest.raises(RuntimeError, match="other code stopped")
    with ended, tw_doctor.record_steps(1):
        function()
        tf.profiler.experimental.stop()
    with ended, tw_doctor.record_steps(1) as steps:
        for _ in range(20):
            with steps.step():
                function()
                if steps._profiler.is_on:
                    tf.profiler.experimental.stop(save=False)
    with pytest.raises(ZeroDivisionError), tw_doctor.record_steps(1):
        tf.profiler.experimental.stop()
        raise ZeroDivisionError


def test_steps_inside_of_steps_are_refused(function):
    model = keras.Sequential([keras.Input([2]), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    nested = pytest.raises(RuntimeError, match="is inside another marked step")
    with tw_doctor.record_steps(2) as steps:
        for _ in range(20):
            with steps.step():
                with nested, steps.step():
                    raise AssertionError("entered")
                with nested:
                    steps.run(None, None)
                function()
        with steps.step(), nested:
            model.fit(
                *(np.ones([2, 2]), np.ones([2, 1])),
                **{"verbose": 0, "callbacks": [steps.keras_callback()]},
            )
    assert len(steps.steps) == 2
    check_towers(steps)


def test_steps_go_on_after_an_error_in_keras(function):
    class Failing(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            raise ZeroDivisionError

    model = keras.Sequential([keras.Input([2]), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    with tw_doctor.record_steps(2) as steps:
        kept = [Failing(), steps.keras_callback()]
        for _ in range(2):
            with pytest.raises(ZeroDivisionError):
                model.fit(np.ones([2, 2]), np.ones([2, 1]), verbose=0, callbacks=kept)
        for _ in range(20):
            with steps.step():
                function()
    assert len(steps.steps) == 2
    assert min(step.number for step in steps.steps) >= 2


PROGRAMS = st.recursive(
    st.sampled_from(["call", "call", "fail", "end profiler", "summary"]),
    lambda inner: st.lists(inner, max_size=4),
    max_leaves=14,
)


@pytest.mark.slow
@settings(max_examples=25)
@given(st.lists(PROGRAMS, max_size=9))
@example([["call"]] * 3 + [["call", ["call"]], ["fail"], ["call"], "end profiler"])
def test_any_program_of_steps_runs_or_is_told_what_is_wrong(program):
    """A list is a step; a failing one is ended by its error, and the next goes on."""
    x = tf.ones([2])
    marked, ended, inside = [], set(), False

    def run(own, steps):
        nonlocal inside
        if own == "call":
            tf.square(x)
        elif own == "fail":
            raise ZeroDivisionError
        elif own == "end profiler":
            if steps._profiler.is_on and not ended:
                ended.add(True)
                tf.profiler.experimental.stop(save=False)
        elif own == "summary":
            with pytest.raises(RuntimeError, match="read them after the block"):
                steps.summary()
        elif inside:
            with (
                pytest.raises(RuntimeError, match="another marked step"),
                steps.step(),
            ):
                raise AssertionError("entered")
        else:
            inside = True
            marked.append(None)
            try:
                with steps.step():
                    for each in own:
                        run(each, steps)
                    marked[-1] = "passed"
            finally:
                inside = False

    def run_all(steps):
        for own in program:
            try:
                run(own, steps)
            except ZeroDivisionError:
                continue
            except RuntimeError as error:
                assert "other code stopped" in str(error) and ended
                ended.clear()

    try:
        with tw_doctor.record_steps(4) as steps:
            run_all(steps)
    except RuntimeError as error:
        assert "other code stopped" in str(error) and ended
    numbers = [step.number for step in steps.steps]
    if marked:
        assert numbers == sorted(set(numbers))
        assert all(marked[number] == "passed" for number in numbers)
    with tempfile.TemporaryDirectory() as folder:
        tf.profiler.experimental.start(folder)  # It is free again.
        tf.profiler.experimental.stop(save=False)


# Several tasks ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def in_process_cluster():
    """A parameter server and two workers, as servers of this process."""
    ps, *workers = (f"127.0.0.1:{port}" for port in find_free_ports(3))
    jobs = {"ps": [ps], "worker": workers}
    servers = [
        v1.train.Server(jobs, job_name=job, task_index=index)
        for job, addresses in jobs.items()
        for index in range(len(addresses))
    ]
    return servers[1].target


def shifted(metadata, task, seconds):
    """What the session recorded, had a task's clock been wrong by ``seconds``."""
    for stats in metadata.step_stats.dev_stats:
        if task in stats.device:
            for node in stats.node_stats:
                node.all_start_micros += round(1e6 * seconds)
                node.scheduled_micros += round(1e6 * seconds)


@pytest.mark.slow(by_day=["3.0"])
@pytest.mark.parametrize("wrong_by", [3.0, -500.0])
def test_a_clusters_clocks_are_aligned(cluster_session, monkeypatch, wrong_by):
    session, step = cluster_session
    run = session.run

    def run_with_a_wrong_clock(fetches, feed=None, options=None, metadata=None):
        result = run(fetches, feed, options, metadata)
        if metadata is not None:
            shifted(metadata, WORKER_1, wrong_by)
        return result

    monkeypatch.setattr(session, "run", run_with_a_wrong_clock)
    with tw_doctor.record_steps(3) as steps:
        for _ in range(200):
            steps.run(session, step)
    assert len(steps.steps) == 3
    for own in steps.steps:
        tasks = {device.rpartition("/device:")[0] for device in own.devices}
        assert tasks == {PS, WORKER_0, WORKER_1}
        assert all(own.start - 1e-3 <= o.start for o in own.intervals)
        assert all(o.end <= own.end + 1e-3 for o in own.intervals)
        assert all(a.sent <= a.time for a in own.arrivals)
        sizes = {(a.source, a.num_bytes) for a in own.arrivals}
        assert (f"{WORKER_1}/device:CPU:0", 4 * SIZE * SIZE) in sizes
        assert explained(own) >= 0.9
    merged = str(steps.summary())
    assert f"{PS}/device:CPU:0" in merged


@pytest.fixture
def cluster_session(in_process_cluster):
    graph = tf.Graph()
    with graph.as_default():
        with tf.device("/job:ps/task:0"):
            w = v1.get_variable("w", [SIZE, SIZE])
        grads = []
        for k in range(2):
            with tf.device(f"/job:worker/task:{k}"), tf.name_scope(f"tower{k}"):
                x = tf.ones([SIZE, SIZE]) @ w
                grads.append(tf.transpose(x) @ x)
        with tf.device("/job:ps/task:0"), tf.name_scope("apply_grad"):
            step = w.assign_sub(1e-9 * tf.add_n(grads)).op
        init = v1.global_variables_initializer()
    with v1.Session(in_process_cluster, graph=graph) as session:
        session.run(init)
        yield session, step


def traces(tmp_path, offset, epoch_error=0.0):
    """Trace files of two tasks that met in three all-reduces."""
    paths = []
    for number, (task, shift) in enumerate((("rank 0", 0.0), ("rank 1", offset))):
        events = [
            {"ph": "M", "name": "process_name", "pid": 1, "tid": 0, "args": {}},
            {"ph": "s", "id": "0.0", "name": "x", "pid": 2, "tid": 1, "ts": 1.0},
        ]
        for meeting in range(3):
            # Both leave at once; who comes last differs.
            end = 1e6 * (100 + meeting + 0.5)
            wait = 1e5 if (meeting + number) % 2 else 100.0
            events.append(
                {
                    **{"ph": "X", "pid": 2, "tid": 2, "name": "all_reduce/CR"},
                    **{"cat": "reduce", "ts": end - wait + 1e6 * shift, "dur": wait},
                    "args": {"kind": "CollectiveReduceV2", "step": meeting},
                }
            )
        about = {"task": task, "epoch": 1e9 - shift + epoch_error * number}
        path = tmp_path / f"{number}.json"
        path.write_text(json.dumps({"traceEvents": events, "otherData": about}))
        paths.append(path)
    return paths


@pytest.mark.parametrize(("offset", "error"), [(0, 0), (5.0, 0), (-3.0, 7.0)])
def test_traces_of_processes_are_joined_with_one_clock(tmp_path, offset, error):
    out = tmp_path / "all.json"
    shifts = merge_traces(traces(tmp_path, offset, error), out)
    assert shifts["rank 0"] == 0
    assert abs(shifts["rank 1"] + error) < 1e-3
    events = json.loads(out.read_text())["traceEvents"]
    ends = {}
    for event in events:
        if event["ph"] == "X":
            step = event["args"]["step"]
            ends.setdefault(step, []).append(event["ts"] + event["dur"])
    assert all(abs(one - other) < 1e3 for one, other in ends.values())
    assert len({e["pid"] for e in events if e["ph"] == "X"}) == 2
    assert len({e["id"] for e in events if e["ph"] == "s"}) == 2


def test_joining_refuses_other_files_and_tasks_of_one_name(tmp_path):
    paths = traces(tmp_path, 0.0)
    other = tmp_path / "other.json"
    with pytest.raises(ValueError, match="two files have task 'rank 0'"):
        merge_traces([paths[0], paths[0]], other)
    for text in (
        "",
        "[]",
        '{"traceEvents": []}',
        '{"otherData": 3, "traceEvents": [1]}',
    ):
        other.write_text(text)
        with pytest.raises(ValueError, match="is not a trace that StepRecorder"):
            merge_traces([other], tmp_path / "all.json")
    with pytest.raises(TypeError, match="paths"):
        merge_traces("x.json", other)
    assert not (tmp_path / "all.json").exists()


@pytest.mark.parametrize("inline", [True, False])
def test_parts_of_towers_that_are_traced_once_are_named(inline):
    ours = tw_core.towers(list(CPUS[:2]))
    weights = [tf.Variable(tf.ones([300, 300])) for _ in ours]

    def gradient(tower, weight, x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.matmul(weight, x) ** 2)
        return tape.gradient(loss, weight)

    @tf.function(autograph=False)
    def step(x):
        parts = [x, x + 1.0]
        return tw_core.map_towers(
            gradient, ours, weights, parts, trace="once", inline=inline
        )

    x = tf.ones([300, 300])
    step(x)
    with tw_doctor.record_steps(1) as steps:
        step(x)
    found = {(own.tower, own.part) for own in steps.steps[-1].intervals}
    assert {(k, part) for k in (0, 1) for part in ("forward", "backward")} <= found
