"""The PPO example in its short form."""

import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from harness.launching import run_forked, run_to_its_end

EXAMPLE = Path(__file__).parents[1] / "docs" / "examples" / "ppo"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(
        not (find_spec("gymnasium") and find_spec("matplotlib")),
        reason="the example needs gymnasium and matplotlib",
    ),
]


def run(out, *arguments, way=run_forked):
    """Runs the example in a process of its own, as users do."""
    command = [sys.executable, str(EXAMPLE / "train.py"), *arguments]
    return way([*command, "--out", str(out)], deadline_s=240)


@pytest.mark.parametrize(
    ("task", "steps", "way", "above"),
    [
        # A random policy keeps the pole up for about 22 steps.
        ("cartpole", "25600", run_to_its_end, 100),
        ("recurrent", "10240", run_forked, 22),
    ],
)
def test_a_short_run_learns_and_draws_its_curve(tmp_path, task, steps, way, above):
    status, said = run(tmp_path, task, "--seeds", "1", "--steps", steps, way=way)
    assert status in (0, 1), said
    [line] = [line for line in said.splitlines() if "mean of the last" in line]
    assert float(line.split("episodes ")[1].split()[0]) > above, said
    assert (tmp_path / f"{task}.png").stat().st_size > 5_000


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--towers", "0"], "--towers must be at least 1; got 0"),
        (["recurrent", "--towers", "32"], "the 16 sequences of a minibatch of recurre"),
        (["--steps", "-5"], "--steps must be at least 1; got -5"),
        (["--seeds", "1", "-1"], "--seeds must be 0 or more; got [1, -1]"),
        (["pendulum"], "unknown tasks ['pendulum']"),
    ],
)
def test_wrong_options_are_refused(tmp_path, arguments, says):
    status, said = run(tmp_path / "out", *arguments)
    assert status == 2
    assert says in said
    assert not (tmp_path / "out").exists()
