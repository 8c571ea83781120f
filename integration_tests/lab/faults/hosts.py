"""Hosts whose network can be cut, on one machine.

A host is a set of namespaces of its own (network, name, mounts, processes): host n is
``node<n>`` at 10.78.0.<10 + n> to all hosts of a situation. Nothing has a name outside,
so two runs cannot collide, and the hosts end with the process that made them, together
with all that runs on them, however it ends. This needs root, iproute2, nftables and
util-linux; ``why_no_hosts`` says what is missing.
"""

import functools
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from harness.processes import Program

START_S = 240.0  # until a program has imported TensorFlow and begun to train
COMMAND_S = 20.0
GRACE_S = 8.0  # beyond a deadline, on a busy machine
_PROGRAM = Path(__file__).with_name("host_program.py")
_TOOLS = ("unshare", "nsenter", "ip", "nft")
_UNSHARE = "unshare --net --uts --mount --pid --fork --kill-child --mount-proc"
# A host lives until the pipe to it closes, which it does when this process ends.
_LIVE = 'hostname "$0"; mount --bind "$1" /etc/hosts; echo up; read -r _'
_INPUT = "add table inet f; add chain inet f i { type filter hook input priority 0; }"


def address_of(host: int) -> str:
    """Returns a host's address."""
    return f"10.78.0.{10 + host}"


class Hosts:
    """Hosts on one switch; a context, at whose end they are gone."""

    def __init__(self, count: int, folder: Path | None = None) -> None:
        """Takes how many, and a folder for the programs' output."""
        self._count = count
        self._folder = Path(folder or tempfile.mkdtemp())
        self._listed = self._folder / "hosts"
        self._alive: list[subprocess.Popen[bytes]] = []
        self._inner: list[int] = []  # the first process of each host
        self._programs: list[Program] = []

    def __enter__(self) -> "Hosts":
        try:
            self._up()
        except BaseException:
            self.down()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.down()

    def run(self, host: int, *command: str) -> Program:
        """Starts a command on a host; its output goes to a file."""
        log = self._folder / f"{len(self._programs)}-node{host}.log"
        env = {**os.environ, "PYTHONUNBUFFERED": "1", "CUDA_VISIBLE_DEVICES": "-1"}
        env |= {"TF_CPP_MIN_LOG_LEVEL": "3", "OMP_NUM_THREADS": "1"}
        env |= {"TW_REPORTS": str(self._folder)}
        command = (*self._enter(host), *command)
        program = Program(command, deadline_s=START_S, log=log, env=env)
        self._programs.append(program)
        return self._programs[-1]

    def python(self, host: int, *arguments: object) -> Program:
        """Starts ``host_program.py`` on a host."""
        return self.run(host, sys.executable, str(_PROGRAM), *map(str, arguments))

    def drop(self, one: int, *others: int) -> None:
        """Loses what ``one`` and each of the others send to each other."""
        # Only what arrives: TCP does not back off from what its own host drops.
        for other in others:
            self._add_rule(one, f"ip saddr {address_of(other)} drop")
            self._add_rule(other, f"ip saddr {address_of(one)} drop")

    def refuse(
        self, host: int, port: int | None = None, *, sender: int | None = None
    ) -> None:
        """Has a host refuse and reset connections: to a port or all, of one or all."""
        who = "" if sender is None else f"ip saddr {address_of(sender)} "
        what = "meta l4proto tcp" if port is None else f"tcp dport {port}"
        self._add_rule(host, f"{who}{what} reject with tcp reset")

    def slow_down(self, host: int, *, sender: int, bytes_per_s: int) -> None:
        """Loses what a sender sends a host beyond a rate, which TCP then follows."""
        limit = f"limit rate over {bytes_per_s} bytes/second burst 16000 bytes"
        self._add_rule(host, f"ip saddr {address_of(sender)} {limit} drop")

    def name_locally(self, host: int) -> None:
        """Makes a host's name 127.0.1.1 to itself, as Debian's /etc/hosts does."""
        listed = (self._folder / "hosts").read_text()
        own = self._folder / f"hosts{host}"
        own.write_text(listed.replace(f"{address_of(host)} ", "127.0.1.1 "))
        _run([*self._enter(host), "mount", "--bind", str(own), "/etc/hosts"])

    def heal(self) -> None:
        """Lets everything through again."""
        for host in range(self._count):
            self._nft(host, "flush chain inet f i")

    def move_name(self, host: int, *, to: int) -> None:
        """Has the name of a host lead to another host, for all."""
        lines = [f"{address_of(n)} node{n}" for n in range(self._count) if n != host]
        lines += ["127.0.0.1 localhost", f"{address_of(to)} node{host}"]
        # Written over, as each host has mounted this very file.
        self._listed.write_text("\n".join(lines) + "\n")

    def down(self) -> None:
        """Ends the hosts, and all that runs on them."""
        for process in self._alive:
            process.kill()
            process.wait(COMMAND_S)
        for program in self._programs:
            program.kill()

    def _up(self) -> None:
        lines = [f"{address_of(n)} node{n}" for n in range(self._count)]
        self._listed.write_text("\n".join(["127.0.0.1 localhost", *lines]) + "\n")
        switch = self._begin("switch")
        _run([*_enter(switch), *["ip", "link", "add", "br0", "type", "bridge"]])
        _run([*_enter(switch), *["ip", "link", "set", "br0", "up"]])
        for n in range(self._count):
            inner = self._begin(f"node{n}")
            self._inner.append(inner)
            # From outside: a host's number is unknown inside of the switch.
            end = f"t{n}"
            link = f"ip link add {end} type veth peer name eth0 netns {inner}"
            _run(["nsenter", "--net", "--target", str(switch), *link.split()])
            _run([*_enter(switch), *f"ip link set {end} master br0 up".split()])
            own = f"ip addr add {address_of(n)}/24 dev eth0"
            for words in (own, "ip link set lo up", "ip link set eth0 up"):
                _run([*self._enter(n), *words.split()])
            self._nft(n, _INPUT)

    def _begin(self, name: str) -> int:
        """Starts a host's first process; returns its number."""
        process = subprocess.Popen(
            [*_UNSHARE.split(), "sh", "-c", _LIVE, name, str(self._listed)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        self._alive.append(process)
        assert process.stdout is not None
        assert process.stderr is not None
        if process.stdout.readline().strip() != b"up":
            raise OSError(f"no host: {process.stderr.read().decode().strip()}")
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        return int(children.read_text().split()[0])

    def _enter(self, host: int) -> list[str]:
        return _enter(self._inner[host])

    def _add_rule(self, host: int, rule: str) -> None:
        self._nft(host, f"add rule inet f i {rule}")

    def _nft(self, host: int, command: str) -> None:
        _run([*self._enter(host), "nft", command])


def _enter(inner: int) -> list[str]:
    where = ("--net", "--uts", "--mount", "--pid")
    return ["nsenter", "--target", str(inner), *where, "--"]


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_S)
    if done.returncode:
        raise OSError(f"{done.stderr.strip()} in {' '.join(command)}")


@functools.cache
def why_no_hosts() -> str | None:
    """Returns why there can be no hosts on this machine; None where there can."""
    if lacking := [tool for tool in _TOOLS if shutil.which(tool) is None]:
        return f"{', '.join(lacking)} not found"
    if os.geteuid():
        return "only root can make namespaces"
    try:
        with tempfile.TemporaryDirectory() as folder, Hosts(2, Path(folder)) as hosts:
            hosts.drop(0, 1)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{type(error).__name__}: {error}"
    return None


def run_on_hosts(count: int, situation: Callable[[Hosts], None], folder: Path) -> Any:
    """Runs one situation on hosts of its own, of which nothing is left."""
    from harness.task_faults import Outcome

    try:
        with Hosts(count, folder) as hosts:
            situation(hosts)
    except (AssertionError, OSError, subprocess.TimeoutExpired) as error:
        return Outcome(str(error) or type(error).__name__)
    return Outcome()
