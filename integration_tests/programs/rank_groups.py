"""Groups of ranks that tests pass to models in place of one of ``tw_ranks``."""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf


class Alone:
    """A ``tw_core.ranks.RankGroup`` of one rank."""

    rank, size = 0, 1

    def sum(self, tensors: Sequence[Any], *, names: Sequence[str] = ()) -> list[Any]:
        return list(tensors)

    def broadcast(self, variables: Sequence[Any]) -> None:
        pass

    def bounded(self, function: Any) -> Any:
        return function

    def tell(self, what: str) -> None:
        pass

    wait_for = tell


class Counted(Alone):
    """A group that notes what this rank brings to each sum, in bytes.

    It only adds: shards of optimizer state are sums of all ranks' parts.
    """

    def __init__(self, group: Any) -> None:
        self.rank, self.size, self._group = group.rank, group.size, group
        self.broadcast, self.bounded = group.broadcast, group.bounded
        self.tell, self.wait_for = group.tell, group.wait_for
        self.seen: list[int] = []

    def sum(self, tensors: Sequence[Any], *, names: Sequence[str] = ()) -> list[Any]:
        tensors = [tf.convert_to_tensor(own) for own in tensors]

        def note(*own: Any) -> Any:
            self.seen.append(sum(tensor.numpy().nbytes for tensor in own))
            return own

        noted = tf.py_function(note, tensors, [own.dtype for own in tensors])
        for one, own in zip(noted, tensors, strict=True):
            one.set_shape(own.shape)
        return list(self._group.sum(noted, names=names))
