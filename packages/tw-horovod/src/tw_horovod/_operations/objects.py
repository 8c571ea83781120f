"""Exchange of Python objects between ranks, barriers, and the end of a rank's data."""

import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from tw_core.internal import without_autograph
from tw_horovod._operations import exchanges
from tw_horovod._operations.reductions import Max
from tw_horovod._state.group import find_endpoint, find_group, global_process_set
from tw_ranks import ProcessGroup, finish
from tw_ranks.internal import BUCKETS, broadcast_tensors, eager_mode, endpoint_of

_WORD_BYTES = 4


def broadcast_object(
    obj: Any,
    root_rank: int = 0,
    session: Any = None,
    name: str | None = None,
    process_set: Any = global_process_set,
) -> Any:
    """Returns one rank's object on all ranks; runs at once, in graph mode too.

    Args:
      obj: anything that ``pickle`` accepts; ignored on ranks other than the root.
      root_rank: the rank whose object is sent.
      session: not needed.
      name: ranks must agree on it.
      process_set: all ranks.

    Returns:
      On the root, ``obj`` itself; elsewhere, a copy.

    Raises:
      ValueError: the root is not a rank.
    """
    endpoint = find_endpoint(process_set)
    is_root = endpoint.rank == root_rank
    words = _to_words(obj) if is_root else np.zeros([0], np.int32)
    with eager_mode():
        [size] = broadcast_tensors(
            [tf.constant(len(words), tf.int32)],
            endpoint=endpoint,
            root=root_rank,
            names=[name or ""],
        )
        # Few lengths, as each is compiled separately.
        length = BUCKETS[np.searchsorted(BUCKETS, int(size))]
        padded = np.zeros([length], np.int32)
        padded[: len(words)] = words
        [received] = broadcast_tensors(
            [tf.constant(padded)], endpoint=endpoint, root=root_rank
        )
    return obj if is_root else _to_object(received.numpy())


def broadcast_object_fn(
    root_rank: int = 0,
    session: Any = None,
    name: str | None = None,
    process_set: Any = global_process_set,
) -> Callable[[Any], Any]:
    """Returns ``broadcast_object`` as a function of the object alone."""
    find_group(process_set)
    return lambda obj: broadcast_object(obj, root_rank, name=name)


def allgather_object(
    obj: Any,
    session: Any = None,
    name: str | None = None,
    process_set: Any = global_process_set,
) -> list[Any]:
    """Returns the objects of all ranks; runs at once, in graph mode too.

    Args:
      obj: anything that ``pickle`` accepts.
      session: not needed.
      name: ranks must agree on it.
      process_set: all ranks.

    Returns:
      [size], by rank.
    """
    endpoint = find_endpoint(process_set)
    words = _to_words(obj)
    with eager_mode():
        own = [tf.constant(words), tf.constant([len(words)])]
        got, counts = exchanges.gather_all(own, endpoint=endpoint, name=name or "")
        parts = np.split(got.numpy(), np.cumsum(counts.numpy())[:-1])
    return [_to_object(part) for part in parts]


def barrier(process_set: Any = global_process_set) -> None:
    """Waits until all ranks have called it; runs at once, in graph mode too."""
    endpoint = find_endpoint(process_set)
    with eager_mode():
        exchanges.reduce([tf.zeros([1], tf.int32)], Max, endpoint=endpoint)


@without_autograph
def join() -> tf.Tensor:
    """Reports that this rank's data has ended, and waits until all ranks' data has.

    Until then, this rank contributes zeros to the reductions of other ranks' optimizers
    and tapes; means are still divided by the number of all ranks. Other collectives
    need all ranks.

    Returns:
      int32 [], the rank that joined last, the largest if several did; in a graph, the
      op's result.

    Raises:
      RuntimeError: other ranks broadcast meanwhile, or do something else that needs
        all ranks.
    """
    group = find_group()
    if tf.executing_eagerly():
        return tf.constant(_join(group), tf.int32)
    last = tf.numpy_function(lambda: np.int32(_join(group)), [], tf.int32)
    last.set_shape([])
    return last


def _join(group: ProcessGroup) -> int:
    waited = finish(group)
    with eager_mode():
        own = tf.constant([waited], tf.int32)
        [all_waited] = exchanges.gather_all([own], endpoint=endpoint_of(group))
        steps = all_waited.numpy()
    return int(np.flatnonzero(steps == steps.min())[-1])


def _to_words(obj: Any) -> np.ndarray:
    """Returns an object as int32 [words], the first of which is its size in bytes."""
    data = pickle.dumps(obj)
    filled = data + bytes(-len(data) % _WORD_BYTES)
    return np.concatenate(
        [np.array([len(data)], np.int32), np.frombuffer(filled, np.int32)]
    )


def _to_object(words: np.ndarray) -> Any:
    return pickle.loads(words[1:].tobytes()[: int(words[0])])
