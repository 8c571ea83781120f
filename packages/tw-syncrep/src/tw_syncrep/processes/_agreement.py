"""Descriptions of collectives, which ranks compare before anything is sent.

A collective whose ranks bring unlike tensors does not fail, it hangs or mixes up bytes.
So every rank describes what it is about to exchange, the first time that it does. Rank
0 compares the descriptions, and tells all ranks that they agree, or the difference.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class TensorSpec:
    """What a rank says of one tensor.

    Attributes:
      name: of the variable or tensor, "" where it has none that ranks share.
      dtype: name of the element type.
      shape: None for what is not known before the graph runs; as a whole where not
        even the rank is.
      indices: name of the element type of the indices, where rows are brought
        (``tf.IndexedSlices``); "" where they are not.
    """

    name: str
    dtype: str
    shape: tuple[int | None, ...] | None
    indices: str = ""

    def __str__(self) -> str:
        """As it is shown in messages, e.g. "dense/kernel float32 [3, 4]"."""
        shape = "of unknown shape" if self.shape is None else str(list(self.shape))
        sparse = f", {self.indices} rows of" if self.indices else ""
        return f"{self.name or 'a tensor'}{sparse} {self.dtype} {shape}"


@dataclass(frozen=True)
class Exchange:
    """One collective, as a rank describes it.

    Attributes:
      kind: what is done, e.g. "sum".
      tensors: what is brought, in order.
      options: everything else that must be the same, as (name, value).
    """

    kind: str
    tensors: tuple[TensorSpec, ...]
    options: tuple[tuple[str, str], ...] = ()

    def as_json(self) -> dict[str, Any]:
        """Returns it as plain lists, dictionaries and strings."""
        return asdict(self)

    @staticmethod
    def from_json(data: Any) -> "Exchange":
        """Undoes ``as_json``, also after lists have become tuples or the reverse.

        Raises:
          ValueError: it is nothing that ``as_json`` returns.
        """
        try:
            tensors = tuple(
                TensorSpec(
                    str(spec["name"]),
                    str(spec["dtype"]),
                    None if spec["shape"] is None else tuple(spec["shape"]),
                    str(spec["indices"]),
                )
                for spec in data["tensors"]
            )
            options = tuple((str(name), str(value)) for name, value in data["options"])
            return Exchange(str(data["kind"]), tensors, options)
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"Exchange: not a description: {error!r}.") from None


def find_difference(exchanges: Sequence[Exchange]) -> str:
    """Returns the first difference from what rank 0 brings, "" where there is none.

    Args:
      exchanges: by rank, at least one.
    """
    first = exchanges[0]
    for rank, other in enumerate(exchanges):
        if other != first:
            return f"{_compare(first, other, rank)}. All ranks must run one program."
    return ""


def _compare(first: Exchange, other: Exchange, rank: int) -> str:
    if other.kind != first.kind:
        return f"rank 0 is about to do {first.kind!r}, rank {rank} {other.kind!r}"
    if other.options != first.options:
        mine, theirs = dict(first.options), dict(other.options)
        name = min(key for key in mine | theirs if mine.get(key) != theirs.get(key))
        return (
            f"rank 0 has {name}={mine.get(name)}, rank {rank} has "
            f"{name}={theirs.get(name)}, for {first.kind!r}"
        )
    pairs = zip(first.tensors, other.tensors, strict=False)
    for place, (mine_, theirs_) in enumerate(pairs):
        if mine_ != theirs_:
            return (
                f"tensor {place} of {first.kind!r} is {mine_} on rank 0 and {theirs_} "
                f"on rank {rank}"
            )
    return (
        f"rank 0 brings {len(first.tensors)} tensors to {first.kind!r}, rank {rank} "
        f"{len(other.tensors)}; the first that only one has is "
        f"{_first_extra(first, other)}"
    )


def _first_extra(first: Exchange, other: Exchange) -> TensorSpec:
    longer = max(first.tensors, other.tensors, key=len)
    return longer[min(len(first.tensors), len(other.tensors))]
