"""Which variables lie in a flat variable, and where: plain Python."""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from math import prod

# Swept: at 64 KiB a flat variable wins, at 128 KiB each variable alone, where owners
# apply them (docs/benchmarks/step.md).
DEFAULT_BELOW_BYTES = 96 * 1024

Group = Callable[[str], Hashable | None]


@dataclass(frozen=True)
class Part:
    """One variable's place in a flat variable.

    Attributes:
      name: of the variable, without ``":0"``.
      shape: of the variable.
      start: its first element.
    """

    name: str
    shape: tuple[int, ...]
    start: int

    @property
    def size(self) -> int:
        """How many elements it has."""
        return prod(self.shape)

    @property
    def end(self) -> int:
        """The first element behind it."""
        return self.start + self.size


@dataclass(frozen=True)
class Layout:
    """The variables of a flat variable, one behind the other.

    Attributes:
      parts: in their order.
    """

    parts: tuple[Part, ...] = ()

    @property
    def size(self) -> int:
        """How many elements all have."""
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

    def without_prefix(self, prefix: str) -> "Layout":
        """Returns the layout with names that no longer open with ``prefix``."""
        return Layout(
            tuple(
                Part(part.name.removeprefix(prefix), part.shape, part.start)
                for part in self.parts
            )
        )

    def renamed(self, name: str, whole: str) -> "Layout":
        """Returns the layout of a variable that an optimizer keeps beside ``whole``.

        Args:
          name: the slot's, with ``whole`` in it.
          whole: the name of the flat variable of this layout.

        >>> slots = Layout().add("w", (2,)).renamed("Adam/flat/m", "flat")
        >>> slots.parts[0].name
        'Adam/w/m'
        """
        before, _, after = f"/{name}/".partition(f"/{whole}/")
        return Layout(
            tuple(
                Part(f"{before}/{part.name}/{after}".strip("/"), part.shape, part.start)
                for part in self.parts
            )
        )


def is_slot_name(name: str, whole: str) -> bool:
    """Returns whether a variable is called after another: its slot, or its average.

    >>> is_slot_name("flat/float32/Adam_1", "flat/float32")
    True
    >>> is_slot_name("flat/float32", "flat/float32")
    False
    """
    return name != whole and f"/{whole}/" in f"/{name}/"
