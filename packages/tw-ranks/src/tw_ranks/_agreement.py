"""Descriptions of collectives, which ranks compare before anything is sent.

A collective whose ranks pass different tensors does not fail: it hangs or mixes up
bytes. So every rank describes an exchange before it runs it for the first time. Rank 0
compares the descriptions, and reports to all ranks that they agree, or how they differ.
It compares digests, as reading a description takes milliseconds, in which it would
answer no rank; it asks for two descriptions where they differ, to say how.
"""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from functools import cached_property
from typing import Any

GRADIENTS = "the sum of gradients"
END = "the end of all data"
PROOF = "a proof of NCCL"
FOLLOWED = (GRADIENTS, END, PROOF)
"""Kinds of exchange in which a rank that has finished still takes part."""

_BY_NCCL = ("engine", "nccl")


@dataclass(frozen=True)
class TensorSpec:
    """A rank's description of a tensor."""

    name: str  # "" if it has no name that ranks share.
    dtype: str
    shape: tuple[int | None, ...] | None  # None: unknown before the graph runs.
    indices: str = ""  # Their dtype for ``tf.IndexedSlices``; "" if dense.

    def __str__(self) -> str:
        """Formats it for messages, e.g. "dense/kernel float32 [3, 4]"."""
        shape = "of unknown shape" if self.shape is None else str(list(self.shape))
        sparse = f", {self.indices} rows of" if self.indices else ""
        return f"{self.name or 'a tensor'}{sparse} {self.dtype} {shape}"


def describe_tensor(
    tensor: Any, name: str = "", *, has_rows: bool = False, indices: str = ""
) -> TensorSpec:
    """Describes a tensor; if it ``has_rows``, their number may differ by rank."""
    shape = None if tensor.shape.rank is None else tuple(tensor.shape.as_list())
    if has_rows and shape is not None:
        shape = (None, *shape[1:])
    return TensorSpec(name, tensor.dtype.name, shape, indices)


@dataclass(frozen=True)
class Digest:
    """A description in brief, in place of which ranks send it."""

    kind: str
    whole: str
    bare: str  # Without paths of variables, if it is equal to those with others.
    names: str  # Of the tensors, in any order.

    def is_same(self, other: "Digest") -> bool:
        """Whether all but paths of variables is equal, which Keras changes on loading.

        The same paths in another order are an error: ranks made layers in unlike
        orders.
        """
        is_renamed = self.bare == other.bare and self.names != other.names
        return self.whole == other.whole or is_renamed


@dataclass(frozen=True)
class Exchange:
    """A rank's description of a collective."""

    kind: str
    tensors: tuple[TensorSpec, ...]
    options: tuple[tuple[str, str], ...] = ()  # Everything else that must be equal.
    name: str = ""  # Chosen by the program.
    of_variables: bool = False  # Equal if they differ only in their paths.

    @cached_property
    def digest(self) -> Digest:
        """The same on all ranks that describe the same."""
        whole = _hash(_list(self))
        bare = _hash(_list(without_paths(self))) if self.of_variables else whole
        names = _hash(sorted(tensor.name for tensor in self.tensors))
        return Digest(self.kind, whole, bare, names)

    @property
    def by_nccl(self) -> bool:
        """Whether NCCL carries it."""
        return _BY_NCCL in self.options

    def carried_by_nccl(self) -> "Exchange":
        """Returns the description of one that NCCL carries."""
        return replace(self, options=(*self.options, _BY_NCCL))

    def scope(self, engine: str) -> str:
        """Returns the scope that timelines show: its engine, and its first tensor."""
        first = self.tensors[0].name if self.tensors else ""
        of_first = re.sub(r"[^0-9A-Za-z]+", "_", first).strip("_")
        return "/".join(filter(None, [f"by_{engine}", of_first]))

    def __str__(self) -> str:
        """Formats it for messages, e.g. "'a broadcast' of a tensor float32 [3]"."""
        shown = ", ".join(map(str, self.tensors[:2]))
        more = len(self.tensors) - 2
        named = f" {self.name!r}" if self.name else ""
        of = f" of {shown}" if shown else ""
        others = f" and {more} more" if more > 0 else ""
        with_ = "".join(f", {name}={value}" for name, value in self.options)
        return f"{self.kind!r}{named}{of}{others}{with_}"


def find_difference(described: Mapping[int, Exchange]) -> str:
    """Returns the first difference from the lowest rank's description, or ""."""
    one = min(described)
    first = described[one]
    for rank, other in sorted(described.items()):
        if not first.digest.is_same(other.digest):
            said = _compare(first, other, f"rank {one}", f"rank {rank}")
            return f"{said}. All ranks must run the same program."
    return ""


def without_paths(exchange: Exchange) -> Exchange:
    """Keeps the last word of each variable's path, "kernel" of "a/kernel_1:0"."""
    if not exchange.of_variables:
        return exchange
    words = [
        re.findall(r"[^\W\d_]+", t.name.partition(":")[0]) for t in exchange.tensors
    ]
    pairs = zip(exchange.tensors, words, strict=True)
    bare = tuple(replace(tensor, name=(own or [""])[-1]) for tensor, own in pairs)
    return replace(exchange, tensors=bare)


@dataclass
class Agreement:
    """What rank 0 knows of one exchange, under its number or name."""

    digests: dict[int, Digest | None] = field(default_factory=dict)  # None: follows.
    key: int = 0  # The first; 0: no rank has described it.
    since_s: float = 0.0  # Time of the first digest.
    asked: set[int] = field(default_factory=set)  # Ranks, for descriptions.
    exchanges: dict[int, Exchange] = field(default_factory=dict)  # Their answers.
    unanswered: set[int] = field(default_factory=set)
    informed: set[int] = field(default_factory=set)  # Ranks that follow.

    @property
    def described(self) -> dict[int, Digest]:
        """The digests, without ranks that follow."""
        return {r: digest for r, digest in self.digests.items() if digest is not None}

    def find_different(self) -> list[int]:
        """Returns the lowest rank and the first that differs from it, [] if none."""
        described = self.described
        lowest = min(described, default=0)
        for rank in sorted(described):
            if not described[lowest].is_same(described[rank]):
                return [lowest, rank]
        return []

    def find_difference(self, different: Sequence[int]) -> str:
        """Returns how two ranks' exchanges differ, which they have described."""
        found = {rank: self.exchanges[rank] for rank in different}
        return find_difference(found) if found else ""


def _list(exchange: Exchange) -> list[Any]:
    tensors = [(t.name, t.dtype, t.shape, t.indices) for t in exchange.tensors]
    return [*astuple(replace(exchange, tensors=())), tensors]


def _hash(value: Any) -> str:
    return hashlib.blake2b(json.dumps(value).encode(), digest_size=16).hexdigest()


def _compare(first: Exchange, other: Exchange, one: str, two: str) -> str:
    if (other.kind, other.name) != (first.kind, first.name):
        return f"{one} is about to do {_title(first)}, {two} {_title(other)}"
    pairs = zip(first.tensors, other.tensors, strict=False)
    for place, (mine_, theirs_) in enumerate(pairs):
        if mine_ != theirs_:
            return (
                f"tensor {place} of {_title(first)} is {mine_} on {one} and {theirs_} "
                f"on {two}"
            )
    if other.options != first.options:
        mine, theirs = dict(first.options), dict(other.options)
        name = min(key for key in mine | theirs if mine.get(key) != theirs.get(key))
        return (
            f"{one} has {name}={mine.get(name)}, {two} has "
            f"{name}={theirs.get(name)}, for {_title(first)}"
        )
    longer = max(first.tensors, other.tensors, key=len)
    extra = longer[min(len(first.tensors), len(other.tensors))]
    return (
        f"{one} passes {len(first.tensors)} tensors to {_title(first)}, {two} "
        f"passes {len(other.tensors)}; the first extra tensor is {extra}"
    )


def _title(exchange: Exchange) -> str:
    return f"{exchange.kind!r}{f' named {exchange.name!r}' if exchange.name else ''}"
