"""The models, contenders and targets of the benchmark of synchronous replicas."""

from dataclasses import dataclass

CHECKED_STEPS = 3
RATE = 0.5
PEER = "tensorflow"
GUARDED, UNGUARDED = "guard on", "guard off"
PER_ROW = "import alone by row"


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


ALL = (PEER, "import alone", "pulled", "asynchronous", "multi-worker")
WORKS = {
    "10": Work("10 variables of 1,024 floats", 10, 1024, ALL, (("pulled", 2.0),)),
    "100": Work(
        "100 variables of 1,024 floats",
        100,
        1024,
        ALL,
        (("pulled", 6.0), ("import alone", 2.3)),
    ),
    "400": Work(
        "400 variables of 1,024 floats",
        400,
        1024,
        ALL,
        (("pulled", 10.0), ("import alone", 2.6)),
    ),
    "10k": Work(
        "100 variables of 10,240 floats",
        100,
        10_240,
        (PEER, "pulled", "asynchronous", "multi-worker"),
        (("pulled", 3.0),),
    ),
    "1m": Work(
        "10 variables of 1,048,576 floats",
        10,
        1 << 20,
        (PEER, "import alone", "bfloat16", "asynchronous", "multi-worker"),
        (("import alone", 0.95), ("bfloat16", 1.2)),
    ),
    "sparse": Work(
        "embedding of 100,000 rows, 64 wide, batches of 1,024 rows",
        1,
        64,
        (PEER, "import alone", PER_ROW, "asynchronous"),
        (("import alone", 1.2), (PER_ROW, 1.2)),
        rows=100_000,
    ),
    "guard": Work(
        "guard, 10 variables of 1,024 floats",
        10,
        1024,
        (UNGUARDED, GUARDED),
        ((GUARDED, 0.97),),
        peer=UNGUARDED,
    ),
}


def checked_value(work: Work, name: str) -> float:
    """What parameters that start as 1 are after the checked steps, in the mean.

    The workers' gradients are 1 and 2. A table's rows are drawn by one worker each,
    so that a mean by row leaves them as they are, and one over replicas halves them.
    """
    by_row = bool(work.rows) and name in (PEER, PER_ROW)
    return 1 - RATE * CHECKED_STEPS * (3.0 if by_row else 1.5)
