"""Gradient lists to reduce: the shapes of real and of extreme models.

Values are whole numbers of 64ths, so that every order of adding gives the same
bits and results can be compared for equality.
"""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

Shape = tuple[int, ...]


@dataclass(frozen=True)
class SparseTable:
    """An embedding table and how many of its rows a tower's batch looks up."""

    shape: Shape
    rows: int


@dataclass(frozen=True)
class Profile:
    """A model's gradients: dense shapes first, then sparse tables."""

    name: str
    dense: tuple[Shape, ...]
    sparse: tuple[SparseTable, ...] = ()


def resnet50_shapes() -> tuple[Shape, ...]:
    """Kernels, and batch normalisation's two vectors, of ResNet-50: 161 tensors."""
    shapes = [*_convolution(7, 3, 64)]
    width_in = 64
    for blocks, width in ((3, 64), (4, 128), (6, 256), (3, 512)):
        for block in range(blocks):
            shapes += _convolution(1, width_in, width)
            shapes += _convolution(3, width, width)
            shapes += _convolution(1, width, 4 * width)
            if block == 0:
                shapes += _convolution(1, width_in, 4 * width)
            width_in = 4 * width
    return (*shapes, (2048, 1000), (1000,))


def _convolution(size: int, width_in: int, width: int) -> list[Shape]:
    return [(size, size, width_in, width), (width,), (width,)]


def _layers(*widths: int) -> tuple[Shape, ...]:
    return tuple(
        shape for ins, outs in pairwise(widths) for shape in ((ins, outs), (outs,))
    )


PROFILES = {
    "resnet50": Profile("ResNet-50, 161 tensors", resnet50_shapes()),
    "small": Profile("400 tensors of 1,024", ((1024,),) * 400),
    "huge": Profile("4 tensors of 8 M", ((8_000_000,),) * 4),
    "embeddings": Profile(
        "3 tables of 200,000 x 64, 8,192 rows each, and 3 layers",
        _layers(192, 512, 256, 1),
        (SparseTable((200_000, 64), 8_192),) * 3,
    ),
}


def dense_values(profile: Profile, tower: int) -> list[np.ndarray]:
    """Draws a tower's dense gradients."""
    random = np.random.default_rng([tower, 0])
    return [_draw(random, shape) for shape in profile.dense]


def sparse_values(profile: Profile, tower: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Draws a tower's rows and their indices: unsorted, popular ones often."""
    random = np.random.default_rng([tower, 1])
    drawn = []
    for table in profile.sparse:
        popular = random.zipf(1.3, table.rows) % table.shape[0]
        values = _draw(random, (table.rows, table.shape[1]))
        drawn.append((values, popular.astype(np.int32)))
    return drawn


def _draw(random: np.random.Generator, shape: Shape) -> np.ndarray:
    whole = random.integers(-1024, 1024, shape, dtype=np.int16)
    return whole.astype(np.float32) / np.float32(64)
