"""Facts about a machine: versions, memory, links, TF_CONFIG and exposure."""

import fcntl
import os
import platform
import shutil
import socket
import struct
import subprocess
from importlib.metadata import distributions, entry_points
from pathlib import Path
from typing import Any

from tw_reduce.internal import num_cores, version_of

_DISTRIBUTIONS = ("keras", "tf-keras", "numpy")
FACTS = "tw_doctor.facts"
_ANSWERS_WITHIN_S = 10.0
_SIOCGIFADDR = 0x8915


def versions(tensorflow: str) -> dict[str, str]:
    """Returns the versions of Python, TensorFlow and the installed distributions."""
    ours = sorted({d.name for d in distributions() if d.name.startswith("tw-")})
    found = {name: version_of(name) for name in (*_DISTRIBUTIONS, *ours)}
    return {
        "python": platform.python_version(),
        "tensorflow": tensorflow,
        **{name: own for name, own in found.items() if own},
    }


def system() -> dict[str, Any]:
    """Describes the system, its load and cores, and the bytes of memory."""
    return {
        "load": round(os.getloadavg()[0], 1),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cores": num_cores(),
        "memory_bytes": _memory(),
    }


def gpu_memory() -> list[dict[str, Any]]:
    """Asks nvidia-smi for each GPU's name and memory; empty without it."""
    said = _asked("--query-gpu=name,memory.total,memory.free", "--format=csv,noheader")
    found = []
    for line in said.splitlines():
        parts = [part.strip() for part in line.split(",")]
        numbers = [part.split()[0] for part in parts[1:] if part.split()]
        if len(numbers) == 2 and all(number.isdigit() for number in numbers):
            total, free = map(int, numbers)
            found.append({"name": parts[0], "total_mib": total, "free_mib": free})
    return found


def links() -> list[str]:
    """Returns nvidia-smi's table of how GPUs are linked, line by line."""
    return _asked("topo", "-m").rstrip().splitlines()


def tf_config() -> str:
    """Describes this process's task in TF_CONFIG; with tw-launch, checks it."""
    text = os.environ.get("TF_CONFIG")
    return sibling_fact("TF_CONFIG", text) if text else "not set"


def sibling_fact(name: str, otherwise: str) -> str:
    """Returns the fact that a package declares under a name, or ``otherwise``."""
    try:
        for point in entry_points(group=FACTS, name=name):
            return str(point.load()())
    except ValueError as error:
        raise AssertionError(str(error)) from None
    return otherwise


def exposure() -> str:
    """Describes where a TensorFlow server of this machine could be reached from."""
    found = {
        name: address
        for _, name in socket.if_nameindex()
        if name != "lo" and (address := _address(name))
    }
    if not found:
        return "a TensorFlow server could be reached from this machine only"
    places = ", ".join(f"{address} ({name})" for name, address in found.items())
    return (
        "a TensorFlow server listens on all interfaces, whatever host it is given, "
        f"and runs any graph that anyone sends: here {places}. Close its ports with a "
        "firewall, or start tasks with `tw-launch --isolate`"
    )


def _address(interface: str) -> str:
    """Returns an interface's IPv4 address; empty where it has none."""
    request = struct.pack("256s", interface.encode()[:15])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        try:
            answer = fcntl.ioctl(asking, _SIOCGIFADDR, request)
        except OSError:
            return ""
    return socket.inet_ntoa(answer[20:24])


def _memory() -> int:
    """Bytes that this process may use: the machine's, or its container's."""
    whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for path in ("memory.max", "memory/memory.limit_in_bytes"):
        file = Path("/sys/fs/cgroup", path)
        text = file.read_text().strip() if file.is_file() else ""
        if text.isdigit():
            whole = min(whole, int(text))
    return whole


def _asked(*arguments: str) -> str:
    command = shutil.which("nvidia-smi")
    if not command:
        return ""
    try:
        done = subprocess.run(
            [command, *arguments],
            capture_output=True,
            text=True,
            timeout=_ANSWERS_WITHIN_S,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""
