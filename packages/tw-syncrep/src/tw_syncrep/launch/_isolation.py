"""A network namespace of our own, in which servers are out of others' reach.

Done with system calls, as Python offers them from 3.12 on only. The process that
calls this and all its children then have a loopback interface and no other.
"""

import ctypes
import fcntl
import os
import socket
import struct
from pathlib import Path

_CLONE_NEWUSER = 0x10000000
_CLONE_NEWNET = 0x40000000
_SIOCGIFFLAGS = 0x8913
_SIOCSIFFLAGS = 0x8914
_IFF_UP = 0x1


def isolate() -> None:
    """Moves this process into a network namespace with a loopback interface.

    Raises:
      OSError: the system does not allow it.
    """
    user, group = os.getuid(), os.getgid()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWUSER | _CLONE_NEWNET):
        number = ctypes.get_errno()
        raise OSError(
            number,
            f"isolate: the system does not allow a network namespace "
            f"({os.strerror(number)}); run without --isolate behind a firewall",
        )
    # The same user as outside; groups can be mapped once setgroups is given up.
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
    Path("/proc/self/gid_map").write_text(f"{group} {group} 1")
    _bring_up("lo")


def _bring_up(interface: str) -> None:
    with socket.socket() as control:
        request = struct.pack("16sh14x", interface.encode(), 0)
        flags = struct.unpack("16sh14x", fcntl.ioctl(control, _SIOCGIFFLAGS, request))[
            1
        ]
        request = struct.pack("16sh14x", interface.encode(), flags | _IFF_UP)
        fcntl.ioctl(control, _SIOCSIFFLAGS, request)
