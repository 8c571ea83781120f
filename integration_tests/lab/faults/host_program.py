"""A program on a host: a rank, or a task of a cluster, which trains until an error.

    rank RANK SIZE TIMEOUT_S STALL_S         adds whole numbers
    ps INDEX SERVERS WORKERS WAIT_S          serves
    worker INDEX SERVERS WORKERS WAIT_S ...  counts steps in weights; "elastic" or not

It prints its steps, each step that took long, and the error that ended it.
"""

import json
import os
import sys
import time
from collections.abc import Callable

LONG_S = 1.5
START_S = 240.0


def train(step: Callable[[], int]) -> None:
    """Takes steps until an error."""
    began = time.monotonic()
    try:
        while True:
            began = time.monotonic()
            number = step()
            if (took_s := time.monotonic() - began) > LONG_S:
                print(f"step {number} took {took_s:.1f} s")
            print(f"step {number}")
            time.sleep(0.05)
    except BaseException as error:
        took_s, kind = time.monotonic() - began, type(error).__name__
        missing = list(getattr(error, "missing", []))
        print(f"ENDED after {took_s:.1f} s: {kind} {missing} {error}")
        os._exit(1)


def train_rank(rank: int, size: int, timeout_s: float, stall_s: float) -> None:
    """Joins, and checks the sum of every step."""
    import tensorflow as tf

    import tw_ranks

    group = tw_ranks.join(
        "node0:4000",
        rank=rank,
        size=size,
        timeout_s=timeout_s,
        stall_timeout_s=stall_s,
        start_timeout_s=START_S,
    )
    done = [0]

    @group.bounded
    @tf.function
    def add(number: tf.Tensor) -> tf.Tensor:
        own = tf.fill([100_000], number * (rank + 1.0))
        [[added]] = tw_ranks.sum_across([[own]], group=group)
        return tf.stack([tf.reduce_min(added), tf.reduce_max(added)])

    def step() -> int:
        done[0] += 1
        lowest, highest = add(tf.constant(float(done[0]))).numpy()
        want = done[0] * size * (size + 1) / 2
        assert lowest == highest == want, f"{lowest} to {highest}, not {want}"
        return done[0]

    train(step)


def run_task(job: str, index: str, servers: str, workers: str, *rest: str) -> None:
    """Serves, or trains over parameter servers."""
    addresses = {"ps": servers.split(","), "worker": workers.split(",")}
    task = {"type": job, "index": int(index)}
    os.environ["TF_CONFIG"] = json.dumps({"cluster": addresses, "task": task})
    import tw_launch

    own = tw_launch.read_tf_config()
    server = tw_launch.start_server(own)
    if job == "ps":
        server.join()
    train_worker(server.target, own, float(rest[0]), is_elastic="elastic" in rest)


def train_worker(target: str, task: object, wait_s: float, *, is_elastic: bool) -> None:
    """Counts steps in the weights."""
    import tensorflow as tf

    import tw_syncrep
    from tw_syncrep import SyncReplicasOptimizer, training_session

    v1 = tf.compat.v1
    v1.disable_eager_execution()
    setter = tw_syncrep.device_setter(task, strategy="round_robin")
    with v1.device(setter), tw_syncrep.pulled_together(task):
        global_step = v1.train.get_or_create_global_step()
        w = v1.get_variable("w", [3], initializer=v1.zeros_initializer())
        optimizer = SyncReplicasOptimizer(
            v1.train.GradientDescentOptimizer(1.0),
            len(task.addresses["worker"]),
            wait_timeout_s=wait_s,
            start_timeout_s=40,
            elastic=is_elastic,
        )
        train_op = optimizer.minimize(-tf.reduce_sum(w), global_step=global_step)
    hooks = [optimizer.make_session_run_hook(task.is_chief)]

    def run() -> int:
        settings = {"hooks": hooks, "cluster": task}
        with training_session(target, task.is_chief, **settings) as session:

            def step() -> int:
                _, number, weights = session.run([train_op, global_step, w])
                assert len(set(weights)) == 1, weights
                return int(number)

            train(step)
        return 0

    train(run)  # Making the session may fail, too.


if __name__ == "__main__":
    kind, *words = sys.argv[1:]
    if kind == "rank":
        train_rank(int(words[0]), int(words[1]), float(words[2]), float(words[3]))
    else:
        run_task(kind, *words)
