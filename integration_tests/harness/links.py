"""A network of namespaces, one for each task, whose links can be taken down.

A *hub*, a process in a network namespace of its own, holds a bridge; a veth pair joins
the namespace of every task to it. A link that is down takes packets and gives no sign:
nothing refuses, as the tasks know each other's hardware addresses and need not ask.
No namespace has a name, so each ends with its process and nothing is left behind.
"""

import ctypes
import ipaddress
import os
import signal
import subprocess
from typing import Any

_CLONE_NEWNET = 0x40000000
_BRIDGE = "hub"
_END = "task"


def task_addresses(count: int, *, port: int = 2222) -> list[str]:
    """Returns "host:port" of tasks, each on a host of its own."""
    return [f"10.77.0.{2 + n}:{port}" for n in range(count)]


def hub(pipe: Any, spec: dict[str, Any]) -> None:
    """Holds a bridge, and plugs and unplugs tasks until the pipe closes.

    All links end with this process, so it has no other deadline.
    """
    signal.alarm(0)
    _unshare()
    _ip(f"link add {_BRIDGE} type bridge", f"link set {_BRIDGE} up")
    pipe.send(("bridged", None))
    while True:
        command, value = pipe.recv()
        pipe.send(("done", _COMMANDS[command](value)))


def join_network(pipe: Any, address: str, others: list[str]) -> None:
    """Moves this task into a namespace of its own, joined to the hub."""
    _unshare()
    pipe.send(("alone", None))
    pipe.recv()
    own = _host(address)
    _ip(
        "link set lo up",
        f"link set {_END} address {_hardware(own)}",
        f"addr add {own}/24 dev {_END}",
        f"link set {_END} up",
        *(
            f"neigh replace {other} lladdr {_hardware(other)} dev {_END} nud permanent"
            for other in map(_host, others)
            if other != own
        ),
    )


def share_network(pid: int) -> None:
    """Moves this task into the namespace of another process."""
    with open(f"/proc/{pid}/ns/net") as namespace:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.setns(namespace.fileno(), _CLONE_NEWNET):
            number = ctypes.get_errno()
            raise OSError(number, f"no namespace of {pid}: {os.strerror(number)}")


def _plug(plug: tuple[str, int]) -> None:
    name, pid = plug
    _ip(f"link add {name} type veth peer name {_END} netns {pid}")
    _ip(f"link set {name} master {_BRIDGE} up")


_COMMANDS = {
    "plug": _plug,
    "down": lambda name: _ip(f"link set {name} down"),
    "up": lambda name: _ip(f"link set {name} up"),
    # Where its task has ended, it may be gone already.
    "unplug": lambda name: _ip(f"link del {name}", check=False),
}


def _unshare() -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWNET):
        number = ctypes.get_errno()
        raise OSError(number, f"no network namespace: {os.strerror(number)}")


def _ip(*commands: str, check: bool = True) -> None:
    done = subprocess.run(
        ["ip", "-batch", "-"],
        input="\n".join(commands),
        capture_output=True,
        text=True,
        timeout=20,
    )
    if check and done.returncode:
        raise OSError(f"ip: {done.stderr.strip()} in {commands}")


def _host(address: str) -> str:
    return address.rpartition(":")[0]


def _hardware(host: str) -> str:
    return "02:00:" + ipaddress.ip_address(host).packed.hex(":")
