"""Synchronous replicas over gRPC: one parameter server and two workers as processes.

Every contender has a graph and a session of its own in both workers. The parent
has both start a block of steps at the same time, takes the slower one's time, and
has the contenders take turns. Before anything is timed, all synchronous ones must
have the parameters that gradient descent on the mean gradient has.
"""

import argparse
import contextlib
import json
import multiprocessing
import os
import socket
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from harness import Contender, Report, paired_ratio, race

CHECKED_STEPS = 3
RATE = 0.5
WAIT_S = 120.0
BLOCK_S = 0.25
PEER = "tensorflow"
GUARDED, UNGUARDED = "guard on", "guard off"


@dataclass(frozen=True)
class Work:
    """A model: dense variables of one size, or an embedding table."""

    name: str
    variables: int
    size: int
    contenders: tuple[str, ...]
    targets: tuple[tuple[str, float], ...]  # contender, times the peer's speed
    rows: int = 0
    peer: str = PEER


ALL = (PEER, "import alone", "pulled", "asynchronous", "multi-worker")
WORKS = {
    "10": Work("10 variables of 1,024 floats", 10, 1024, ALL, (("pulled", 2.0),)),
    "100": Work(
        "100 variables of 1,024 floats",
        100,
        1024,
        ALL,
        (("pulled", 6.0), ("import alone", 2.3)),
    ),
    "400": Work(
        "400 variables of 1,024 floats",
        400,
        1024,
        ALL,
        (("pulled", 10.0), ("import alone", 2.6)),
    ),
    "10k": Work(
        "100 variables of 10,240 floats",
        100,
        10_240,
        (PEER, "pulled"),
        (("pulled", 3.0),),
    ),
    "1m": Work(
        "10 variables of 1,048,576 floats",
        10,
        1 << 20,
        (PEER, "import alone", "bfloat16"),
        (("import alone", 0.95), ("bfloat16", 1.2)),
    ),
    "sparse": Work(
        "embedding of 100,000 rows, 64 wide, batches of 1,024 rows",
        1,
        64,
        (PEER, "import alone"),
        (("import alone", 1.2),),
        rows=100_000,
    ),
    "guard": Work(
        "guard, 10 variables of 1,024 floats",
        10,
        1024,
        (UNGUARDED, GUARDED),
        ((GUARDED, 0.97),),
        peer=UNGUARDED,
    ),
}


def main(arguments: Sequence[str]) -> None:
    """Runs the works and writes ``out/bench/syncrep.json``."""
    parser = argparse.ArgumentParser(prog="syncrep")
    parser.add_argument("--works", nargs="+", choices=list(WORKS), default=list(WORKS))
    parser.add_argument("--rounds", type=int, default=21)
    options = parser.parse_args(arguments)
    report = Report("syncrep")
    for work in (WORKS[name] for name in options.works):
        with processes(work) as crew:
            crew.check()
            contenders = [Contender(name, lambda: None) for name in work.contenders]
            timings = race(
                work.name,
                contenders,
                peer=work.peer,
                rounds=options.rounds,
                timer=lambda contender: crew.time(contender.name),
            )
        report.add(timings, work.peer)
        for name, speed in work.targets:
            # Time for time: at most 1 / (times as fast).
            measured = paired_ratio(timings, name, work.peer)
            report.target(f"{work.name}: {name}", measured, round(1 / speed, 4))
    report.write()


class Crew:
    """The parent's ends of the pipes to the workers of one work."""

    def __init__(self, work: Work, pipes: dict[str, list[Any]]) -> None:
        self.work = work
        self._pipes = pipes
        self._steps: dict[str, int] = {}

    def check(self) -> None:
        for name in self.work.contenders:
            self._block(name, CHECKED_STEPS)
            seen = self._ask(name, ("read", name), who=[0])[0]
            if name != "asynchronous":
                want = 1 - RATE * 1.5 * CHECKED_STEPS
                np.testing.assert_allclose(seen, want, rtol=1e-2, err_msg=name)
            seconds = self._block(name, 5) / 5
            self._steps[name] = min(max(3, int(BLOCK_S / seconds)), 300)

    def time(self, name: str) -> float:
        """Seconds for one global step."""
        steps = self._steps[name]
        return self._block(name, steps) / steps

    def _block(self, name: str, steps: int) -> float:
        return max(self._ask(name, ("run", name, steps)))

    def _ask(self, name: str, message: Any, who: Sequence[int] = (0, 1)) -> list[Any]:
        pipes = self._pipes["strategy" if name == "multi-worker" else "session"]
        for worker in who:
            pipes[worker].send(message)
        return [_hear(pipes[worker]) for worker in who]


@contextlib.contextmanager
def processes(work: Work) -> Iterator[Crew]:
    """Starts the tasks of a work, and ends them."""
    context = multiprocessing.get_context("spawn")
    ports = free_ports(5)
    running: list[Any] = []

    def start(program: Any, cluster: dict[str, list[str]], job: str, index: int) -> Any:
        ours, theirs = context.Pipe()
        arguments = (theirs, cluster, job, index, work)
        process = context.Process(target=program, args=arguments, daemon=True)
        process.start()
        running.append(process)
        return ours

    cluster = {"ps": [ports[0]], "worker": ports[1:3]}
    try:
        _hear(start(serve, cluster, "ps", 0))
        pipes = {"session": [start(train, cluster, "worker", i) for i in range(2)]}
        for name in work.contenders:
            if name != "multi-worker":  # the chief's session first
                for pipe in pipes["session"]:
                    pipe.send(("make", name))
                    _hear(pipe)
        if "multi-worker" in work.contenders:
            own = {"worker": ports[3:]}
            pipes["strategy"] = [start(mirror, own, "worker", i) for i in range(2)]
            for pipe in pipes["strategy"]:
                _hear(pipe)
        yield Crew(work, pipes)
    finally:
        for process in running:
            process.kill()
            process.join()


def serve(pipe: Any, cluster: Any, job: str, index: int, work: Work) -> None:
    """The parameter server."""
    server = _task(cluster, job, index)
    pipe.send("serving")
    server.join()


def train(pipe: Any, cluster: Any, job: str, index: int, work: Work) -> None:
    """A worker with one session a contender."""
    server = _task(cluster, job, index)
    sessions: dict[str, Any] = {}
    while True:
        command, name, *rest = pipe.recv()
        if command == "make":
            sessions[name] = Trained(server.target, cluster, index, work, name)
            pipe.send("made")
        elif command == "read":
            pipe.send(sessions[name].read())
        else:
            pipe.send(sessions[name].run(*rest))


class Trained:
    """One contender's session in one worker."""

    def __init__(
        self, target: str, cluster: Any, index: int, work: Work, name: str
    ) -> None:
        import tensorflow as tf

        import tw_syncrep

        v1 = tf.compat.v1
        device = f"/job:worker/task:{index}"
        with tf.Graph().as_default() as graph, graph.container(name.replace(" ", "-")):
            setter = v1.train.replica_device_setter(
                cluster=_hosts(cluster), worker_device=device
            )
            pulled = name in ("pulled", GUARDED, UNGUARDED)
            getter = tw_syncrep.cluster.variable_getter(device) if pulled else None
            with v1.device(setter):
                step = v1.train.get_or_create_global_step()
                with v1.variable_scope("model", custom_getter=getter):
                    loss = self._loss(work, index)
                optimizer = self._optimizer(name)
                self._train = optimizer.minimize(loss, global_step=step)
            hooks = []
            if name != "asynchronous":
                tokens = (0,) if name == PEER else ()
                hooks = [optimizer.make_session_run_hook(index == 0, *tokens)]
            make = v1.train.MonitoredTrainingSession
            if name not in (PEER, UNGUARDED, "asynchronous"):
                make = tw_syncrep.training_session
            config = v1.ConfigProto(device_filters=["/job:ps", device])
            settings = {"config": config, "log_step_count_steps": None}
            self._session = make(target, index == 0, hooks=hooks, **settings)
            first = v1.trainable_variables()[0]
            self._first = first if not work.rows else None
            self._name, self._step, self._expected = name, step, 0

    def run(self, steps: int) -> float:
        began = time.perf_counter()
        for _ in range(steps):
            self._session.run(self._train)
        seconds = time.perf_counter() - began
        self._expected += steps
        if self._name != "asynchronous":
            reached = int(self._session.run(self._step))
            if reached != self._expected:
                raise RuntimeError(
                    f"{self._name}: step {reached}, not {self._expected}"
                )
        return seconds

    def read(self) -> Any:
        if self._first is None:
            return 1 - RATE * 1.5 * CHECKED_STEPS  # rows differ; steps are counted
        return self._session.run(self._first)

    def _loss(self, work: Work, index: int) -> Any:
        import tensorflow as tf

        v1 = tf.compat.v1
        ones = v1.ones_initializer()
        if work.rows:
            table = v1.get_variable("table", [work.rows, work.size], initializer=ones)
            ids = tf.random.uniform([1024], maxval=work.rows, dtype=tf.int64)
            return tf.reduce_sum(tf.gather(table, ids) * (index + 1.0))
        found = [
            v1.get_variable(f"v{n}", [work.size], initializer=ones)
            for n in range(work.variables)
        ]
        # A gradient that needs the parameters, so that they must be pulled.
        factor = index + 1.0
        products = [
            tf.reduce_sum(factor * v + 1e-30 * v * v) for v in map(_read, found)
        ]
        return tf.add_n(products)

    def _optimizer(self, name: str) -> Any:
        import tensorflow as tf

        from tw_syncrep import SyncReplicasOptimizer

        v1 = tf.compat.v1
        inner = v1.train.GradientDescentOptimizer(RATE)
        if name == "asynchronous":
            return inner
        if name == PEER:
            return v1.train.SyncReplicasOptimizer(inner, 2)
        return SyncReplicasOptimizer(
            inner,
            2,
            compression=tf.bfloat16 if name == "bfloat16" else None,
            wait_timeout_s=None if name == UNGUARDED else WAIT_S,
        )


def mirror(pipe: Any, cluster: Any, job: str, index: int, work: Work) -> None:
    """A worker of MultiWorkerMirroredStrategy, which has no parameter server."""
    task = {"type": job, "index": index}
    os.environ["TF_CONFIG"] = json.dumps({"cluster": _hosts(cluster), "task": task})
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


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("localhost", 0))
        return [each.getsockname()[1] for each in sockets]


def _read(variable: Any) -> Any:
    import tensorflow as tf

    return tf.identity(variable)


def _hosts(cluster: dict[str, list[int]]) -> dict[str, list[str]]:
    return {job: [f"localhost:{p}" for p in ports] for job, ports in cluster.items()}


def _task(cluster: dict[str, list[int]], job: str, index: int) -> Any:
    """Starts a server as users of the package do; the peers gain by it too."""
    from tw_syncrep import cluster as tasks

    warnings.simplefilter("ignore")
    hosts = {job: tuple(listed) for job, listed in _hosts(cluster).items()}
    return tasks.start_server(tasks.TaskConfig(hosts, job, index))


def _hear(pipe: Any) -> Any:
    if not pipe.poll(WAIT_S):
        raise TimeoutError(f"a task said nothing for {WAIT_S} s")
    return pipe.recv()
