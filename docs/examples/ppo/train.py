"""Trains PPO on gymnasium's CartPole and Acrobot with tw-rlload.

    python docs/examples/ppo/train.py                       # everything
    python docs/examples/ppo/train.py cartpole --seeds 1    # one run

Every run takes under a minute on two cores. Each task's learning curve is written to
``--out`` as PNG; the exit status is 0 if all runs met their targets.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tasks import TASKS, Task

STEPS = 102_400
TAIL = 100
parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("tasks", nargs="*", help=f"of {', '.join(TASKS)}; default all")
parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
parser.add_argument("--steps", type=int, default=STEPS, help="environment steps")
parser.add_argument("--towers", type=int, default=2, help="logical CPUs to train on")
parser.add_argument("--out", type=Path, default=Path("out/ppo"))
if __name__ == "__main__":  # --help and wrong options need no TensorFlow.
    parser.parse_args()

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
import tensorflow as tf
from learner import Learner

import tw_core


@dataclass(frozen=True)
class Run:
    """One training run."""

    seed: int  # of all random numbers
    ended_at: tuple[int, ...]  # steps at which episodes ended
    returns: tuple[float, ...]  # of these episodes
    seconds: float  # duration

    @property
    def score(self) -> float:
        """Mean return of the last 100 episodes."""
        return float(np.mean(self.returns[-TAIL:]))


def train(task: Task, *, seed: int, steps: int, num_towers: int = 2) -> Run:
    """Trains one policy from scratch."""
    start = time.perf_counter()
    per_batch = task.num_envs * task.num_steps
    config = tw_core.session_config(num_cpus=num_towers)
    with tf.Graph().as_default():
        learner = Learner(task, num_towers=num_towers, seed=seed)
        with tf.compat.v1.Session(config=config) as sess:
            learner.start(sess)
            for done in range(0, steps, per_batch):
                learner.learn(done / steps)
    collector = learner.collector
    return Run(
        seed=seed,
        ended_at=tuple(collector.ended_at),
        returns=tuple(collector.returns),
        seconds=time.perf_counter() - start,
    )


def draw(runs: Sequence[Run], *, title: str, target: float, to: Path) -> None:
    """Draws the running mean of 100 episodes' returns, one line per run, as PNG."""
    figure, axes = plt.subplots(figsize=(7, 4))
    for run in runs:
        sums = np.cumsum([0.0, *run.returns])
        first = np.maximum(np.arange(1, len(sums)) - 100, 0)
        means = (sums[1:] - sums[first]) / (np.arange(1, len(sums)) - first)
        axes.plot(run.ended_at, means, label=f"seed {run.seed}")
    axes.axhline(target, color="grey", linestyle=":", label="target")
    axes.set(title=title, xlabel="steps", ylabel="return, mean of 100 episodes")
    axes.legend()
    figure.tight_layout()
    figure.savefig(to, dpi=120)
    plt.close(figure)


def main(arguments: Sequence[str] | None = None) -> int:
    """Trains the tasks of the command line; returns the exit status."""
    options = _parse(arguments)
    missed = 0
    for name in options.tasks or TASKS:
        task, runs = TASKS[name], []
        for seed in options.seeds:
            run = train(task, seed=seed, steps=options.steps, num_towers=options.towers)
            met = run.score >= task.target
            missed += not met
            print(
                f"{name} seed {seed}: mean of the last {TAIL} episodes {run.score:.1f} "
                f"(target {task.target:g}, {'met' if met else 'MISSED'}), "
                f"{run.seconds:.1f} s",
                flush=True,
            )
            runs.append(run)
        draw(
            runs,
            title=f"PPO on {task.env}{', velocities hidden' if task.shown else ''}",
            target=task.target,
            to=options.out / f"{name}.png",
        )
    return 1 if missed else 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    options = parser.parse_args(arguments)
    unknown = sorted(set(options.tasks) - set(TASKS))
    if unknown:
        parser.error(f"unknown tasks {unknown}; known are {sorted(TASKS)}")
    for name in ("steps", "towers"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} must be at least 1; got {getattr(options, name)}")
    if min(options.seeds) < 0:
        parser.error(f"--seeds must be 0 or more; got {options.seeds}")
    _check_towers(options)
    try:
        options.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"--out {options.out} cannot be written: {error}")
    return options


def _check_towers(options: argparse.Namespace) -> None:
    """Refuses towers that cannot share a minibatch, or have no device."""
    for name in options.tasks or TASKS:
        sequences = TASKS[name].minibatch // TASKS[name].sequence
        if sequences % options.towers:
            parser.error(
                f"--towers must divide the {sequences} sequences of a minibatch of "
                f"{name}; got {options.towers}"
            )
    tw_core.use_logical_cpus(options.towers)
    if len(devices := tw_core.devices.available_devices()) < options.towers:
        parser.error(f"--towers {options.towers} is more than {', '.join(devices)}")


if __name__ == "__main__":
    sys.exit(main())
