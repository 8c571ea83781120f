"""The variables that a flat variable holds, and where: plain Python."""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from math import prod

# Measured: flat variables are faster at 64 KiB, separate ones at 128 KiB, where owners
# apply them (docs/benchmarks/step.md).
DEFAULT_BELOW_BYTES = 96 * 1024

Group = Callable[[str], Hashable | None]


@dataclass(frozen=True)
class Part:
    """One variable's place in a flat variable."""

    name: str  # without ":0"
    shape: tuple[int, ...]
    start: int  # index of its first element

    @property
    def size(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def end(self) -> int:
        """Index of the first element after it."""
        return self.start + self.size


@dataclass(frozen=True)
class Layout:
    """The parts of a flat variable, in order and without gaps."""

    parts: tuple[Part, ...] = ()

    @property
    def size(self) -> int:
        """Number of elements of all parts."""
        return self.parts[-1].end if self.parts else 0

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """Each variable's shape."""
        return [part.shape for part in self.parts]

    def add(self, name: str, shape: Sequence[int]) -> "Layout":
        """Returns a layout with one more variable at its end.

        >>> Layout().add("w", (2, 3)).add("b", ()).parts[1]
        Part(name='b', shape=(), start=6)
        """
        return Layout((*self.parts, Part(name, tuple(shape), self.size)))

    def renamed(self, name: str, whole: str, *, prefix: str = "") -> "Layout":
        """Returns the layout of ``name``, an optimizer's slot of variable ``whole``.

        ``prefix`` is that of a tower, which the slot's parts do not have.

        >>> slots = Layout().add("w", (2,)).renamed("Adam/flat/m", "flat")
        >>> slots.parts[0].name
        'Adam/w/m'
        """
        before, _, after = f"/{name}/".partition(f"/{whole}/")
        names = [part.name.removeprefix(prefix) for part in self.parts]
        return Layout(
            tuple(
                replace(part, name=f"{before}/{own}/{after}".strip("/"))
                for part, own in zip(self.parts, names, strict=True)
            )
        )


def is_slot_name(name: str, whole: str) -> bool:
    """Returns whether a variable is named after another, as slots and averages are.

    >>> is_slot_name("flat/float32/Adam_1", "flat/float32")
    True
    >>> is_slot_name("flat/float32", "flat/float32")
    False
    """
    return name != whole and f"/{whole}/" in f"/{name}/"
