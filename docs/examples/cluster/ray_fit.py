"""Runs fit.py on a Ray cluster, with Ray's TensorflowTrainer.

    pip install "ray[train]" scikit-learn
    python ray_fit.py --workers 2

The trainer sets a TF_CONFIG of workers in each process. All have one key: that of
TW_KEY, or a new one.
"""

import argparse

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--workers", type=int, default=2)
parser.add_argument("--cpus", type=float, default=1.0, help="CPUs of each worker")
parser.add_argument("arguments", nargs="*", help="arguments of fit.py, after --")
if __name__ == "__main__":  # --help and wrong options need no Ray.
    parser.parse_args()

import os
import secrets
import sys
from pathlib import Path

import ray
from ray.train import ScalingConfig
from ray.train.tensorflow import TensorflowTrainer

HERE = str(Path(__file__).parent)


def fit(config: dict) -> None:
    sys.path.insert(0, HERE)  # All machines see this folder.
    import fit

    fit.main(config["arguments"])


def main() -> None:
    options = parser.parse_args()
    key = {"TW_KEY": os.environ.get("TW_KEY") or secrets.token_hex(16)}
    ray.init(include_dashboard=False, runtime_env={"env_vars": key})
    each = {"CPU": options.cpus}
    workers = ScalingConfig(num_workers=options.workers, resources_per_worker=each)
    given = {"arguments": options.arguments}
    TensorflowTrainer(fit, train_loop_config=given, scaling_config=workers).fit()


if __name__ == "__main__":
    main()
