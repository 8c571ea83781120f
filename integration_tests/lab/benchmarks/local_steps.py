"""Ranks that train alone for some steps, compared with an exchange in each step.

Two processes of one tower each train with Keras's ``fit``: the digits, to compare
accuracy, and a network of 1.3 million weights, to measure an epoch's time and bytes.
For a slow link they are in network namespaces limited to 100 Mbit/s, which needs root
and ``tc``.
"""

import multiprocessing
import subprocess
from functools import partial
from pathlib import Path
from typing import Any

from harness.ranks import Ranks
from racing import Report, race_by
from sharded_ranks import network, timed_fit

OPTIONS = {"works": "local_steps.WORKS", "rounds": 5}

WORKS = {
    "digits": "a convolutional network on the digits",
    "fast": "6 x 512, over the loopback",
    "slow": "6 x 512, 100 Mbit/s",
}
EACH = "each step"
CONTENDERS = (
    EACH,
    "accumulated by 16",
    "16 local steps",
    "16, state averaged",
    "16, outer optimizer",
)
STEPS, BATCH, EPOCHS = 64, 32, 40  # of an epoch; of all ranks; on the digits
_models: dict[str, Any] = {}


def main(options: Any, report: Report) -> None:
    """Trains over two ranks, by each work."""
    context = multiprocessing.get_context("spawn")
    for work in options.works:
        is_slow = work == "slow"
        tied: dict[str, Any] = {"machines": (0, 1), "linked": True} if is_slow else {}
        with Ranks(context, 2, **tied) as ranks:
            ranks.joined()
            if is_slow:
                ranks.call("local_steps:limit", "rate 100mbit burst 256kb latency 4s")
            if work == "digits":
                _learn(ranks, report)
            else:
                _time(ranks, report, work, options.rounds)


def _learn(ranks: Ranks, report: Report) -> None:
    found = {name: ranks.call("local_steps:learn", name)[0] for name in CONTENDERS}
    for name, (accuracy, best) in found.items():
        print(f"  {name}: {accuracy:.4f} test accuracy, best {best:.4f}")
    report.notes["digits"] = found


def _time(ranks: Ranks, report: Report, work: str, rounds: int) -> None:
    sent = {}
    for name in CONTENDERS:
        ranks.call("local_steps:epoch", name)  # which traces
        sent[name] = max(own for _, own in ranks.call("local_steps:epoch", name))

    def seconds(name: str) -> float:
        return max(own for own, _ in ranks.call("local_steps:epoch", name))

    timers = {name: partial(seconds, name) for name in CONTENDERS}
    timings = race_by(WORKS[work], timers, peer=EACH, rounds=rounds)
    report.add(timings, EACH)
    for name, count in sent.items():
        print(f"  {name}: {count / STEPS / 1e6:.3f} MB per step sent by a rank")
    report.notes[f"sent, {work}"] = sent


def limit(group: Any, rate: str) -> None:
    """Has this rank's end of its link let out what a rate of ``tc ... tbf`` allows."""
    command = f"tc qdisc add dev task root tbf {rate}"
    subprocess.run(command.split(), check=True)


def learn(group: Any, name: str) -> tuple[float, float]:
    """Returns the last accuracy on the test rows, and the best of all epochs."""
    import keras
    import numpy as np
    from programs.digits_towers import digits

    layers = keras.layers

    def make() -> Any:
        keras.utils.set_random_seed(1)
        return keras.Sequential(
            [
                keras.Input([8, 8, 1]),
                layers.Conv2D(32, 3, padding="same", activation="relu"),
                layers.Conv2D(64, 3, padding="same", activation="relu"),
                layers.MaxPooling2D(),
                layers.Flatten(),
                layers.Dropout(0.3),
                layers.Dense(10),
            ]
        )

    train, test = digits()
    x, tested = (own.images.reshape(-1, 8, 8, 1) for own in (train, test))
    model = _made(group, make, name, data="shared")
    history = model.fit(
        *(x, train.labels, BATCH, EPOCHS),
        verbose=0,
        validation_data=(tested, test.labels),
    ).history["val_accuracy"]
    return history[-1], float(np.max(history))


def epoch(group: Any, name: str) -> tuple[float, int]:
    """Trains an epoch; returns the seconds, and the bytes that left this host."""
    if name not in _models:
        _models[name] = _made(group, partial(network, 6, 512), name)
    before = _sent(group.size)
    seconds, _ = timed_fit(group, _models[name], STEPS * BATCH // group.size)
    return seconds, _sent(group.size) - before


def _made(group: Any, make: Any, name: str, **options: Any) -> Any:
    import keras

    from tw_keras import LocalSteps, TowerModel

    outer = keras.optimizers.SGD(0.7, momentum=0.9, nesterov=True)
    local = {
        "16 local steps": LocalSteps(16),
        "16, state averaged": LocalSteps(16, state="averaged"),
        "16, outer optimizer": LocalSteps(16, outer),
    }.get(name)
    accumulates = 16 if name.startswith("accumulated") else None
    adam = keras.optimizers.Adam(2e-3, gradient_accumulation_steps=accumulates)
    model = TowerModel(make, ["/cpu:0"], group=group, local_steps=local, **options)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(adam, loss, metrics=["accuracy"], jit_compile=False)
    return model


def _sent(size: int) -> int:
    """Returns the bytes that a rank has sent; the loopback counts those of all."""
    links = {}
    for line in Path("/proc/self/net/dev").read_text().splitlines()[2:]:
        name, _, counts = line.partition(":")
        links[name.strip()] = int(counts.split()[8])
    return links.get("task", links["lo"] // size)
