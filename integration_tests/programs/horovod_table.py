"""Horovod's behaviour as a table of cases, a row per call, with NumPy as the oracle.

``tw-launch -n N -- python horovod_table.py OUT`` runs all rows in all
their modes on every rank, one after the other in one group, and saves each result.
``test_horovod_table.py`` compares them.

    row        what is called, what each rank brings, what each rank gets, or is told
    modes      eager; function: a tf.function; unknown: one of unknown lengths;
               session: a graph, with placeholders of known shapes
"""

import argparse
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

Arrays = list[np.ndarray]
ALL = ("eager", "function", "unknown", "session")
BUILT = ("function", "unknown", "session")


@dataclass(frozen=True)
class Row:
    """One case."""

    # Takes the module and this rank's tensors; returns tensors
    call: Callable[[Any, Sequence[Any]], Any]
    # Takes a rank and the number of ranks; returns what it brings
    brings: Callable[[int, int], Arrays]
    # Takes what each rank brings, and a rank; returns what that gets
    wants: Callable[[list[Arrays], int], Arrays] | None = None
    # In place of ``wants``, what the error says, a regular expression
    refuses: str = ""
    modes: tuple[str, ...] = ALL  # in which it runs
    # Names of the module that it is about, beside the row's first word
    covers: tuple[str, ...] = ()


def drawn(rank: int, *shape: int, dtype: str = "float32", low: int = -8) -> np.ndarray:
    """Draws whole numbers, of which sums and products of three are exact."""
    draw = np.random.default_rng([rank, *shape])
    return draw.integers(max(low, 0) if "u" in dtype else low, 6, shape).astype(dtype)


def one(*shape: int, **options: Any) -> Callable[[int, int], Arrays]:
    """Brings one array of a shape."""
    return lambda rank, size: [drawn(rank, *shape, **options)]


def ragged(*shape: int, rows: int = 1, dtype: str = "float32") -> Any:
    """Brings one array with more rows on each rank; none on rank 0 unless ``rows``."""
    return lambda rank, size: [drawn(rank, rank + rows, *shape, dtype=dtype)]


def firsts(brought: list[Arrays]) -> Arrays:
    """Returns the first array of each rank."""
    return [arrays[0] for arrays in brought]


def same(
    of_all: Callable[[Arrays], np.ndarray],
) -> Callable[[list[Arrays], int], Arrays]:
    """Wants the same on all ranks, of the first arrays of all."""
    return lambda brought, rank: [of_all(firsts(brought))]


def total(arrays: Arrays) -> np.ndarray:
    """Adds arrays; the dtype stays."""
    return np.sum(arrays, axis=0, dtype=np.float64).astype(arrays[0].dtype)


def mean(arrays: Arrays) -> np.ndarray:
    """Averages arrays; whole numbers are rounded towards zero."""
    means = np.sum(arrays, axis=0, dtype=np.float64) / len(arrays)
    is_whole = np.issubdtype(arrays[0].dtype, np.integer)
    return (np.trunc(means) if is_whole else means).astype(arrays[0].dtype)


def columns(of_all: Callable[[Arrays], np.ndarray]) -> Any:
    """Wants, of each place in the lists that ranks bring, the same on all ranks."""
    return lambda brought, rank: [of_all(list(c)) for c in zip(*brought, strict=True)]


def share(arrays: Arrays, rank: int) -> np.ndarray:
    """Returns a rank's rows of a sum, the first ranks' one more."""
    return np.array_split(total(arrays), len(arrays))[rank]


def by_splits(brought: list[Arrays], rank: int) -> Arrays:
    """Returns what an all-to-all of rows and splits gives a rank."""
    parts = [np.split(rows, np.cumsum(splits)[:-1])[rank] for rows, splits in brought]
    return [np.concatenate(parts), np.int32([len(part) for part in parts])]


def _splits(rank: int, size: int) -> Arrays:
    splits = np.int32([(rank + to) % 3 for to in range(size)])
    return [drawn(rank, int(splits.sum()), 2), splits]


def _uneven(rank: int, size: int, *shape: int) -> np.ndarray:
    """Draws what only rank 1 brings with four rows more."""
    return drawn(rank, 100 + 4 * (rank == 1), *shape)


def _in_turn(hvd: Any, given: Sequence[Any], **options: Any) -> list[Any]:
    """Reduces loss and accuracy by name, in the opposite order on odd ranks."""
    named = list(zip(("loss", "accuracy"), given, strict=True))
    named = named[::-1] if hvd.rank() % 2 else named
    got = {name: hvd.allreduce(t, name=name, **options) for name, t in named}
    return [got["loss"], got["accuracy"]]


def _sparse(hvd: Any, given: Sequence[Any]) -> list[Any]:
    """Adds rows of a table, alone or in a group with what else is given."""
    import tensorflow as tf

    values, indices, *others = given
    slices = tf.IndexedSlices(values, indices, tf.constant([50, 2]))
    if not others:
        reduced = hvd.allreduce(slices, op=hvd.Sum)
    else:
        *others, reduced = hvd.grouped_allreduce([*others, slices], op=hvd.Sum)
    return [*others, reduced.values, reduced.indices]


def _rows(rank: int, size: int) -> Arrays:
    return [drawn(rank, rank + 1, 2), np.arange(rank + 1) + rank]


def _joined(brought: list[Arrays], rank: int) -> Arrays:
    return [np.concatenate(column) for column in zip(*brought, strict=True)]


def _assigned(name: str) -> Callable[[Any, Sequence[Any]], Any]:
    def call(hvd: Any, given: Sequence[Any]) -> Any:
        import tensorflow as tf

        variable = tf.Variable(given[0])
        getattr(hvd, name)([variable], root_rank=1)
        return variable.read_value()

    return call


def _gradient(hvd: Any, given: Sequence[Any]) -> Any:
    import tensorflow as tf

    with hvd.DistributedGradientTape(tf.GradientTape()) as tape:
        tape.watch(given[0])
        loss = tf.reduce_sum(given[0] ** 2)
    return tape.gradient(loss, given[0])


def _objects(hvd: Any, given: Sequence[Any]) -> Any:
    own = {"rank": hvd.rank(), "rows": list(range(50 * hvd.rank()))}
    got = hvd.broadcast_object(own, root_rank=1)
    again = hvd.broadcast_object_fn(root_rank=1)(own)
    everyone = hvd.allgather_object(own)
    lengths = [len(one["rows"]) for one in (got, again, *everyone)]
    return np.int32(lengths)


def _places(hvd: Any, given: Sequence[Any]) -> list[Any]:
    import tensorflow as tf

    hvd.barrier()
    numbers = [hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size()]
    ops = [hvd.rank_op(), hvd.size_op(), hvd.local_rank_op(), hvd.local_size_op()]
    places = [hvd.cross_rank(), hvd.cross_size(), hvd.process_set_included_op()]
    return [tf.cast(number, tf.int32) for number in (*numbers, *ops, *places)]


def _facts(hvd: Any, given: Sequence[Any]) -> Any:
    names = ("mpi", "gloo", "nccl", "ddl", "ccl", "cuda", "rocm")
    built = [bool(getattr(hvd, f"{name}_built")()) for name in names]
    enabled = [hvd.mpi_enabled(), hvd.gloo_enabled(), hvd.mpi_threads_supported()]
    return np.array([hvd.is_initialized(), hvd.is_homogeneous(), *enabled, *built])


def _reduce(name: str, **options: Any) -> Callable[[Any, Sequence[Any]], Any]:
    def call(hvd: Any, given: Sequence[Any]) -> Any:
        known = {"op": lambda op: getattr(hvd, op)}
        known["compression"] = lambda kind: getattr(hvd.Compression, kind)
        chosen = {k: known.get(k, lambda v: v)(v) for k, v in options.items()}
        if name.startswith("grouped"):
            return getattr(hvd, name)(list(given), **chosen)
        return getattr(hvd, name)(given[0], **chosen)

    return call


REDUCED = ("uint8", "int8", "int32", "int64", "float16", "float32", "float64")
MOVED = (*REDUCED, "uint16", "int16", "bool")
GROUP = [((), "float32"), ((3, 0), "float32"), ((7,), "float64"), ((2,), "int32")]


def _group(rank: int, size: int) -> Arrays:
    return [drawn(rank, *shape, dtype=dtype) for shape, dtype in GROUP]


SUM = _reduce("allreduce", op="Sum")
GATHER = _reduce("allgather")
CAST = _reduce("broadcast", root_rank=1)
SCATTER = _reduce("reducescatter", op="Sum")
of_rank_1 = same(lambda own: own[1])
KNOWN = ("eager", "function", "session")
EAGER = ("eager",)


def _shares(brought: list[Arrays], rank: int) -> Arrays:
    return [share(firsts(brought), rank)]


def _all_to_all(hvd: Any, given: Sequence[Any]) -> list[Any]:
    return list(hvd.alltoall(given[0], given[1]))


ROWS: dict[str, Row] = {
    "allreduce averages": Row(_reduce("allreduce"), one(5, 2), same(mean)),
    **{
        f"allreduce by {op}": Row(_reduce("allreduce", op=op), one(5, 2), same(of_all))
        for op, of_all in (
            ("Sum", total),
            ("Min", partial(np.min, axis=0)),
            ("Max", partial(np.max, axis=0)),
            ("Product", partial(np.prod, axis=0)),
        )
    },
    "allreduce of a number": Row(_reduce("allreduce"), one(), same(mean)),
    "allreduce with factors": Row(
        _reduce("allreduce", op="Sum", prescale_factor=2.0, postscale_factor=0.25),
        one(5, 2),
        same(lambda own: total(own) / 2),
    ),
    "allreduce of nothing": Row(SUM, one(0), same(total)),
    "allreduce of rows of nothing": Row(SUM, one(3, 0), same(total)),
    "allreduce in float16": Row(
        _reduce("allreduce", op="Sum", compression="fp16"), one(5, 2), same(total)
    ),
    "allreduce of rows": Row(_sparse, _rows, _joined),
    "allreduce by name, in unlike order": Row(
        _in_turn,
        lambda rank, size: [np.float32(100 + rank), np.float32(0.5 * rank)],
        columns(mean),
        modes=BUILT,
    ),
    "grouped_allreduce": Row(
        _reduce("grouped_allreduce", op="Sum"), _group, columns(total)
    ),
    "grouped_allreduce of rows and others": Row(
        _sparse,
        lambda rank, size: [*_rows(rank, size), drawn(rank, 2)],
        lambda brought, rank: [
            total([dense for *_, dense in brought]),
            *_joined([arrays[:2] for arrays in brought], rank),
        ],
    ),
    "grouped_allreduce of nothing at all": Row(
        lambda hvd, given: hvd.grouped_allreduce([]),
        lambda rank, size: [],
        lambda brought, rank: [],
        modes=EAGER,
    ),
    "allgather": Row(GATHER, ragged(2), same(np.concatenate)),
    "allgather, none of rank 0": Row(GATHER, ragged(2, rows=0), same(np.concatenate)),
    "allgather of rows of nothing": Row(GATHER, ragged(0), same(np.concatenate)),
    "allgather of nothing": Row(GATHER, one(0, 2), same(np.concatenate)),
    "grouped_allgather": Row(
        _reduce("grouped_allgather"),
        lambda rank, size: [drawn(rank, rank, 2), drawn(rank, 2, dtype="uint8")],
        columns(np.concatenate),
    ),
    "broadcast": Row(CAST, one(3, 2), of_rank_1, modes=KNOWN),
    "broadcast of nothing": Row(CAST, one(0, 2), of_rank_1, modes=KNOWN),
    **{
        name: Row(_assigned(name), one(3, 2), of_rank_1, modes=EAGER)
        for name in ("broadcast_", "broadcast_variables")
    },
    "alltoall": Row(
        _reduce("alltoall"),
        lambda rank, size: [drawn(rank, 2 * size, 3)],
        lambda brought, rank: [
            np.concatenate([np.split(a, len(brought))[rank] for a in firsts(brought)])
        ],
    ),
    "alltoall by splits": Row(_all_to_all, _splits, by_splits),
    "alltoall of nothing": Row(
        _all_to_all,
        lambda rank, size: [drawn(rank, 0, 2), np.zeros(size, np.int32)],
        by_splits,
    ),
    "alltoall of rows of nothing": Row(
        _reduce("alltoall"),
        lambda rank, size: [drawn(rank, 2 * size, 0)],
        lambda brought, rank: [np.zeros([2 * len(brought), 0], np.float32)],
    ),
    "reducescatter": Row(SCATTER, one(7, 2), _shares),
    "reducescatter of nothing": Row(SCATTER, one(0, 2), _shares),
    "grouped_reducescatter": Row(
        _reduce("grouped_reducescatter", op="Sum", prescale_factor=2.0),
        lambda rank, size: [drawn(rank, 4, dtype="int64"), drawn(rank, 5, 2)],
        lambda brought, rank: [
            2 * share(list(column), rank) for column in zip(*brought, strict=True)
        ],
    ),
    "DistributedGradientTape": Row(
        _gradient, one(3), same(lambda own: 2 * mean(own)), modes=("eager", "function")
    ),
    "broadcast_object": Row(
        _objects,
        one(),
        lambda brought, rank: [
            np.int32([50, 50, *(50 * r for r in range(len(brought)))])
        ],
        modes=EAGER,
        covers=("broadcast_object_fn", "allgather_object"),
    ),
    "rank": Row(
        _places,
        one(),
        lambda brought, rank: [
            np.int32(number) for number in (*[rank, len(brought)] * 4, 0, 1, 1)
        ],
        modes=EAGER,
        covers=(
            *("barrier", "size", "local_rank", "local_size", "rank_op", "size_op"),
            *("local_rank_op", "local_size_op", "cross_rank", "cross_size"),
            "process_set_included_op",
        ),
    ),
    "is_initialized": Row(
        _facts,
        one(),
        lambda brought, rank: [np.array([True, True, *[False] * 10])],
        modes=EAGER,
        covers=(
            *("init", "is_homogeneous", "mpi_enabled", "gloo_enabled", "mpi_built"),
            *("mpi_threads_supported", "gloo_built", "nccl_built", "ddl_built"),
            *("ccl_built", "cuda_built", "rocm_built"),
        ),
    ),
}
for _dtype in REDUCED:
    _brings = one(5, 2, dtype=_dtype, low=-3)
    ROWS[f"allreduce adds {_dtype}"] = Row(
        SUM, _brings, same(total), modes=("unknown", "session")
    )
    ROWS[f"allreduce averages {_dtype}"] = Row(
        _reduce("allreduce"), one(4, dtype=_dtype), same(mean), modes=EAGER
    )
for _dtype in ("float16", "float32", "float64"):
    ROWS[f"reducescatter averages {_dtype}"] = Row(
        _reduce("reducescatter", prescale_factor=0.5, postscale_factor=4.0),
        one(6, dtype=_dtype),
        lambda brought, rank: [
            np.array_split(2 * mean(firsts(brought)), len(brought))[rank]
        ],
        modes=BUILT,
    )
for _dtype in MOVED:
    _brings = ragged(3, dtype=_dtype)
    ROWS[f"allgather of {_dtype}"] = Row(
        GATHER, _brings, same(np.concatenate), modes=("eager", "unknown")
    )
    ROWS[f"broadcast of {_dtype}"] = Row(
        CAST, one(3, dtype=_dtype), of_rank_1, modes=("function",)
    )

REFUSED: dict[str, Row] = {
    # Of shapes that no row had before: ranks compare before any of them begins.
    "allreduce by name, eagerly in unlike order": Row(
        _in_turn,
        lambda rank, size: [np.float32(1), np.float32(2)],
        refuses="loss.*accuracy|accuracy.*loss",
        modes=EAGER,
    ),
    "allreduce of other shapes": Row(
        _reduce("allreduce"),
        lambda rank, size: [_uneven(rank, size)],
        refuses=r"104",
        modes=KNOWN,
    ),
    "allreduce of other dtypes": Row(
        _reduce("allreduce"),
        lambda rank, size: [drawn(rank, 14, dtype=("float32", "int32")[rank == 1])],
        refuses="int32",
    ),
    "allreduce with other factors": Row(
        lambda hvd, given: hvd.allreduce(given[0], prescale_factor=1.0 + hvd.rank()),
        one(11),
        refuses="prescale_factor",
    ),
    "allreduce with other reductions": Row(
        lambda hvd, given: hvd.allreduce(
            given[0], op=hvd.Min if hvd.rank() == 1 else hvd.Max
        ),
        one(12),
        refuses="(Min|Max).*(Min|Max)",
    ),
    "broadcast from other ranks": Row(
        lambda hvd, given: hvd.broadcast(given[0], root_rank=hvd.rank()),
        one(13),
        refuses="root",
        modes=KNOWN,
    ),
    "allgather of other widths": Row(
        _reduce("allgather"),
        lambda rank, size: [drawn(rank, 2, 18 + (rank == 1))],
        refuses="19",
        modes=KNOWN,
    ),
    "allgather while another reduces": Row(
        lambda hvd, given: (hvd.allgather if hvd.rank() == 1 else hvd.allreduce)(
            given[0]
        ),
        one(2, 17),
        refuses="allgather.*allreduce|allreduce.*allgather",
    ),
    "add_process_set": Row(
        lambda hvd, given: hvd.add_process_set([0]),
        one(),
        refuses="Not supported",
        modes=EAGER,
        covers=("remove_process_set", "start_timeline", "stop_timeline"),
    ),
    # Last of all: what ranks compare in the run itself.
    "allreduce of other lengths": Row(
        _reduce("allreduce"),
        lambda rank, size: [_uneven(rank, size)],
        refuses=r"104",
        modes=("unknown",),
    ),
}


def run(row: Row, mode: str, hvd: Any) -> Any:
    """Runs a row; returns arrays, or the kind and the text of the error."""
    import tensorflow as tf

    v1 = tf.compat.v1
    brought = row.brings(hvd.rank(), hvd.size())

    def build(*given: Any) -> list[Any]:
        result = row.call(hvd, given)
        return list(result) if isinstance(result, list | tuple) else [result]

    try:
        if mode == "session":
            with tf.Graph().as_default(), v1.Session() as session:
                fed = [v1.placeholder(a.dtype, a.shape) for a in brought]
                got = session.run(build(*fed), dict(zip(fed, brought, strict=True)))
                return [np.asarray(array) for array in got]
        given = [tf.constant(array) for array in brought]
        if mode == "eager":
            return [np.asarray(array) for array in build(*given)]
        specs = None
        if mode == "unknown":
            shapes = [[None, *a.shape[1:]] if a.ndim else [] for a in brought]
            specs = [
                tf.TensorSpec(s, a.dtype) for s, a in zip(shapes, brought, strict=True)
            ]
        return [
            np.asarray(a) for a in tf.function(build, input_signature=specs)(*given)
        ]
    except Exception as error:
        return type(error).__name__, str(error)


def main(folder: Path) -> None:
    """Runs all rows, and keeps what came of them, of this rank."""
    import tw_horovod as hvd

    hvd.init()
    results = {}
    for name, row in (ROWS | REFUSED).items():
        for mode in row.modes:
            results[name, mode] = run(row, mode, hvd)
            (folder / f"{hvd.rank()}.pickle").write_bytes(pickle.dumps(results))
    hvd.shutdown()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="folder for the ranks' results")
    main(parser.parse_args().folder)
