"""What the benchmark of all-reduce between processes has its contenders do."""

from dataclasses import dataclass

PEER, FUNCTION, SESSION = "multi-worker", "tf.function", "local session"
BFLOAT16, SERVER, DDP, FLAT = "bfloat16", "parameter server", "DDP", "flat"
MPI, MPI_SESSION = "MPI", "MPI, local session"
RATE, MOMENTUM = 0.01, 0.9
CHECKED_STEPS = 3


@dataclass(frozen=True)
class Work:
    """A model of which nothing but parameters counts.

    Attributes:
      name: as shown.
      shapes: of the variables.
      contenders: who takes part.
      targets: contender, whom it is measured against, and the most that it may take of
        that one's time.
    """

    name: str
    shapes: tuple[tuple[int, ...], ...]
    contenders: tuple[str, ...]
    targets: tuple[tuple[str, str, float], ...]


_MLP = tuple(shape for _ in range(6) for shape in ((512, 512), (512,)))
_SMALL = tuple((16, 16) if n % 2 else (16,) for n in range(25))
WORKS = {
    "10": Work(
        "10 variables of 1,024 floats",
        ((1024,),) * 10,
        (FUNCTION, FLAT, SESSION, PEER, SERVER, DDP, MPI, MPI_SESSION),
        (
            (FUNCTION, PEER, 0.8),
            (SESSION, PEER, 0.9),
            (FUNCTION, DDP, 0.65),
            (FUNCTION, SERVER, 0.6),
            (MPI, PEER, 0.6),
            (MPI_SESSION, MPI, 1.15),
        ),
    ),
    "100": Work(
        "100 variables of 1,024 floats",
        ((1024,),) * 100,
        (FUNCTION, FLAT, SESSION, PEER, SERVER, DDP, MPI, MPI_SESSION),
        (
            (FUNCTION, PEER, 0.8),
            (SESSION, PEER, 0.9),
            (FUNCTION, DDP, 0.45),
            (FUNCTION, SERVER, 0.6),
            (MPI, PEER, 0.6),
            (MPI, DDP, 0.3),
            (MPI_SESSION, MPI, 1.15),
        ),
    ),
    "400": Work(
        "400 variables of 1,024 floats",
        ((1024,),) * 400,
        (FUNCTION, FLAT, SESSION, PEER, DDP, MPI, MPI_SESSION),
        (
            (FUNCTION, PEER, 0.75),
            (SESSION, PEER, 0.9),
            (FUNCTION, DDP, 0.6),
            (MPI, PEER, 0.6),
            (MPI_SESSION, MPI, 1.15),
        ),
    ),
    "1m": Work(
        "10 variables of 1,048,576 floats",
        ((1 << 20,),) * 10,
        (FUNCTION, BFLOAT16, SESSION, PEER, DDP, MPI, MPI_SESSION),
        (
            (FUNCTION, PEER, 1.0),
            (BFLOAT16, PEER, 0.65),
            (SESSION, PEER, 1.2),
            (FUNCTION, DDP, 1.6),
            (MPI, PEER, 0.45),
            (MPI, DDP, 0.45),
            (MPI_SESSION, MPI, 1.15),
        ),
    ),
    "mlp": Work(
        "MLP 6 x 512",
        _MLP,
        (FUNCTION, FLAT, PEER, DDP, MPI),
        (
            (FUNCTION, PEER, 0.8),
            (FUNCTION, DDP, 0.8),
            (MPI, PEER, 0.6),
            (MPI, DDP, 0.6),
        ),
    ),
    "small": Work(
        "25 small variables",
        _SMALL,
        (FUNCTION, FLAT, PEER, DDP),
        ((FUNCTION, PEER, 0.8), (FUNCTION, DDP, 0.8)),
    ),
}


def parameter_after(steps: int, size: int) -> float:
    """Returns what every parameter is, which begins at 1, after momentum steps.

    Rank r's gradient is r + 1 for every element.
    """
    mean = (size + 1) / 2
    parameter, momentum = 1.0, 0.0
    for _ in range(steps):
        momentum = MOMENTUM * momentum - RATE * mean
        parameter += momentum
    return parameter
