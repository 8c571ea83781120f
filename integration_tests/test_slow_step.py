"""The planted faults of docs/examples/slow_step.py are told by their timelines."""

import importlib.util
import json
from pathlib import Path

import pytest

import tw_core
from tw_core.testing import CPUS
from tw_doctor import explained

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def slow_step():
    path = ROOT / "docs" / "examples" / "slow_step.py"
    spec = importlib.util.spec_from_file_location("slow_step", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.LARGE, module.NUM_SMALL, module.LATE_S = 256, 40, 0.02
    with pytest.MonkeyPatch.context() as patch:
        # The devices that all tests of this process share.
        patch.setattr(tw_core, "use_logical_cpus", lambda count: CPUS[:count])
        yield module


@pytest.fixture(scope="module")
def healthy(slow_step):
    return slow_step.record("none", num_steps=2)


def taken(steps, cargo, device):
    """Bytes a step that a device takes of what others read of variables."""
    return sum(
        arrival.num_bytes or 0
        for step in steps.steps
        for arrival in step.arrivals
        if arrival.device == device and cargo in arrival.name
    ) / len(steps.steps)


def number(steps, part):
    return sum(own.part == part for own in steps.steps[-1].intervals)


def wait_of(steps, word):
    rows = [row for row in steps.summary().rows if row.part == "wait"]
    return max((row.ms for row in rows if word in row.waits_for), default=0.0)


def test_a_healthy_step_is_explained_and_takes_no_variables(slow_step, healthy):
    assert all(explained(step) >= 0.95 for step in healthy.steps)
    for device in healthy.steps[0].devices:
        assert taken(healthy, "ReadVariableOp", device) == 0


def test_a_variable_on_the_wrong_device_is_taken_from_there(slow_step):
    steps = slow_step.record("wrong-device", num_steps=2)
    first, second = steps.steps[0].devices
    assert taken(steps, "ReadVariableOp", second) == 4 * slow_step.LARGE**2
    assert taken(steps, "ReadVariableOp", first) == 0


def test_unpacked_gradients_show_by_their_number(slow_step, healthy):
    steps = slow_step.record("unpacked", num_steps=2)
    more = number(steps, "reduce") - number(healthy, "reduce")
    assert more > 2 * slow_step.NUM_SMALL
    assert number(steps, "apply") == number(healthy, "apply")


def test_late_input_is_time_between_steps(slow_step):
    steps = slow_step.record("late-input", num_steps=2)
    assert wait_of(steps, "between steps") >= 0.9 * 1e3 * slow_step.LATE_S


def test_the_program_writes_picture_and_trace(slow_step, tmp_path, monkeypatch, capsys):
    out = tmp_path / "out"
    arguments = ["slow_step.py", "--fault", "unpacked", "--out", str(out)]
    monkeypatch.setattr("sys.argv", arguments)
    slow_step.main()
    assert "waits for" in capsys.readouterr().out
    assert (out / "unpacked.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads((out / "unpacked.json").read_text())["traceEvents"]
