"""What nobody has yet run on GPUs: tw-doctor, all-reduces, steps, fit, first steps.

One file of JSON and one picture, to attach to an issue. A part that fails or hangs is
kept with its last lines, and the others run. With --device cpu it shows that it works.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections import deque
from pathlib import Path
from typing import Any

from racing import Report, in_own_process

OPTIONS = {
    "device": {"choices": ("auto", "cpu", "gpu"), "default": "auto"},
    "towers": [2],
    "rounds": 5,
    "at_most": 900,
    "parts": ("doctor", "reduce", "step", "fit", "build"),
}
RUN = [sys.executable, str(Path(__file__).with_name("run.py"))]
# The arguments of each part; numbers of towers and rounds are added.
PARTS = {
    "reduce": ["--profiles", "resnet50", "small"],
    "step": ["--groups", "function", "keras"],
    "fit": ["--networks", "--works", "convolutional"],
    "build": ["--networks", "dense"],
}
LAST_LINES = 30


def count_gpus() -> int:
    """Counts the GPUs that TensorFlow sees."""
    import tensorflow as tf

    return len(tf.config.list_physical_devices("GPU"))


def command_of(name: str, options: Any, device: str) -> list[str]:
    """Returns the command of a part."""
    towers = list(map(str, options.towers))
    if name == "doctor":
        own = ["--device", device, "--towers", towers[0], "--json", "doctor.json"]
        return [sys.executable, "-m", "tw_doctor", *own]
    numbers = ["--towers", *towers, "--rounds", str(options.rounds)]
    return [*RUN, name, *PARTS[name], *numbers]


def run_part(command: list[str], folder: Path, device: str, at_most_s: float) -> Any:
    """Runs a part, shows what it prints, and returns its status and its last lines."""
    lines: deque[str] = deque(maxlen=LAST_LINES)
    with subprocess.Popen(
        command,
        cwd=folder,
        env={**os.environ, "TOWERS_BENCH_DEVICE": device},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,  # so that all its processes can be killed
    ) as process:

        def kill() -> None:
            os.killpg(process.pid, signal.SIGKILL)

        timer = threading.Timer(at_most_s, kill)
        timer.start()
        try:
            for line in process.stdout or ():
                print(line, end="", flush=True)
                lines.append(line.rstrip("\n"))
            status = process.wait()
        except BaseException:
            kill()
            raise
        finally:
            hung = not timer.is_alive()
            timer.cancel()
    if hung:
        status = f"did not end within {at_most_s:g} s"
    return {"status": status, "lines": list(lines) if status else []}


def main(options: Any, report: Report) -> None:
    """Runs the parts, and collects their figures."""
    device = options.device
    if device == "auto":
        device = "gpu" if in_own_process(count_gpus) else "cpu"
    report.notes = {"device": device, "parts": {}, "doctor": None}
    for name in options.parts:
        with tempfile.TemporaryDirectory() as folder:
            print(f"\n== {name}, on {device.upper()}s", flush=True)
            command = command_of(name, options, device)
            part = run_part(command, Path(folder), device, options.at_most)
            report.notes["parts"][name] = part
            if part["status"]:
                report.faults.append(f"{name}: {part['status']}")
            for file in sorted(Path(folder).rglob("*.json")):
                made = json.loads(file.read_text(encoding="utf-8"))
                if name == "doctor":
                    report.notes["doctor"] = made
                else:
                    report.rows += made["rows"]
