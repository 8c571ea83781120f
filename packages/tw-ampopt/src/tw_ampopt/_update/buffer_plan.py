"""Which gradients travel in one buffer.

Many small gradients are concatenated, so that adding, reducing and testing them is
one kernel each. Large ones stay alone: concatenating them would be one more copy of
the model. Sparse ones stay alone to stay sparse.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

PACK_UP_TO = 16_384  # elements; below it a kernel's overhead outweighs a copy


@dataclass(frozen=True)
class BufferPlan:
    """How N gradients become M buffers: the packed ones first, then the others.

    Attributes:
      shapes: [N] shapes of the variables.
      packed: indices of the gradients in buffer 0; empty for no packed buffer.
      alone: indices of the gradients that are a buffer each, in order.
    """

    shapes: tuple[tuple[int, ...], ...]
    packed: tuple[int, ...]
    alone: tuple[int, ...]

    @property
    def sizes(self) -> tuple[int, ...]:
        """Elements of each gradient in the packed buffer, in its order."""
        return tuple(math.prod(self.shapes[n]) for n in self.packed)

    @property
    def buffer_shapes(self) -> tuple[tuple[int, ...], ...]:
        """[M] shapes of the buffers when none is sparse."""
        packed = ((sum(self.sizes),),) if self.packed else ()
        return packed + tuple(self.shapes[n] for n in self.alone)


def plan_buffers(
    shapes: Sequence[Sequence[int]],
    *,
    sparse: Sequence[bool] | None = None,
    pack_up_to: int = PACK_UP_TO,
) -> BufferPlan:
    """Decides which gradients are packed.

    Args:
      shapes: [N] fully known shapes.
      sparse: [N] whether a gradient is to stay sparse; None for none of them.
      pack_up_to: elements; larger gradients stay alone.

    Returns:
      A plan in which every gradient stands once. One small gradient among large
      ones stays alone, as there is nothing to join it with.

    >>> plan_buffers([(2,), (100_000,), ()])
    BufferPlan(shapes=((2,), (100000,), ()), packed=(0, 2), alone=(1,))
    """
    stays = [False] * len(shapes) if sparse is None else list(sparse)
    packed = [
        n
        for n, shape in enumerate(shapes)
        if not stays[n] and math.prod(shape) <= pack_up_to
    ]
    if len(packed) == 1:
        packed = []
    alone = [n for n in range(len(shapes)) if n not in set(packed)]
    return BufferPlan(
        tuple(tuple(int(size) for size in shape) for shape in shapes),
        tuple(packed),
        tuple(alone),
    )
