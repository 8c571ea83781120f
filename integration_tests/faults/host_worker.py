"""A task of a cluster on a host: JOB INDEX SERVERS WORKERS WAIT_S [elastic].

A worker prints its steps, each step that took long, and the error that ended it.
"""

import json
import os
import sys
import time

LONG_S = 1.5


def main(job: str, index: str, servers: str, workers: str, *rest: str) -> None:
    """Serves, or trains until an error."""
    addresses = {"ps": servers.split(","), "worker": workers.split(",")}
    task = {"type": job, "index": int(index)}
    os.environ["TF_CONFIG"] = json.dumps({"cluster": addresses, "task": task})
    import tw_launch

    own = tw_launch.read_tf_config()
    server = tw_launch.start_server(own)
    if job == "ps":
        server.join()
    train(server.target, own, float(rest[0]), is_elastic="elastic" in rest)


def train(target: str, task: object, wait_s: float, *, is_elastic: bool) -> None:
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
    began = time.monotonic()
    try:
        settings = {"hooks": hooks, "cluster": task}
        with training_session(target, task.is_chief, **settings) as session:
            while True:
                began = time.monotonic()
                _, step, weights = session.run([train_op, global_step, w])
                took_s = time.monotonic() - began
                if took_s > LONG_S:
                    print(f"a step took {took_s:.1f} s")
                assert len(set(weights)) == 1, weights
                print(f"step {step}")
                time.sleep(0.1)
    except BaseException as error:
        took_s = time.monotonic() - began
        print(f"ENDED after {took_s:.1f} s: {type(error).__name__}: {error}")
        os._exit(1)


if __name__ == "__main__":
    main(*sys.argv[1:])
