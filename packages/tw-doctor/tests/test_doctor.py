"""``tw-doctor`` as a process: what holds, what does not, what hangs, how it ends."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from harness.processes import IN_BACKGROUND, Program, is_alive, wait_until

import tw_reduce
from tw_reduce.plans import read_measurements

DOCTOR = [sys.executable, "-m", "tw_doctor"]
DEADLINE_S = 200
PACKAGE = Path(__file__).parents[1]
# Plants two faults into every Python that starts with this on its path.
PLANT = """
import tw_reduce

def wrong(grads, *, devices):
    return [[sum(c[1:], c[0]) for c in zip(*grads[:1])] for _ in grads]

def broken(grads, **options):
    {body}

tw_reduce.sum_round_robin, tw_reduce.sum_collective = wrong, broken
"""
CRASHING = "__import__('os').abort()"
# A collective of three devices, of which two never come: Ctrl-C does not end it.
HANGING = """
    import tensorflow as tf
    keys = {"group_key": 77, "instance_key": 78, "group_size": 3}
    kind = {"merge_op": "Add", "final_op": "Id", "subdiv_offsets": [0]}
    total = tf.raw_ops.CollectiveReduce(input=grads[0][1], **keys, **kind)
    return [[total] * len(tower) for tower in grads]
"""


def run(*options, env=None):
    return subprocess.run(
        [*DOCTOR, *options],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        env=env,
    )


def children_of(pid):
    listed = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(child) for child in listed]


@pytest.fixture(scope="module")
def examined(tmp_path_factory):
    """A whole examination in short."""
    file = tmp_path_factory.mktemp("doctor") / "machine.json"
    env = {**os.environ, "TF_CONFIG": ""}
    options = ("--towers", "2", "--device", "cpu", "--json", str(file))
    done = run(*options, "--measure-for", "1", "--time-limit", "180", env=env)
    return done, json.loads(file.read_text()), file


@pytest.mark.timeout(DEADLINE_S + 30)
def test_a_machine_that_is_well_is_told_so(examined):
    done, report, file = examined
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""  # no bar where there is no terminal
    for line in ("versions   python ", "memory ", "TF_CONFIG  not set", "exposed "):
        assert line in done.stdout
    assert re.search("^processes  (no tw-ranks|tensorflow, as )", done.stdout, re.M)
    assert re.search(r"^  ok    sum_balanced$", done.stdout, re.MULTILINE)
    assert "sum_nccl  NCCL is for GPUs" in done.stdout
    assert "100 of 4 KiB, copied to every tower" in done.stdout
    assert "cpu:0 -> cpu:1" in done.stdout
    assert done.stdout.rstrip().endswith(f"Wrote {file}")
    assert report["faults"] == []
    assert {row["status"] for row in report["checks"]} == {"ok", "unfit"}
    assert [row["towers"] for row in report["scaling"]["rows"]] == [1, 2]
    assert report["facts"]["versions"]["tw-reduce"]
    pairs = {(row["from"], row["to"]) for row in report["copies"]}
    assert pairs == {("/cpu:0", "/cpu:1"), ("/cpu:1", "/cpu:0")}


@pytest.mark.timeout(DEADLINE_S + 60)
def test_what_is_written_makes_the_choice_of_others(examined):
    import tensorflow as tf

    _, report, file = examined
    measured = read_measurements(file)
    assert measured == read_measurements(report)
    assert measured.devices == ("/device:CPU:0", "/device:CPU:1")
    assert len(measured.profiles) == 3
    plans = []
    for make in (tw_reduce.auto, tw_reduce.all_reduce):
        reduce = make(["/cpu:0", "/cpu:1"], measured=file, explain=plans.append)

        def step(reduce=reduce):
            return reduce([[tf.fill([9], k), tf.ones([99, 99])] for k in (1.0, 2.0)])

        for small, large in tf.function(step)():
            np.testing.assert_array_equal(small, 3.0 * np.ones(9))
            np.testing.assert_array_equal(large, 2.0 * np.ones([99, 99]))
    assert all("measured" in own.why for plan in plans for own in plan.choices)


@pytest.mark.slow
@pytest.mark.timeout(DEADLINE_S + 30)
@pytest.mark.parametrize(
    ("body", "said", "timeout_s"),
    [
        (HANGING, "did not end within 15 s", 15),
        (CRASHING, "its process was ended by SIGABRT", 60),
    ],
    ids=["hangs", "crashes"],
)
def test_what_is_wrong_hangs_or_crashes_is_named_and_the_rest_goes_on(
    tmp_path, body, said, timeout_s
):
    (tmp_path / "sitecustomize.py").write_text(PLANT.format(body=body))
    path = filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")])
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(path)}
    limit = ("--timeout", str(timeout_s))
    done = run("--checks-only", "--device", "cpu", *limit, env=env)
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert re.fullmatch(
        r"tw-doctor: 2 problems: sum_round_robin: gradient \d+ of tower 0 "
        rf"is -?\d+ instead of -?\d+ at \[.*\]; sum_collective: {said}.*\.",
        line,
    )
    assert "WRONG sum_round_robin" in done.stdout
    for name in ("hierarchical", "partition"):  # The others are checked all the same.
        assert f"ok    {name}" in done.stdout


@pytest.mark.slow
@pytest.mark.timeout(150)
def test_gpus_that_are_not_there_are_missed_in_a_sentence():
    done = run("--device", "gpu", env={**os.environ, "CUDA_VISIBLE_DEVICES": ""})
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert "--device gpu: TensorFlow sees no GPU here, so nothing was checked" in line
    assert "CUDA_VISIBLE_DEVICES hides all GPUs from TensorFlow: unset it" in line
    assert "RuntimeError" not in line


@pytest.mark.timeout(90)
def test_it_ends_at_its_time_limit():
    start = time.monotonic()
    done = run("--time-limit", "1")
    assert time.monotonic() - start < 30
    assert done.returncode == 1
    assert "the checks did not end within 1 s; raise --time-limit" in done.stderr


@pytest.mark.slow
@pytest.mark.timeout(90)
@pytest.mark.parametrize(
    ("start", "number"),
    [((), signal.SIGINT), (IN_BACKGROUND, signal.SIGTERM), ((), signal.SIGKILL)],
    ids=["Ctrl-C", "SIGTERM in the background", "killed"],
)
def test_a_signal_ends_it_with_the_process_that_it_started(tmp_path, start, number):
    file = tmp_path / "machine.json"
    with Program([*start, *DOCTOR, "--json", file], is_apart=True) as doctor:
        children = wait_until(lambda: children_of(doctor.pid))
        doctor.send_signal(number)
        is_killed = number == signal.SIGKILL
        assert doctor.finish() == (-number if is_killed else 128 + number)
    if not is_killed:
        assert doctor.err == "tw-doctor: interrupted; nothing was written\n"
    # One that was being started sees its input closed.
    wait_until(lambda: not any(map(is_alive, children)))
    assert not file.exists()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--towers", "1"], "argument --towers: must be 2 or more; got '1'"),
        (["--towers", "two"], "must be 2 or more; got 'two'"),
        (["--device", "tpu"], "invalid choice: 'tpu'"),
        (["--time-limit", "0"], "--time-limit: must be seconds above 0; got '0'"),
        (["--timeout", "nan"], "must be seconds above 0; got 'nan'"),
        (["--json", "/no/such/folder/x.json"], "there is no folder /no/such/folder"),
        (["--json", "/"], "argument --json: / is a folder"),
        (["--what"], "unrecognized arguments: --what"),
    ],
)
def test_wrong_options_are_refused_before_anything_starts(options, said, capsys):
    from tw_doctor import main

    with pytest.raises(SystemExit) as end:
        main(options)
    assert end.value.code == 2
    assert said in capsys.readouterr().err
