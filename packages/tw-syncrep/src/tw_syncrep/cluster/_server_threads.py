"""Whether a server's idle threads look for work or sleep.

TensorFlow's threads look around for a while before they sleep, so that the next
op starts at once. Where the tasks of a cluster share a machine that has no more
processors than tasks, that takes the time of another task.
"""

import os
from collections.abc import Mapping, Sequence

import tensorflow as tf


def shares_processors(
    addresses: Mapping[str, Sequence[str]], own: str, *, processors: int
) -> bool:
    """Tells whether there is no processor to spare beside the tasks of a machine.

    Args:
      addresses: job to "host:port" strings.
      own: address of a task on the machine.
      processors: that it has.
    """
    host = _host(own)
    tasks = sum(_host(a) == host for listed in addresses.values() for a in listed)
    return tasks > 1 and tasks >= processors


def server_config(
    addresses: Mapping[str, Sequence[str]], own: str
) -> tf.compat.v1.ConfigProto:
    """Returns the settings of a server that the user gave none for."""
    config = tf.compat.v1.ConfigProto()
    if shares_processors(addresses, own, processors=_processors()):
        config.experimental.disable_thread_spinning = True
    return config


def _host(address: str) -> str:
    return address.rpartition(":")[0]


def _processors() -> int:
    """Counts those that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
