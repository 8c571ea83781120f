"""On one GPU, shared by two towers: steps, fit and first steps, and tw-doctor's report.

Each part writes out/bench/gpu-PART.json and .log as it runs. The end result is one JSON
file, to attach to an issue. If a part fails or hangs, its last lines
are kept, and the others run. --device cpu only checks that the benchmark works.
"""

import importlib.util
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from harness.processes import Program
from racing import OUT, Report, in_own_process

OPTIONS = {
    "device": {"choices": ("auto", "cpu", "gpu"), "default": "auto"},
    "rounds": 5,
    "within": 470,
    "torch": None,
    "parts": (
        "one",
        "small",
        "kernels",
        "resnet",
        "transformer",
        "first",
        "float32",
        "torch",
        "doctor",
    ),
}
PROGRAM = str(Path(__file__).with_name("gpu_parts.py"))
PART_S, DOCTOR_S = 200.0, 90.0
LAST_LINES, LOOK_EVERY_S = 30, 0.2
LATE = "not begun: no time was left; run it by --parts"


def count_gpus() -> int:
    """Counts the GPUs that TensorFlow sees."""
    import tensorflow as tf

    return len(tf.config.list_physical_devices("GPU"))


def file_of(name: str) -> Path:
    """Returns the file that a part writes."""
    return OUT / f"gpu-{name}.json"


def command_of(name: str, options: Any, device: str, left_s: float) -> list[str]:
    """Returns the command of a part; none where it cannot be run."""
    if name == "doctor":
        limit = str(max(1.0, min(DOCTOR_S, left_s - 5)))
        own = ["--device", device, "--time-limit", limit, "--json", str(file_of(name))]
        return [sys.executable, "-m", "tw_doctor", *own]
    command = [sys.executable, PROGRAM, name, str(options.rounds)]
    if name != "torch":
        return command
    here = sys.executable if importlib.util.find_spec("torch") else None
    python = options.torch or here
    return [*command, python] if python else []


def run_part(command: list[str], log: Path, device: str, at_most_s: float) -> Any:
    """Runs a part, shows what it prints, and returns its status and its last lines."""
    env = {**os.environ, "TOWERS_BENCH_DEVICE": device}
    until, status = time.monotonic() + at_most_s, None
    with Program(command, log=log, env=env) as process:
        while status is None and time.monotonic() < until:
            time.sleep(LOOK_EVERY_S)
            status = process.poll()
            for line in process.new_lines():
                print(line, flush=True)
        lines = process.out.splitlines()[-LAST_LINES:]
    if status is None:
        status = f"did not end within {at_most_s:.0f} s"
    return {"status": status, "lines": lines if status else []}


def main(options: Any, report: Report) -> None:
    """Runs the parts, and collects their figures."""
    ends = time.monotonic() + options.within
    device = options.device
    if device == "auto":
        device = "gpu" if in_own_process(count_gpus) else "cpu"
    report.notes = {"device": device, "parts": {}, "doctor": None}
    OUT.mkdir(parents=True, exist_ok=True)
    for name in options.parts:
        print(f"\n== {name}, on {device.upper()}s", flush=True)
        file = file_of(name)
        file.unlink(missing_ok=True)
        left = ends - time.monotonic()
        command = command_of(name, options, device, left)
        if left <= 0:
            part = {"status": LATE, "lines": []}
        elif command:
            seconds = min(PART_S, left)
            part = run_part(command, file.with_suffix(".log"), device, seconds)
        else:
            part = {"status": 0, "lines": ["no PyTorch here; name one by --torch"]}
        report.notes["parts"][name] = part
        if part["status"]:
            report.faults.append(f"{name}: {part['status']}")
        if not file.exists():
            continue
        found = json.loads(file.read_text(encoding="utf-8"))
        if name == "doctor":
            report.notes["doctor"] = found
        else:
            report.rows += found["rows"]
            report.targets += found["targets"]
