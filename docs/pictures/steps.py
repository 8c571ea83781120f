"""Records and draws the pictures ``step-*.png`` of ``docs/howto/slow-step.md``.

    python docs/pictures/steps.py

The faults of ``docs/examples/slow_step.py`` take turns, so that other work on the
machine disturbs all of them; of each, the fastest step is drawn. ``step-pointer.png``
is the step with a variable on the wrong device and an arrow to the bug. A GPU drew
``step-gpu.png``.
"""

import sys
import textwrap
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "examples"))

import numpy as np
import slow_step
import tensorflow as tf
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.transforms import Bbox

import tw_core
import tw_doctor
from tw_doctor._timeline.drawing import figure_of

v1 = tf.compat.v1
PHONE = HERE.parent / "_static" / "phone"
WIDE, NARROW = 8.4, 4.6  # inches: on a page, and on a phone (conf.py)
ROUNDS = 12
RED = "#b3261e"
BUG = "4.2 MB variables"  # in the line above the second device
SENTENCE = "The bug: tower 1's last layer lives on CPU:0, so 4.2 MB move at every step."
MARGIN, LINE, ARROW = 6, 28, 34  # pixels: beside words, a line, an arrow


def record() -> dict:
    """Fault -> its fastest step."""
    runs = {fault: start(fault) for fault in slow_step.FAULTS}
    steps = {fault: [] for fault in runs}
    for _ in range(ROUNDS):
        for fault, run in runs.items():
            with tw_doctor.record_steps(5) as recorder:
                for _ in range(16):
                    run(recorder)
            steps[fault] += recorder.steps
    for fault, own in steps.items():
        times = sorted(1e3 * step.seconds for step in own)
        middle = times[len(times) // 2]
        print(f"{fault}: {len(own)} steps, {times[0]:.1f} ms, median {middle:.1f} ms")
    return {
        fault: min(own, key=lambda step: step.seconds) for fault, own in steps.items()
    }


def start(fault: str):
    """Returns a function that runs a step with a fault, for a recorder to record."""
    with tf.Graph().as_default():
        xs, train_op = slow_step.make_step(fault)
        init = [v1.global_variables_initializer(), v1.local_variables_initializer()]
        session = v1.Session(config=tw_core.session_config())
    session.run(init)
    data = slow_step.batches(len(xs), fault)

    def run(recorder):
        recorder.run(session, train_op, dict(zip(xs, next(data), strict=True)))

    return run


def find_words(figure, words: str) -> tuple[Bbox, float]:
    """Returns where words of a band's text are, and the text's top.

    All in pixels from the lower left; the words are in the text's last line.
    """
    (text,) = (own for own in figure.axes[0].texts if words in own.get_text())
    whole = text.get_text()
    top = text.get_window_extent().y1
    before = whole.splitlines()[-1].partition(words)[0]
    text.set_text(before)
    left = text.get_window_extent().x1
    text.set_text(before + words)
    box = text.get_window_extent()
    text.set_text(whole)
    return Bbox([[left, box.y0], [box.x1, box.y1]]), top


def point(figure, path: Path) -> None:
    """Boxes the bug and points at it from a strip inserted above its line."""
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    picture = np.asarray(canvas.buffer_rgba())[..., :3]
    bug, top = find_words(figure, BUG)
    gap = len(picture) - round(top) - MARGIN
    sentence = textwrap.fill(SENTENCE, round(picture.shape[1] / 15))
    room = ARROW + LINE * len(sentence.splitlines())
    strip = np.full_like(picture[:room], 255)
    left, width = bug.x0 - MARGIN, bug.width + 2 * MARGIN
    upper, height = len(picture) - bug.y1 - MARGIN // 2 + room, bug.height + MARGIN
    picture = np.concatenate([picture[:gap], strip, picture[gap:]])
    tall, wide = picture.shape[:2]
    pointed = Figure(figsize=(wide / figure.dpi, tall / figure.dpi), dpi=figure.dpi)
    axes = pointed.add_axes((0, 0, 1, 1))
    axes.imshow(picture, interpolation="none")
    axes.set_axis_off()
    marked = {"fill": False, "edgecolor": RED, "linewidth": 1.5}
    axes.add_patch(Rectangle((left, upper), width, height, **marked))
    tip = left + width - 2 * MARGIN  # in a narrow picture, right of the line above
    axes.annotate(
        sentence,
        (tip, upper),
        (tip, gap),
        color=RED,
        size=9,
        ha="center",
        va="top",
        arrowprops={"arrowstyle": "-|>", "color": RED, "linewidth": 1.5},
    )
    pointed.savefig(path)


def main() -> None:
    PHONE.mkdir(exist_ok=True)
    for fault, step in record().items():
        for folder, wide in ((HERE, WIDE), (PHONE, NARROW)):
            figure = figure_of(step, wide=wide)
            figure.savefig(folder / f"step-{fault}.png")
            if fault == "wrong-device":
                point(figure, folder / "step-pointer.png")


if __name__ == "__main__":
    main()
