"""The interface of a group of processes that train a model together.

A group is any object that has these methods: the one that ``tw_ranks.join`` returns, or
your own.
"""

from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, Protocol, TypeVar, runtime_checkable

_P = ParamSpec("_P")
_R = TypeVar("_R")


@runtime_checkable
class RankGroup(Protocol):
    """Processes that train together, each of which is a rank.

    All ranks call ``sum`` and ``broadcast`` in the same order, with tensors of the same
    shapes and dtypes. A group may also have ``bucket_bytes`` and ``in_any_order``, as
    ``tw_ranks.ProcessGroup`` has; without, all gradients are sent together.
    """

    @property
    def rank(self) -> int:
        """This process's rank, from 0."""

    @property
    def size(self) -> int:
        """The number of ranks."""

    def sum(
        self,
        tensors: Sequence[Any],
        *,
        names: Sequence[str] = (),
        wire_dtype: Any = None,
    ) -> list[Any]:
        """Adds tensors over the ranks, in a ``tf.function`` and eagerly.

        Args:
          tensors: [N] of this rank: floats and integers of 32 and 64 bits, dense or
            ``tf.IndexedSlices`` of any number of rows.
          names: [N] for messages, the same on all ranks.
          wire_dtype: "float16" or "bfloat16", in which floats are sent, and added in
            float32; None for their own. Passed only if the user asks for it: a group
            may lack this argument.

        Returns:
          [N] sums, the same bits on all ranks. Sparse ones have the rows of all ranks;
          those that share an index may be added up if no rank repeats them.
        """

    def broadcast(self, variables: Sequence[Any]) -> None:
        """Gives all ranks the values of rank 0's variables.

        Random states of Keras (``keras.random.SeedGenerator``) become different ones,
        derived from rank 0's.

        Args:
          variables: the same on all ranks, of TensorFlow or Keras.
        """

    def bounded(self, function: Callable[_P, _R]) -> Callable[_P, _R]:
        """Makes a function that runs sums raise errors that name lost ranks."""

    def tell(self, what: str) -> None:
        """Announces on rank 0 that something is done, without waiting."""

    def wait_for(self, what: str) -> None:
        """Waits on another rank until rank 0 has announced ``what`` once more."""


@runtime_checkable
class ScatteringGroup(RankGroup, Protocol):
    """A group that can send a sum to the only rank that needs it.

    Both methods together send as much as one ``sum``. If a group lacks them, ``sum`` is
    used instead, and twice as much is sent.
    """

    def reduce_scatter(self, parts: Sequence[Any], *, name: str) -> Any:
        """Adds each rank's part over the ranks.

        Args:
          parts: [size] flat tensors of float32 or float64, of known lengths that may
            differ from each other; ``parts[r]`` is this rank's contribution to rank r's
            sum. Lengths are the same on all ranks.
          name: for messages, the same on all ranks.

        Returns:
          The sum of ``parts[rank]`` over the ranks.
        """

    def all_gather(self, own: Any, lengths: Sequence[int], *, name: str) -> list[Any]:
        """Gives all ranks each rank's tensor.

        Args:
          own: this rank's flat tensor of floats.
          lengths: [size], of all ranks' tensors; the same on all ranks.
          name: for messages, the same on all ranks.

        Returns:
          [size] flat tensors, the same bits on all ranks.
        """


@runtime_checkable
class AllToAllGroup(ScatteringGroup, Protocol):
    """A group whose ranks can send each other different tensors.

    Reducers of ``tw_reduce.compression`` then send parts of what they compressed, whose
    sums are compressed again. In any other group each rank gets all that all ranks
    compressed, which grows with their number.
    """

    def all_to_all(self, rows: Any, *, name: str) -> Any:
        """Sends row r to rank r.

        Args:
          rows: [size, n] of floats or integers of 32 and 64 bits, of known shape, which
            is the same on all ranks.
          name: for messages, the same on all ranks.

        Returns:
          [size, n], each rank's row for this one, in their order.
        """
