"""Ranks that have imported ``tw_horovod``, started as ``tw-launch`` does."""

from typing import Any

import horovod_programs
from harness.ports import find_free_ports
from harness.ranks import Ranks
from horovod_models import make_batch


def make(context: Any, size: int, **options: Any) -> Ranks:
    """Returns ranks that have called ``hvd.init``."""
    if size > 1:
        ports = find_free_ports(size)
        options["cluster"] = [f"127.0.0.1:{port}" for port in ports]
    return Ranks(context, size, run=horovod_programs.run_rank, **options).joined()


def train(ranks: Ranks, program: str, **given: Any) -> tuple[Any, Any, list[Any]]:
    """Returns the batch, and what each rank's training returned; they start apart."""
    rows, targets = make_batch(len(ranks.all))
    calls = [
        (program, rows[rank], targets[rank], {**given, "start": 1.0 + rank})
        for rank in range(len(rows))
    ]
    return rows, targets, ranks.call_each("call_program", calls)
