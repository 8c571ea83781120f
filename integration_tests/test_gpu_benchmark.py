"""The benchmark for GPUs, on logical CPUs: one file, and nothing that fails is lost."""

import argparse
import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

FOLDER = Path(__file__).parent / "lab" / "benchmarks"
DEADLINE_S = 560
PARTS = ("one", "kernels", "transformer", "first")


@pytest.fixture
def gpu(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER.parents[1]))
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module("gpu")


def run(folder, *arguments):
    return subprocess.run(
        [sys.executable, str(FOLDER / "run.py"), "gpu", *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
    )


def written(folder):
    return json.loads((folder / "out" / "bench" / "gpu.json").read_text())


@pytest.mark.slow
@pytest.mark.timeout(DEADLINE_S + 40)
def test_figures_of_all_parts_are_in_one_file(tmp_path):
    done = run(tmp_path, "--device", "cpu", "--rounds", "1", "--parts", *PARTS)
    assert done.returncode == 0, done.stdout + done.stderr
    found = written(tmp_path)
    assert {part["status"] for part in found["parts"].values()} == {0}
    assert found["device"] == "cpu"
    tables = {row["work"]: row["peer"] for row in found["rows"]}
    assert len(tables) == len(PARTS) + 1  # of one device there are two
    ours = {row["name"] for row in found["rows"] if row["peer"] == "MirroredStrategy"}
    for kind in ("replicated", "sharded", "parameter server", "one device"):
        assert {kind, f"{kind}, compiled"} <= ours
    assert len(found["targets"]) == 2 + 6 + 2 + 2


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_gpus_that_are_not_there_are_told_in_the_file(tmp_path):
    done = run(tmp_path, "--device", "gpu", "--rounds", "1", "--parts", "small")
    assert done.returncode == 1
    assert done.stderr.endswith("run.py gpu: small: 1\n")
    part = written(tmp_path)["parts"]["small"]
    assert "TensorFlow sees no GPU here" in "\n".join(part["lines"])
    assert written(tmp_path)["rows"] == []


@pytest.mark.slow
def test_a_part_that_hangs_is_killed_and_kept_with_its_last_lines(gpu, tmp_path):
    program = "import time; print('begun', flush=True); time.sleep(100)"
    log = tmp_path / "log"
    part = gpu.run_part([sys.executable, "-c", program], log, "cpu", 5)
    assert part == {"status": "did not end within 5 s", "lines": ["begun"]}
    assert log.read_text() == "begun\n"
    part = gpu.run_part(
        [sys.executable, "-c", "print(1, flush=True); 1 / 0"], log, "cpu", 60
    )
    assert part["status"] == 1
    assert part["lines"][-1] == "ZeroDivisionError: division by zero"


def test_parts_for_which_no_time_is_left_are_named(gpu, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    parts = ["one", "torch"]
    options = {"device": "cpu", "rounds": 1, "within": 0, "torch": None}
    report = importlib.import_module("racing").Report("gpu")
    gpu.main(argparse.Namespace(**options, parts=parts), report)
    assert report.faults == [f"{name}: {gpu.LATE}" for name in parts]


def test_kernels_and_copies_of_a_profile_are_counted_by_step(gpu):
    parts = importlib.import_module("gpu_parts")
    event, line = SimpleNamespace, SimpleNamespace
    names = ["gemm", "MemcpyD2D", "MemcpyH2D", "Memset"]
    known = {n: SimpleNamespace(name=name) for n, name in enumerate(names)}
    # In us: 0 to 4 and 2 to 5 overlap, 7 to 8 is alone.
    spans = [(0, 0, 4), (1, 2, 3), (0, 7, 1), (2, 7, 1), (3, 7, 1)]
    events = [
        event(metadata_id=kind, offset_ps=begin * 10**6, duration_ps=length * 10**6)
        for kind, begin, length in spans
    ]
    lines = [
        line(name="Stream #1(Compute)", timestamp_ns=0, events=events),
        line(name="TensorFlow Ops", timestamp_ns=0, events=events),
    ]
    planes = [
        SimpleNamespace(name="/device:GPU:0", lines=lines, event_metadata=known),
        SimpleNamespace(name="/host:CPU", lines=lines, event_metadata=known),
    ]
    assert parts.counts_in(SimpleNamespace(planes=planes), steps=1) == {
        "kernels": 3.0,
        "copies": 1.0,
        "copies from or to the host": 1.0,
        "busy_ms": 0.006,
    }
