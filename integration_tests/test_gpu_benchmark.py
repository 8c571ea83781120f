"""The benchmark for GPUs, on logical CPUs: one file, and nothing that fails is lost."""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent / "benchmarks"
DEADLINE_S = 560


@pytest.fixture
def gpu(monkeypatch):
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


@pytest.mark.full
@pytest.mark.timeout(600)
def test_figures_and_a_picture_lie_in_one_folder(tmp_path):
    done = run(tmp_path, "--device", "cpu", "--rounds", "1", "--parts", "build")
    assert done.returncode == 0, done.stdout + done.stderr
    found = written(tmp_path)
    assert found["parts"] == {"build": {"status": 0, "lines": []}}
    assert found["device"] == "cpu"
    assert {"once", "each", "MirroredStrategy"} <= {
        row["name"] for row in found["rows"]
    }
    picture = tmp_path / "out" / "bench" / "gpu.png"
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.timeout(600)
def test_gpus_that_are_not_there_are_told_in_the_file(tmp_path):
    done = run(tmp_path, "--device", "gpu", "--rounds", "1", "--parts", "step")
    assert done.returncode == 1
    assert done.stderr.endswith("run.py gpu: step: 1\n")
    part = written(tmp_path)["parts"]["step"]
    assert "TensorFlow sees no GPU here" in "\n".join(part["lines"])
    assert written(tmp_path)["rows"] == []


def test_a_part_that_hangs_is_killed_and_kept_with_its_last_lines(gpu, tmp_path):
    program = "import time; print('begun', flush=True); time.sleep(100)"
    part = gpu.run_part([sys.executable, "-c", program], tmp_path, "cpu", 5)
    assert part == {"status": "did not end within 5 s", "lines": ["begun"]}
    part = gpu.run_part([sys.executable, "-c", "print(1); 1 / 0"], tmp_path, "cpu", 60)
    assert part["status"] == 1
    assert part["lines"][-1] == "ZeroDivisionError: division by zero"
