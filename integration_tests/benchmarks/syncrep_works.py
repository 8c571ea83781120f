"""The models, contenders and targets of the benchmark of synchronous replicas."""

from dataclasses import dataclass

CHECKED_STEPS = 3
RATE = 0.5
PEER = "tensorflow"
SAME_SERVERS = "tensorflow, our servers"
IMPORT, PULLED, BFLOAT16 = "import alone", "pulled", "bfloat16"
FLAT = "flat"
PER_ROW = "pulled, by row"
BOUNDED, UNBOUNDED = "bounded", "unbounded"
ASYNCHRONOUS, MULTI_WORKER = "asynchronous", "multi-worker"
WHOLE = (PULLED, FLAT, BFLOAT16, PER_ROW, BOUNDED, UNBOUNDED)
"""Contenders that are built with all of the package: servers, getter, optimizer."""


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


PEERS = (PEER, SAME_SERVERS, ASYNCHRONOUS, MULTI_WORKER)
ALL = (IMPORT, PULLED, FLAT, *PEERS)
WORKS = {
    "10": Work("10 variables of 1,024 floats", 10, 1024, ALL, ((PULLED, 2.0),)),
    "100": Work(
        "100 variables of 1,024 floats",
        100,
        1024,
        ALL,
        ((PULLED, 7.0), (IMPORT, 2.3)),
    ),
    "400": Work(
        "400 variables of 1,024 floats",
        400,
        1024,
        ALL,
        ((PULLED, 10.0), (IMPORT, 2.8)),
    ),
    "10k": Work("100 variables of 10,240 floats", 100, 10_240, ALL, ((PULLED, 3.0),)),
    "1m": Work(
        "10 variables of 1,048,576 floats",
        10,
        1 << 20,
        (IMPORT, PULLED, BFLOAT16, *PEERS),
        ((PULLED, 0.95), (BFLOAT16, 1.2)),
    ),
    "sparse": Work(
        "embedding of 100,000 rows, 64 wide, batches of 1,024 rows",
        1,
        64,
        (IMPORT, PULLED, PER_ROW, PEER, SAME_SERVERS, ASYNCHRONOUS),
        ((PULLED, 1.1), (PER_ROW, 1.1)),
        rows=100_000,
    ),
    "bounded": Work(
        "bounded waits, 10 variables of 1,024 floats",
        10,
        1024,
        (UNBOUNDED, BOUNDED),
        ((BOUNDED, 0.97),),
        peer=UNBOUNDED,
    ),
}


def checked_value(work: Work, name: str) -> float:
    """What parameters that start as 1 are after the checked steps, in the mean.

    The workers' gradients are 1 and 2. A table's rows are drawn by one worker each,
    so that a mean by row leaves them as they are, and one over replicas halves them.
    """
    by_row = bool(work.rows) and name in (PEER, SAME_SERVERS, PER_ROW)
    return 1 - RATE * CHECKED_STEPS * (3.0 if by_row else 1.5)
