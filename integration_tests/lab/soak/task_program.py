"""The program of every task of a soak's cluster: synchronous training on digits."""

import os
import signal
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
from lab.soak.telling import RATE, REPORT_EVERY_S, ROWS, WAIT_S, report, start, tell
from programs.digits_towers import accuracy, cross_entropy, digits, get_weights

import tw_launch
import tw_syncrep
from tw_syncrep import SyncReplicasOptimizer, training_session

v1 = tf.compat.v1


def main() -> None:
    folder, pause_s = start()
    task = tw_launch.read_tf_config()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", tw_launch.ExposedServerWarning)
        server = tw_launch.start_server(task)
    if task.job == "ps":
        serve()
    train(task, server.target, folder, pause_s)


def serve() -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: os._exit(0))
    while True:
        signal.pause()


@dataclass(frozen=True)
class Graph:
    """What a worker runs."""

    images: tf.Tensor
    labels: tf.Tensor
    step: tf.Variable
    tally: tf.Variable
    weights: list[tf.Variable]
    num_replicas: int
    train_op: tf.Operation
    optimizer: SyncReplicasOptimizer


def build(task: Any) -> Graph:
    with v1.device(tw_syncrep.device_setter(task)):
        step = v1.train.get_or_create_global_step()
        tally = v1.get_variable("tally", [], initializer=v1.zeros_initializer())
        images = v1.placeholder(tf.float32, [ROWS, 64])
        labels = v1.placeholder(tf.int64, [ROWS])
        with tw_syncrep.pulled_together(task):
            own = tally * (task.replica_index + 1.0)
            loss = cross_entropy(get_weights(), images, labels) + own
        weights = [v for v in v1.trainable_variables() if v is not tally]
        optimizer = SyncReplicasOptimizer(
            v1.train.GradientDescentOptimizer(RATE),
            len(task.replicas),
            wait_timeout_s=WAIT_S,
            start_timeout_s=WAIT_S,
        )
        train_op = optimizer.minimize(loss, global_step=step)
    return Graph(
        *(images, labels, step, tally, weights, len(task.replicas)),
        *(train_op, optimizer),
    )


def train(task: Any, target: str, folder: Path, pause_s: float) -> None:
    with tf.Graph().as_default():
        graph = build(task)
        hook = graph.optimizer.make_session_run_hook(task.is_chief)
        with training_session(
            target,
            task.is_chief,
            str(folder),
            hooks=[hook],
            save_checkpoint_secs=2,
            stop_grace_period_secs=5,
            log_step_count_steps=None,
        ) as session:
            random = np.random.default_rng(os.getpid())
            work(session, graph, task, folder, random, pause_s)
            if task.is_chief:
                finish(session, graph)
    if not task.is_chief:
        tell("end")


def work(
    session: Any, graph: Graph, task: Any, folder: Path, random: Any, pause_s: float
) -> None:
    """Trains until the run is over: for the chief, when the stop file is there."""
    rows, _ = digits()
    stop = folder / "stop"
    while not session.should_stop() and not (task.is_chief and stop.exists()):
        with no_step_behind(folder) as saw:
            until = time.monotonic() + REPORT_EVERY_S
            while not session.should_stop() and time.monotonic() < until:
                chosen = random.integers(0, len(rows.images), ROWS)
                feed = {
                    graph.images: rows.images[chosen],
                    graph.labels: rows.labels[chosen],
                }
                _, at = session.run([graph.train_op, graph.step], feed)
                saw(int(at))
                time.sleep(pause_s)
        if not session.should_stop():
            report_of(session, graph)


@contextmanager
def no_step_behind(folder: Path) -> Iterator[Callable[[int], None]]:
    """Compares the steps that are seen with the checkpoint that was there before."""
    saved, seen = saved_step(folder), []
    yield seen.append
    if seen and min(seen) < saved:
        tell("fault", text=f"step {min(seen)} after a checkpoint of step {saved}")


def saved_step(folder: Path) -> int:
    state = tf.train.get_checkpoint_state(str(folder))
    if state is None or not state.model_checkpoint_path:
        return 0
    return int(state.model_checkpoint_path.rpartition("-")[2])


def report_of(session: Any, graph: Graph) -> int:
    """Tells the step; none ends between the two reads, as it needs this replica too."""
    step, tally = session.run([graph.step, graph.tally])
    report(int(step), float(tally), graph.num_replicas)
    return int(step)


def finish(session: Any, graph: Graph) -> None:
    step = report_of(session, graph)
    weights = session.run(graph.weights)
    tell("end", step=step, accuracy=accuracy(*weights))


if __name__ == "__main__":
    main()
