"""Draws learning curves."""

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np


class Curve(Protocol):
    """What is drawn of a run."""

    seed: int
    ended_at: tuple[int, ...]
    returns: tuple[float, ...]


def draw(runs: Sequence[Curve], *, title: str, target: float, to: Path) -> None:
    """Draws the running mean of 100 episodes' returns, a line a run, as PNG."""
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
