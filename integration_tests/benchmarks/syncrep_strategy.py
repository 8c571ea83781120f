"""The same model under ``MultiWorkerMirroredStrategy``: no server, no session."""

import json
import os
import time
from typing import Any

from syncrep_worker import hosts
from syncrep_works import RATE, Work


def mirror(
    pipe: Any, cluster: Any, job: str, index: int, work: Work, ours: bool
) -> None:
    """A worker of MultiWorkerMirroredStrategy, which has no parameter server."""
    task = {"type": job, "index": index}
    os.environ["TF_CONFIG"] = json.dumps({"cluster": hosts(cluster), "task": task})
    import tensorflow as tf

    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    with strategy.scope():
        found = [tf.Variable(tf.ones([work.size])) for _ in range(work.variables)]

    def step() -> None:
        context = tf.distribute.get_replica_context()
        grads = [index + 1.0 + 2e-30 * tf.identity(v) for v in found]
        sums = context.all_reduce(tf.distribute.ReduceOp.MEAN, grads)
        for variable, mean in zip(found, sums, strict=True):
            variable.assign_sub(RATE * mean)

    @tf.function
    def train_step() -> None:
        strategy.run(step)

    pipe.send("made")
    while True:
        command, _, *rest = pipe.recv()
        if command == "read":
            pipe.send(found[0].numpy())
            continue
        began = time.perf_counter()
        for _ in range(*rest):
            train_step()
        pipe.send(time.perf_counter() - began)
