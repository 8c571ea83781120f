"""Clusters of real processes on this machine, as tests drive them."""

import signal
from typing import Any

from harness import links, task_programs
from harness.ports import find_free_ports
from harness.processes import DEADLINE_S, Peer
from harness.relays import Relay


class Task(Peer):
    """A process of a cluster."""

    def __init__(self, context: Any, name: str, *arguments: Any) -> None:
        super().__init__(context, name, task_programs.run_task, *arguments)
        self.plug: str | None = None  # name of its link at the hub, where it has one

    def expect(self, word: str, within_s: float = DEADLINE_S) -> Any:
        got = self.hear(within_s)
        assert got[0] == word, f"{self.name}: wanted {word}, got {got}"
        return got[1]

    def say(self, command: str, value: Any = None) -> None:
        super().say(command, value)

    def ask(self, command: str, value: Any = None) -> Any:
        self.say(command, value)
        return self.expect("done")

    def stop(self) -> None:
        self.send(signal.SIGSTOP)

    def go_on(self) -> None:
        self.send(signal.SIGCONT)


class Tasks:
    """A cluster of processes on this machine.

    Linked tasks have a network namespace each, whose link ``cut`` takes down.
    """

    def __init__(
        self, context: Any, *, ps: int = 1, workers: int = 2, linked: bool = False
    ) -> None:
        self._context = context
        count = ps + workers
        if linked:
            addresses = links.task_addresses(count)
        else:
            addresses = [f"localhost:{port}" for port in find_free_ports(count)]
        self.addresses = {"ps": addresses[:ps], "worker": addresses[ps:]}
        self.servers: list[Task] = []
        self.workers: list[Task] = []
        self.all: list[Task] = []
        self._relays: dict[tuple[str, str], Relay] = {}
        self._hub: Task | None = None
        if linked:
            self._hub = Task(context, "hub", "hub", {}, {})
            self.all.append(self._hub)

    def start(self, job: str, index: int, program: str, spec: dict[str, Any]) -> Task:
        seen = self._seen_by(f"{job} {index}")
        config = {"cluster": seen, "task": {"type": job, "index": index}}
        if self._hub is not None:
            every = [*self.addresses["ps"], *self.addresses["worker"]]
            spec = {**spec, "network": (self.addresses[job][index], every)}
        task = Task(self._context, f"{job} {index}", program, config, spec)
        self.all.append(task)
        if self._hub is not None:
            self._plug(task)
        return task

    def relay(self, source: str, sink: str) -> Relay:
        """Returns what passes "worker 0"'s connections on to "ps 0"; before a start."""
        if (source, sink) not in self._relays:
            job, index = sink.split()
            port = int(self.addresses[job][int(index)].rpartition(":")[2])
            self._relays[source, sink] = Relay(port)
        return self._relays[source, sink]

    def forget(self, relay: Relay) -> None:
        """Has tasks that start from now on do without a relay."""
        self._relays = {ends: r for ends, r in self._relays.items() if r is not relay}

    def _seen_by(self, name: str) -> dict[str, list[str]]:
        """Returns the addresses at which a task reaches the others."""
        seen = {job: list(listed) for job, listed in self.addresses.items()}
        for (source, sink), relay in self._relays.items():
            if source == name:
                job, index = sink.split()
                seen[job][int(index)] = relay.address
        return seen

    def cut(self, task: Task) -> None:
        """Takes the task's link down: what is sent vanishes."""
        assert self._hub is not None
        self._hub.ask("down", task.plug)

    def mend(self, task: Task) -> None:
        """Brings the task's link up again."""
        assert self._hub is not None
        self._hub.ask("up", task.plug)

    def _plug(self, task: Task) -> None:
        """Links a task to the hub, in the place of its predecessor."""
        assert self._hub is not None
        task.expect("alone")
        for other in self.all:
            if other.name == task.name and other.plug is not None:
                self._hub.ask("unplug", other.plug)
                other.plug = None
        task.plug = f"plug{len(self.all)}"
        self._hub.ask("plug", (task.plug, task.process.pid))
        task.say("plugged")

    def serve(self) -> None:
        if self._hub is not None:
            self._hub.expect("bridged")
        count = len(self.addresses["ps"])
        self.servers = [self.start("ps", i, "serve", {}) for i in range(count)]
        for server in self.servers:
            server.expect("serving")

    def train(self, spec: dict[str, Any]) -> list[Task]:
        """Starts the workers and waits until their sessions are there."""
        count = len(self.addresses["worker"])
        self.workers = [self.start("worker", i, "train", spec) for i in range(count)]
        for worker in self.workers:
            worker.expect("built")
        # The chief first: a worker that joins before the incarnation joins again.
        for worker in self.workers:
            worker.say("go")
            worker.expect("created")
        return self.workers

    def restart(self, job: str, index: int, program: str, spec: dict[str, Any]) -> Task:
        """Starts a killed task again and waits until it is there."""
        task = self.start(job, index, program, spec)
        if program == "serve":
            self.servers[index] = task
            task.expect("serving")
            return task
        self.workers[index] = task
        task.expect("built")
        task.say("go")
        task.expect("created")
        return task

    def step_together(self, values: list[Any], who: list[int] | None = None) -> None:
        """Has replicas run one step at the same time."""
        who = list(range(len(self.workers))) if who is None else who
        for replica in who:
            self.workers[replica].say("step", values[replica])
        for replica in who:
            self.workers[replica].expect("done")

    def step_until(self, step: int, who: list[int] | None = None) -> None:
        """Has replicas train until the global step is at least ``step``.

        By step and not by count: a batch for an older incarnation does not count.
        """
        workers = [self.workers[n] for n in who] if who else self.workers
        for worker in workers:
            worker.say("until", {"factor": 1.0, "step": step})
        for worker in workers:
            assert not worker.expect("done")

    def kill(self) -> None:
        for task in self.all:
            task.kill()
        for relay in self._relays.values():
            relay.end()
