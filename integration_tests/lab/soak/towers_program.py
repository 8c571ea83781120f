"""A soak's asynchronous towers: four threads that train one set of weights on digits.

Each tower's op also counts itself in the graph, so that at the end the steps that
the runner counted can be held against those that TensorFlow ran.
"""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf
from lab.soak.telling import ROWS, start, tell
from programs.digits_towers import accuracy, cross_entropy, digits, get_weights

import tw_core
from tw_builders import AsyncMultiGPUBuilder, AsyncRunner
from tw_core.testing import CPUS

v1 = tf.compat.v1
TOWERS = 4
REPORT_EVERY_S = 1.0
PAUSE_S = 0.002  # at least, after a tower's step: the cluster beside has deadlines
CONFIG = v1.ConfigProto(device_count={"CPU": TOWERS})


def main() -> int:
    os.nice(10)
    folder, pause_s = start()
    pause_s = max(pause_s, PAUSE_S)
    asked = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: asked.set())
    with tf.Graph().as_default(), v1.Session(config=CONFIG) as session:
        steps, counters, weights = build(session, pause_s)
        runner = AsyncRunner(steps).start()
        while runner.is_running and not asked.is_set():
            if (folder / "stop").exists():
                asked.set()
            tell("step", step=sum(runner.steps_done), towers=list(runner.steps_done))
            time.sleep(REPORT_EVERY_S)
        runner.stop()
        done = runner.join(timeout_s=60)
        return finish(done, session.run(counters), session.run(weights))


def build(
    session: Any, pause_s: float
) -> tuple[list[Callable[[], Any]], list[Any], list[Any]]:
    """Builds the towers; their step functions, counters and the shared weights."""
    builder = AsyncMultiGPUBuilder(list(CPUS[:TOWERS]))
    fed = [
        [v1.placeholder(tf.float32, [ROWS, 64]), v1.placeholder(tf.int64, [ROWS])]
        for _ in range(TOWERS)
    ]

    def tower() -> list[tuple[Any, Any]]:
        k = tw_core.get_current_tower_context().index
        weights = get_weights()
        grads = tf.gradients(cross_entropy(weights, *fed[k]), weights)
        return list(zip(grads, weights, strict=True))

    pairs = builder.call_for_each_tower(tower)
    ops = builder.build_tower_ops(pairs, lambda: v1.train.AdamOptimizer(1e-3))
    counters = [
        v1.get_variable(
            f"count{k}", [], tf.int64, v1.zeros_initializer(), trainable=False
        )
        for k in range(TOWERS)
    ]
    counted = []
    for op, counter in zip(ops, counters, strict=True):
        with tf.control_dependencies([op]):
            counted.append(counter.assign_add(1, read_value=False))
    session.run([v1.global_variables_initializer(), v1.local_variables_initializer()])
    steps = [
        feeding(session.make_callable(op, own), k, pause_s)
        for k, (op, own) in enumerate(zip(counted, fed, strict=True))
    ]
    return steps, counters, [v for _, v in pairs[0]]


def feeding(call: Callable[..., Any], seed: int, pause_s: float) -> Callable[[], Any]:
    """One tower's step: draws rows, trains on them, and pauses."""
    rows, _ = digits()
    random = np.random.default_rng(seed)

    def step() -> None:
        chosen = random.integers(0, len(rows.images), ROWS)
        call(rows.images[chosen], rows.labels[chosen])
        time.sleep(pause_s)

    return step


def finish(done: list[int], counted: list[Any], weights: list[Any]) -> int:
    """Holds the steps of both sides against each other."""
    if done != [int(count) for count in counted]:
        tell("fault", text=f"towers finished {done} steps, and applied {counted}")
    tell("end", step=sum(done), towers=done, accuracy=accuracy(*weights))
    return 0


if __name__ == "__main__":
    sys.exit(main())
