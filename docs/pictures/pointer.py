"""Draws ``step-pointer.png``: ``step-wrong-device.png`` with an arrow to the bug.

python docs/pictures/pointer.py
"""

from pathlib import Path

import matplotlib
import numpy as np

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.patches import Rectangle

HERE = Path(__file__).parent
RED = "#b3261e"
GAP, ROOM = 418, 62  # pixels: above the second device's line, and room for a sentence
BUG = (633, 434, 186, 31)  # "4.2 MB variables" in that line: left, top, width, height
SENTENCE = "The bug: tower 1's last layer lives on CPU:0, so 4.2 MB move at every step."


def draw(picture: np.ndarray, path: Path) -> None:
    """Boxes the bug and points at it from a strip inserted above."""
    strip = np.ones_like(picture[:ROOM])
    picture = np.concatenate([picture[:GAP], strip, picture[GAP:]])
    tall, wide = picture.shape[:2]
    figure = plt.figure(figsize=(wide / 180, tall / 180), dpi=180)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.imshow(picture, interpolation="none")
    axes.set_axis_off()
    left, top, width, height = BUG
    top += ROOM
    marked = {"fill": False, "edgecolor": RED, "linewidth": 1.5}
    axes.add_patch(Rectangle((left, top), width, height, **marked))
    axes.annotate(
        SENTENCE,
        (left + width / 2, top),
        (left + width / 2, GAP + 14),
        color=RED,
        size=9,
        ha="center",
        va="center",
        arrowprops={"arrowstyle": "-|>", "color": RED, "linewidth": 1.5},
    )
    figure.savefig(path)
    plt.close(figure)


if __name__ == "__main__":
    draw(plt.imread(HERE / "step-wrong-device.png")[..., :3], HERE / "step-pointer.png")
