"""Ranks that have imported ``tw_horovod``, started as ``tw-launch`` does."""

from typing import Any

import horovod_programs
from harness.ports import find_free_ports
from harness.ranks import Ranks


def make(context: Any, size: int, **options: Any) -> Ranks:
    """Returns ranks that have called ``hvd.init``."""
    if size > 1:
        ports = find_free_ports(size)
        options["cluster"] = [f"127.0.0.1:{port}" for port in ports]
    return Ranks(context, size, run=horovod_programs.run_rank, **options).joined()
