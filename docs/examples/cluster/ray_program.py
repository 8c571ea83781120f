"""Runs train.py on a Ray cluster: every TensorFlow task is a Ray actor.

    pip install ray scikit-learn
    python ray_program.py --workers 2 -- --steps 300

Ray's own TensorflowTrainer, used in ``ray_fit.py``, sets TF_CONFIG only for workers;
this program also sets it for parameter servers.
"""

import argparse
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--ps", type=int, default=1)
parser.add_argument("--workers", type=int, default=2)
parser.add_argument("--address", help="a running Ray cluster; by default a local one")
parser.add_argument("arguments", nargs="*", help="arguments of train.py, after --")
if __name__ == "__main__":  # --help and wrong options need no Ray.
    parser.parse_args()

import ray

TRAIN = Path(__file__).with_name("train.py")


@ray.remote(num_cpus=0.5, max_concurrency=2)
class Task:
    """One task: a separate process, as a TensorFlow server cannot be stopped.

    Allows two calls at once, so that a task can be killed during ``wait``.
    """

    def __init__(self) -> None:
        self._process = None

    def address(self) -> str:
        with socket.socket() as free:
            free.bind(("", 0))
            return f"{ray.util.get_node_ip_address()}:{free.getsockname()[1]}"

    def start(self, tf_config: dict, arguments: list[str]) -> None:
        environment = {**os.environ, "TF_CONFIG": json.dumps(tf_config)}
        command = [sys.executable, str(TRAIN), *arguments]
        self._process = subprocess.Popen(command, env=environment)

    def wait(self) -> int:
        return self._process.wait()

    def end(self) -> None:
        self._process.kill()
        self._process.wait()


def main() -> int:
    options = parser.parse_args()
    if options.ps < 1 or options.workers < 1:
        parser.error(f"needs --ps and --workers; got {options.ps}, {options.workers}")
    ray.init(address=options.address, include_dashboard=False)
    counts = {"ps": options.ps, "worker": options.workers}
    tasks = {job: [Task.remote() for _ in range(n)] for job, n in counts.items()}
    addresses = {
        job: ray.get([task.address.remote() for task in listed])
        for job, listed in tasks.items()
    }
    for job, listed in tasks.items():
        for index, task in enumerate(listed):
            own = {"type": job, "index": index}
            config = {"cluster": addresses, "task": own}
            ray.get(task.start.remote(config, options.arguments))
    try:
        statuses = ray.get([task.wait.remote() for task in tasks["worker"]])
    finally:
        ray.get([task.end.remote() for listed in tasks.values() for task in listed])
        ray.shutdown()
    print(f"workers ended with {statuses}")
    return int(any(statuses))  # a status is negative after a signal


if __name__ == "__main__":
    sys.exit(main())
