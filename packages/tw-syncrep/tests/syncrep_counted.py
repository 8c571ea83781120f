"""Clusters whose messages are counted, and how many a step should have."""

import re
import threading
import warnings
from collections import Counter
from dataclasses import dataclass
from typing import Any

import tensorflow as tf
from harness.calls import CallCounter
from harness.ports import find_free_ports
from harness.tasks import Task

import tw_launch
import tw_syncrep
from tw_syncrep import SyncReplicasOptimizer, training_session

v1 = tf.compat.v1
DEADLINE_S = 120
_BLOCKS = 3


@dataclass(frozen=True)
class Work:
    """What is trained, and by how many."""

    workers: int  # replicas; all of them are needed
    servers: int  # for parameters, each with as many variables
    variables: int = 2  # on each server; all of one dtype, and small
    is_pulled: bool = True  # parameters are read in packs

    @property
    def name(self) -> str:
        """A container's name for it."""
        return re.sub("[^a-z0-9]+", "-", repr(self).lower()).strip("-")


def expected_calls(work: Work) -> dict[str, int]:
    """Returns the calls of a step by method, with plain gradient descent.

    A session's call is a ``RunGraph`` and a ``CleanupGraph`` for every server, and
    whatever goes from one task to another is a ``RecvTensor`` of the one that gets it.
    """
    calls = (work.workers + 1) * work.servers  # the replicas' steps, and the round
    received = work.workers * sum(received_for_a_worker(work).values())
    received += sum(received_for_a_round(work).values())
    return {"RunGraph": calls, "CleanupGraph": calls, "RecvTensor": received}


def received_for_a_worker(work: Work) -> dict[str, int]:
    """Returns what is received for a worker's step, by what it is."""
    others = work.servers - 1
    return {
        "tickets and gradients": work.servers,  # a pack each
        "pushed": others,  # told to the table's server
        "round is over": others if work.is_pulled else 0,  # told by it
        "parameters": work.servers * (1 if work.is_pulled else work.variables),
        "reply": 0 if work.is_pulled else 1,  # else with the parameters
    }


def received_for_a_round(work: Work) -> dict[str, int]:
    """Returns what is received for the chief's round, by what it is."""
    others = work.servers - 1
    return {
        "incarnation": 1,
        "accepted tickets": others,
        "changes may begin": others,
        "applied": others,
        "published": others if work.is_pulled else 0,
    }


def expected_at_table(work: Work) -> int:
    """Returns how many of a step's calls begin or end at the run table's server."""
    others = work.servers - 1
    parameters = 1 if work.is_pulled else work.variables
    reply = 0 if work.is_pulled else 1
    of_a_worker = 2 + (1 + parameters + reply) + others * (1 + work.is_pulled)
    return work.workers * of_a_worker + 2 + 1 + (3 + work.is_pulled) * others


class CountedCluster:
    """Parameter servers in processes, workers in this one, proxies between all.

    Every task has its own address and, for each other, that of a proxy.
    """

    def __init__(
        self, context: Any, *, ps: int, workers: int, limit_s: int = 180
    ) -> None:
        """Starts the servers, by a context of ``multiprocessing``.

        At most ``workers`` can train; after ``limit_s`` the servers end in any case.
        """
        ports = iter(find_free_ports(ps + workers))
        self.counter = CallCounter()
        self._addresses = {
            job: [f"127.0.0.1:{next(ports)}" for _ in range(count)]
            for job, count in (("ps", ps), ("worker", workers))
        }
        self._seen = {
            (job, index): self._seen_by(job, index)
            for job, listed in self._addresses.items()
            for index in range(len(listed))
        }
        spec = {"limit_s": limit_s}
        self.servers = [
            Task(context, f"ps {index}", "serve", self._config("ps", index), spec)
            for index in range(ps)
        ]
        for server in self.servers:
            server.expect("serving")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", tw_launch.ExposedServerWarning)
            self._workers = [
                tw_launch.start_server(tw_launch.TaskConfig(self._seen[key], *key))
                for key in self._seen
                if key[0] == "worker"
            ]

    def task(self, index: int, work: Work) -> tw_launch.TaskConfig:
        """Describes a worker of a cluster that is as large as ``work``."""
        seen = self._seen["worker", index]
        used = {"ps": seen["ps"][: work.servers]}
        used["worker"] = seen["worker"][: work.workers]
        return tw_launch.TaskConfig(used, "worker", index)

    def target(self, index: int) -> str:
        """Returns the target of a worker's sessions."""
        return str(self._workers[index].target)

    def close(self) -> None:
        """Ends the proxies and the parameter servers."""
        self.counter.close()
        for server in self.servers:
            server.kill()

    def _config(self, job: str, index: int) -> dict[str, Any]:
        return {
            "cluster": self._seen[job, index],
            "task": {"type": job, "index": index},
        }

    def _seen_by(self, job: str, index: int) -> dict[str, tuple[str, ...]]:
        own = f"{job} {index}"

        def address(name: str, real: str) -> str:
            return real if name == own else self.counter.between(own, name, real)

        return {
            other: tuple(address(f"{other} {n}", real) for n, real in enumerate(listed))
            for other, listed in self._addresses.items()
        }


class CountedRun:
    """Replicas as threads that run steps when they are told."""

    def __init__(self, counted: CountedCluster, work: Work) -> None:
        """Makes the sessions, and runs some steps until nothing is new to anyone."""
        self.table_server = ""  # name of the server that the run table is on
        self._counted, self._work = counted, work
        self._gate = threading.Barrier(work.workers + 1)
        self._steps = 5
        self._errors: list[BaseException] = []
        self._threads = [
            threading.Thread(target=self._replica, args=(index,), daemon=True)
            for index in range(work.workers)
        ]
        for thread in self._threads:
            thread.start()
        self.run(self._steps)

    def run(self, steps: int) -> None:
        """Has all replicas run as many steps."""
        self._steps = steps
        try:
            self._gate.wait(DEADLINE_S)  # they begin
            self._gate.wait(DEADLINE_S)  # they are done
        except threading.BrokenBarrierError:
            errors = self._errors or [TimeoutError("replicas stand still")]
            raise errors[0] from None

    def calls_of_a_step(self, steps: int) -> Counter[tuple[str, str, str]]:
        """Returns the calls of a step, by source, target and method.

        Where a busy machine was late with the last call of a block, in that or the one
        before, the calls are no multiple of the steps: then another block is run.
        """
        for _ in range(_BLOCKS):
            before = self._counted.counter.settled()
            self.run(steps)
            calls = self._counted.counter.settled()
            calls.subtract(before)
            uneven = {key: count for key, count in calls.items() if count % steps}
            if not uneven:
                return Counter({key: n // steps for key, n in calls.items() if n})
        raise AssertionError(f"in {steps} steps: {uneven}")

    def close(self) -> None:
        """Ends the replicas in order."""
        self.run(0)
        for thread in self._threads:
            thread.join(DEADLINE_S)
            assert not thread.is_alive(), "a replica hangs"

    def _replica(self, index: int) -> None:
        try:
            self._train(index)
        except BaseException as error:
            self._errors.append(error)
            self._gate.abort()

    def _train(self, index: int) -> None:
        task = self._counted.task(index, self._work)
        graph = tf.Graph()
        with graph.as_default(), graph.container(self._work.name):
            with v1.device(tw_syncrep.device_setter(task)):
                train, hook, step = _model(task, self._work)
            server = tf.DeviceSpec.from_string(step.device)
            self.table_server = f"{server.job} {server.task}"
            with training_session(
                self._counted.target(index),
                index == 0,
                hooks=[hook],
                cluster=task,
                log_step_count_steps=None,
                save_checkpoint_secs=None,
            ) as session:
                while True:
                    self._gate.wait(DEADLINE_S)
                    steps = self._steps
                    for _ in range(steps):
                        session.run(train)
                    self._gate.wait(DEADLINE_S)
                    if not steps:
                        return


def _model(task: tw_launch.TaskConfig, work: Work) -> tuple[Any, Any, tf.Variable]:
    getter = tw_syncrep.variable_getter(task) if work.is_pulled else None
    with v1.variable_scope("model", custom_getter=getter):
        found = [
            v1.get_variable(f"v{n}", [8], initializer=v1.ones_initializer())
            for n in range(work.servers * work.variables)
        ]
    # A gradient that needs the parameters.
    loss = tf.add_n([tf.reduce_sum(1e-3 * v * v) for v in map(tf.identity, found)])
    step = v1.train.get_or_create_global_step()
    optimizer = SyncReplicasOptimizer(
        v1.train.GradientDescentOptimizer(0.1),
        work.workers,
        # Without a watchdog, and its heartbeats between the steps.
        wait_timeout_s=None,
        start_timeout_s=DEADLINE_S,
    )
    train = optimizer.minimize(loss, global_step=step)
    return train, optimizer.make_session_run_hook(task.is_chief), step
