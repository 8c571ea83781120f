"""The whole state of a sharded optimizer: gathered for files, and scattered again.

The whole optimizer is the plain one, of whole variables, so that files equal those of
plain Keras. Its slots are on rank 0's host.
"""

from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import tensorflow as tf

from tw_builders._over_ranks.shards import RankShards, with_inner
from tw_core.internal import all_gather, tf_variable

_CHUNK = 1 << 22
"""Elements that all ranks get at once, for which each needs memory."""

_DTYPES = ("float32", "float64", "int32", "int64")
_LISTS = ("_variables", "_trainable_variables")


def make_whole(shards: RankShards) -> Any:
    """Makes the plain optimizer of tower 0's variables, on the host, without values."""
    kind, config = type(shards.optimizer), shards.optimizer.get_config()
    with tf.init_scope(), tf.device("/cpu:0"):
        whole = kind.from_config(config)
        for own in with_inner(whole):
            own.add_variable_from_reference = _beside_nothing(own)
        whole.build(list(shards.columns[0]))
        for own in with_inner(whole):
            del own.add_variable_from_reference
    return whole


def _beside_nothing(optimizer: Any) -> Any:
    def add(
        reference_variable: Any, name: Any = None, initializer: Any = "zeros"
    ) -> Any:
        path = str(getattr(reference_variable, "path", reference_variable.name))
        path = path.replace("/", "_").replace(":", "_")
        like = tf_variable(reference_variable)
        return optimizer.add_variable(
            *(like.shape, initializer, like.dtype.name), name=f"{path}_{name or 'var'}"
        )

    return add


def shared_state(optimizer: Any) -> list[Any]:
    """Lists the variables that an optimizer has once: counts, rates, scales."""
    found = []
    for own in with_inner(optimizer):
        slots = {id(slot) for of in _slots(own) for slot in of}
        found += [v for v in own._variables if id(v) not in slots]
    return found


def gather(shards: RankShards) -> Any:
    """Returns the whole optimizer on rank 0, None on others; all ranks call it."""
    rank, own = shards.group.rank, _own_slots(shards)
    whole = make_whole(shards) if rank == 0 else None
    lengths = _sum_table(shards, _lengths(shards, {rank: own}))
    for n, dtype in enumerate(_DTYPES):
        writers = [
            _writer(_whole_slots(shards, whole, other), dtype)
            for other in (range(shards.group.size) if whole is not None else ())
        ]
        for writer in writers:
            next(writer)
        values = _join(own, dtype)
        for pieces in _from_all(shards, values, [int(c) for c in lengths[:, n]]):
            for writer, piece in zip(writers, pieces, strict=False):
                writer.send(piece)
    if whole is not None:
        pairs = zip(shared_state(whole), shared_state(shards.optimizer), strict=True)
        for own, value in pairs:
            own.assign(value)
    return whole


def scatter(shards: RankShards, whole: Any) -> None:
    """Gives all ranks the state of rank 0's whole optimizer; all ranks call it.

    Other ranks' ``whole`` is ignored. An optimizer's scalars are not sent.
    """
    is_first, every = shards.group.rank == 0, range(shards.group.size)
    known = {r: _whole_slots(shards, whole, r) for r in every} if is_first else {}
    lengths = _sum_table(shards, _lengths(shards, known))
    for rank in every:
        into = _own_slots(shards) if rank == shards.group.rank else None
        for dtype, length in zip(_DTYPES, lengths[rank], strict=True):
            values = _join(known[rank], dtype) if is_first else None
            writer = _writer(into or [], dtype)
            next(writer)
            for piece in _from_one(shards, values, int(length), dtype):
                writer.send(piece)


def take(shards: RankShards, whole: Any) -> None:
    """Takes this rank's part of its own whole optimizer."""
    pairs = zip(
        *(_own_slots(shards), _whole_slots(shards, whole, shards.group.rank)),
        strict=True,
    )
    for (own, _), (slot, rows) in pairs:
        value = tf_variable(slot).read_value()
        own.assign(value if rows is None else value[rows[0] : rows[1]])
    once = zip(shared_state(shards.optimizer), shared_state(whole), strict=True)
    for variable, other in once:
        variable.assign(other)


@contextmanager
def as_whole(optimizer: Any, whole: Any) -> Iterator[None]:
    """Makes an optimizer the whole one while a file is written or read."""
    state = vars(optimizer)
    before = dict(state)
    state.clear()
    state.update(vars(whole))
    try:
        yield
    finally:
        state.clear()
        state.update(before)


def _slots(optimizer: Any) -> list[list[Any]]:
    """Lists an optimizer's lists of slots, with a slot or None per variable."""
    count = len(optimizer._trainable_variables)
    return [
        list(value)
        for name, value in sorted(vars(optimizer).items())
        if name not in _LISTS and isinstance(value, list) and len(value) == count
        if all(own is None or hasattr(own, "assign") for own in value)
    ]


Slots = list[tuple[Any, tuple[int, int] | None]]  # and rows of it; None for all


def _own_slots(shards: RankShards) -> Slots:
    """Lists this rank's slots, by list and shard."""
    lists = [of for own in with_inner(shards.optimizer) for of in _slots(own)]
    count = len(shards.own)  # without the variable that stands for none
    return [(slot, None) for of in lists for slot in of[:count] if slot is not None]


def _whole_slots(shards: RankShards, whole: Any, rank: int) -> Slots:
    """Lists a rank's slots in a whole optimizer, in the same order."""
    lists = [of for own in with_inner(whole) for of in _slots(own)]
    mine = [shard for shard in shards.plan if shard.rank == rank]
    return [
        (of[shard.variable], shard.rows)
        for of in lists
        for shard in mine
        if of[shard.variable] is not None
    ]


def _lengths(shards: RankShards, slots: dict[int, Slots]) -> np.ndarray:
    """Returns [size, dtypes] numbers of elements, of the ranks known here."""
    table = np.zeros([shards.group.size, len(_DTYPES)], np.int64)
    for rank, own in slots.items():
        for slot, rows in own:
            count = int(np.prod(_shape(slot, rows)))
            table[rank, _DTYPES.index(_travels_as(slot))] += count
    return table


def _sum_table(shards: RankShards, table: np.ndarray) -> Any:
    (total,) = shards.group.sum(
        [tf.constant(table)], names=["numbers of an optimizer's slots"]
    )
    return np.asarray(total)


def _shape(slot: Any, rows: tuple[int, int] | None) -> Sequence[int]:
    shape = tuple(slot.shape)
    return shape if rows is None else (rows[1] - rows[0], *shape[1:])


def _travels_as(slot: Any) -> str:
    name = str(tf_variable(slot).dtype.name)
    return "float32" if name in ("float16", "bfloat16") else name


def _join(slots: Slots, dtype: str) -> np.ndarray:
    found = [np.zeros([0], dtype)]
    for slot, rows in slots:
        if _travels_as(slot) == dtype:
            value = tf_variable(slot).numpy()
            value = value if rows is None else value[rows[0] : rows[1]]
            found.append(value.astype(dtype).reshape(-1))
    return np.concatenate(found)


def _from_one(
    shards: RankShards, own: np.ndarray | None, length: int, dtype: str
) -> Iterator[np.ndarray]:
    """Yields pieces of one rank's values; on all others ``own`` is None."""
    for first in range(0, length, _CHUNK):
        count = min(_CHUNK, length - first)
        mine = np.zeros([count], dtype) if own is None else own[first : first + count]
        (total,) = shards.group.sum(
            [tf.constant(mine)], names=[f"an optimizer's slots, {dtype}"]
        )
        yield np.asarray(total)


def _from_all(
    shards: RankShards, own: np.ndarray, lengths: Sequence[int]
) -> Iterator[list[np.ndarray]]:
    """Yields pieces of all ranks' values."""
    most = _CHUNK // shards.group.size
    for first in range(0, max(lengths), most):
        left = [min(most, max(0, length - first)) for length in lengths]
        mine = tf.constant(own[first : first + most])
        name = f"an optimizer's slots, {own.dtype.name}"
        yield list(map(np.asarray, all_gather(shards.group, mine, left, name=name)))


def _writer(slots: Slots, dtype: str) -> Generator[None, np.ndarray, None]:
    """Assigns slots of flat pieces that are sent to it, each when it is complete."""
    known = np.zeros([0], dtype)
    for slot, rows in slots:
        if _travels_as(slot) == dtype:
            shape = _shape(slot, rows)
            pieces, missing = [known], int(np.prod(shape)) - len(known)
            while missing > 0:
                pieces.append((yield))
                missing -= len(pieces[-1])
            flat = np.concatenate(pieces)
            value, known = np.split(flat, [int(np.prod(shape))])
            plain = tf_variable(slot)
            cast = tf.cast(value.reshape(shape), plain.dtype)
            if rows is None:
                plain.assign(cast)
            else:
                plain[rows[0] : rows[1]].assign(cast)
    while True:
        yield
