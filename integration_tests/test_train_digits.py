"""The digits example, from the command line and from Python."""

import contextlib
import io
import json
import os
import re
import shutil
import signal
import sys
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from harness import docs_blocks
from harness.processes import Program

import tw_core
from tw_core.testing import CPUS

pytestmark = pytest.mark.slow

SCRIPT = docs_blocks.EXAMPLES / "train_digits.py"
DEADLINE_S = 180
BUILDERS = ["replicated", "sharded", "parameter-server"]


@pytest.fixture(scope="module")
def example():
    with docs_blocks.example("train_digits") as found:
        yield found


def train(example, out, **changes):
    options = {"devices": CPUS[:4], "epochs": 2, "out": out} | changes
    example.main(example.Options(**options))
    return json.loads((out / "summary.json").read_text())


@pytest.fixture(scope="module")
def run(example, tmp_path_factory):
    """Builder, mode and epochs -> a run's folder, its summary, and what it said."""

    @cache
    def find(builder, mode, epochs):
        out, said = tmp_path_factory.mktemp("run"), io.StringIO()
        with contextlib.redirect_stdout(said):
            summary = train(example, out, builder=builder, mode=mode, epochs=epochs)
        return out, summary, said.getvalue()

    return find


@pytest.fixture
def begun(run, tmp_path):
    """Returns a copy of the folder of a run of one epoch."""

    def copy(builder, mode):
        return shutil.copytree(run(builder, mode, 1)[0], tmp_path / "begun")

    return copy


@pytest.mark.parametrize("mode", ["graph", "function"])
@pytest.mark.parametrize("builder", BUILDERS)
def test_a_run_learns_and_writes_everything(run, builder, mode):
    out, summary, said = run(builder, mode, 3)
    assert summary["test_accuracy"] > 0.8
    assert summary["history"]["loss"][-1] < summary["history"]["loss"][0] / 2
    assert summary["options"]["builder"] == builder
    assert summary["built"]["towers"] == 4
    placed = summary["built"]["devices"]
    holding = [facts["bytes"] > 0 for facts in placed.values()]
    assert sum(holding) == (1 if builder == "parameter-server" else 4)
    for name in ("curves.png", "placement.png", "timeline.png"):
        assert (out / name).read_bytes().startswith(b"\x89PNG")
    assert json.loads((out / "timings.json").read_text())["images_per_s"] > 0
    for word in ("4 towers", builder, "cpu:3", "bytes", "Test accuracy"):
        assert word.lower() in said.lower()


@pytest.mark.parametrize("num_devices", [1, 2, 4])
@pytest.mark.parametrize("length", [1, 20, 90])
def test_names_stay_in_their_boxes(example, tmp_path, monkeypatch, length, num_devices):
    figures = []
    digits_plots = sys.modules["digits_plots"]
    monkeypatch.setattr(digits_plots.plt, "close", figures.append)
    devices = [f"/device:CPU:{n}" for n in range(num_devices)]
    placed = tw_core.devices.Placement(
        operations=dict.fromkeys(devices, 80),
        variables={own: {"w" * length: 4, "dense/Adam_1": 20_480} for own in devices},
        transfers=(),
    )
    towers = tw_core.towers([CPUS[n % num_devices] for n in range(8)])
    path = tmp_path / "placement.png"
    digits_plots.draw_placement(placed, towers, title="replicated", path=path)
    axes = figures[0].axes[0]
    renderer = figures[0].canvas.get_renderer()
    boxes = [own.get_window_extent(renderer) for own in axes.patches]
    assert len(axes.texts) == 2 * len(boxes) == 2 * num_devices
    for n, text in enumerate(axes.texts):
        own = text.get_window_extent(renderer)
        assert boxes[n // 2].x0 < own.x0 < own.x1 < boxes[n // 2].x1, text


@pytest.mark.parametrize("mode", ["graph", "function"])
def test_the_same_seed_gives_the_same_summary(example, tmp_path, mode):
    choice = {"mode": mode, "epochs": 1, "devices": CPUS[:2]}
    one, two, other = (
        train(example, tmp_path, seed=seed, **choice) for seed in (5, 5, 6)
    )
    assert one == two
    assert one["history"] != other["history"]


@pytest.mark.parametrize("mode", ["graph", "function"])
@pytest.mark.parametrize("builder", BUILDERS)
def test_a_resumed_run_ends_as_an_uninterrupted_one(example, run, begun, builder, mode):
    choice = {"builder": builder, "mode": mode}
    straight, summary, _ = run(builder, mode, 3)
    out = begun(builder, mode)
    resumed = train(example, out, epochs=3, resume=True, **choice)
    assert resumed["history"] == summary["history"]
    got, want = weights(out), weights(straight)
    assert got.keys() == want.keys()
    for name, value in want.items():
        np.testing.assert_array_equal(got[name], value)


def test_a_finished_run_that_is_resumed_says_so_and_stays_as_it_is(
    example, begun, capsys
):
    out = begun("replicated", "graph")
    before = {path: path.stat().st_mtime_ns for path in out.iterdir()}
    with pytest.raises(SystemExit, match=r"^0$"):
        train(example, out, epochs=1, resume=True)
    assert "has been trained for all 1 epochs" in capsys.readouterr().out
    assert {path: path.stat().st_mtime_ns for path in out.iterdir()} == before

    (out / "summary.json").unlink()  # as after Ctrl-C in the last step
    assert len(train(example, out, epochs=1, resume=True)["history"]["loss"]) == 1


def weights(out):
    import tensorflow as tf

    name = json.loads((out / "state.json").read_text())["checkpoint"]
    reader = tf.train.load_checkpoint(str(out / name))
    return {key: reader.get_tensor(key) for key in reader.get_variable_to_shape_map()}


def test_a_run_resumes_by_another_builder_and_in_the_other_mode(example, begun):
    out = begun("replicated", "graph")
    others = [("sharded", "graph"), ("parameter-server", "function")]
    for epochs, (builder, mode) in enumerate([*others, ("sharded", "function")], 2):
        choice = {"builder": builder, "mode": mode, "resume": True}
        summary = train(example, out, epochs=epochs, **choice)
    assert len(summary["history"]["loss"]) == epochs
    assert summary["test_accuracy"] > 0.8


def test_a_sharded_run_has_each_slot_once(run):
    def held(builder):
        _, summary, _ = run(builder, "graph", 1)
        placed = summary["built"]["devices"].values()
        return sum(facts["bytes"] for facts in placed)

    share = (4 + 2) / (3 * 4)
    assert held("sharded") / held("replicated") == pytest.approx(share, rel=0.02)


@pytest.fixture
def refused(example, tmp_path, capsys, monkeypatch):
    """Hears the sentence with which options are refused, before anything is built."""

    def hear(*, builds=False, **changes):
        with monkeypatch.context() as patch:
            if not builds:
                for name in ("graph_program", "function_program"):
                    patch.setattr(example, name, None)
            capsys.readouterr()  # of an earlier run
            with pytest.raises(SystemExit) as caught:
                train(example, **{"out": tmp_path} | changes)
        assert caught.value.code == 2
        assert not (tmp_path / "summary.json").exists()
        sentence = capsys.readouterr().err
        assert sentence.count("\n") == 1
        return sentence

    return hear


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"devices": ("/gpu:0", "/gpu:1")}, "no '/gpu:0', '/gpu:1'; it has /cpu:0, "),
        ({"devices": ("/cpu:0", "/cpu:9")}, "--devices: this process has no '/cpu:9';"),
        ({"devices": ("/job:ps/task:0/cpu:0",)}, "has no '/job:ps/task:0/cpu:0'"),
        ({"devices": ("/nope:0", "")}, "has no '/nope:0', ''"),
        ({"devices": (), "towers": 0}, "--towers must be at least 1; got 0."),
        ({"epochs": -1}, "--epochs must be at least 1; got -1."),
        ({"batch_size": 0}, "--batch-size must be at least 1; got 0."),
        ({"batch_size": 30}, "not divisible by the 4 towers"),
        ({"batch_size": 2000}, "more than the 1437 training"),
        ({"learning_rate": float("nan")}, "--learning-rate must be finite; got nan."),
        ({"seed": -1}, "--seed must be from 0 to 2**31 - 1; got -1."),
        ({"out": Path("/dev/null/below")}, "cannot be written: [Errno 20] Not a dire"),
        ({"resume": True}, "holds no checkpoint"),
    ],
)
def test_wrong_options_are_refused_before_anything_is_built(refused, changes, says):
    assert says in refused(**changes)


STATE = {"checkpoint": "model", "step": 44, "batch_size": 64}


@pytest.mark.parametrize(
    ("text", "changes", "says"),
    [
        ("{", {}, "cannot be read: JSONDecodeError"),
        ("[1]", {}, "cannot be read: TypeError"),
        ("{}", {}, "cannot be read: KeyError('checkpoint')"),
        (json.dumps(STATE | {"checkpoint": "gone"}), {}, "gone.index is missing"),
        (json.dumps(STATE), {"batch_size": 32}, "was trained with --batch-size 64"),
        (json.dumps(STATE), {"epochs": 1}, "trained for 2 epochs, and --epochs is 1"),
    ],
)
def test_what_cannot_be_resumed_is_refused(refused, tmp_path, text, changes, says):
    (tmp_path / "state.json").write_text(text)
    (tmp_path / "model.index").touch()
    assert says in refused(resume=True, **changes)


def test_a_run_whose_loss_is_not_finite_ends_with_an_error(example, tmp_path):
    with pytest.raises(SystemExit) as caught:
        train(example, tmp_path, learning_rate=1e30, devices=CPUS[:1])
    sentence = str(caught.value)  # to which Python gives exit status 1
    assert re.match(r"The loss of step \d+ is (nan|inf): this run has failed", sentence)
    assert "--learning-rate; it was 1e+30." in sentence
    assert not list(tmp_path.glob("*.json"))


def test_a_checkpoint_of_another_model_is_refused_with_the_differences(
    example, tmp_path, monkeypatch, refused
):
    train(example, tmp_path, epochs=1)
    (tmp_path / "summary.json").unlink()
    monkeypatch.setattr(example, "FILTERS", (8, 32))
    said = refused(builds=True, resume=True)
    assert "checkpoint of another model" in said
    assert "conv1/kernel: [3, 3, 1, 16] in the checkpoint, [3, 3, 1, 8]" in said


def test_ctrl_c_ends_the_run_with_a_checkpoint_and_a_sentence(tmp_path):
    command = [sys.executable, SCRIPT, "--out", tmp_path, "--epochs", "100000"]
    env = os.environ | {"TF_CPP_MIN_LOG_LEVEL": "2"}
    with Program(command, deadline_s=DEADLINE_S, env=env) as process:
        process.wait_for(r"\b[1-9]\d*(\.\d+)?k/")  # images that were trained on
        process.send_signal(signal.SIGINT)
        status, said = process.finish(), process.out
    assert status == 130
    assert "Interrupted after step" in said
    assert "--resume" in said
    state = json.loads((tmp_path / "state.json").read_text())
    assert state["step"] > 0
    assert (tmp_path / f"{state['checkpoint']}.index").exists()
