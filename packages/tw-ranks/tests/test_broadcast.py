"""One rank's variables for all: every dtype, mode and root."""

import inspect

import numpy as np
import pytest
from harness.ranks import Raised, Ranks

from tw_core.ranks import RankGroup
from tw_ranks import ProcessGroup

DTYPES = [
    *("float32", "float64", "float16", "int8", "uint8", "int16", "uint16", "int32"),
    *("uint32", "int64", "uint64", "bool", "complex64", "complex128"),
]
SHAPES = [(), (3,), (2, 3), (0,), (5, 1)]


@pytest.fixture(scope="module")
def ranks(processes):
    group = Ranks(processes, 3).joined()
    yield group
    group.end()


def values_of(rank, dtypes=DTYPES):
    draw = np.random.default_rng(rank)
    return [
        np.asarray(
            draw.integers(0, 100, shape)
            if dtype != "bool"
            else draw.random(shape) > 0.5
        ).astype(dtype)
        for dtype in dtypes
        for shape in SHAPES
    ]


@pytest.mark.parametrize("mode", ["eager", "keras", "resource", "reference"])
@pytest.mark.parametrize("root", [0, 2])
def test_all_get_what_the_root_has(ranks, mode, root):
    dtypes = [
        d for d in DTYPES if mode == "eager" or not d.startswith(("complex", "u"))
    ]
    calls = [(mode, values_of(rank.rank, dtypes), root) for rank in ranks.all]
    for got in ranks.call_each("exchange_variables", calls):
        for array, want in zip(got, values_of(root, dtypes), strict=True):
            assert array.dtype == want.dtype
            np.testing.assert_array_equal(array, want)


def test_a_group_is_what_models_over_ranks_take(ranks):
    for sums, variables, kind in ranks.call("act_as_a_rank_group", True):
        assert sums == [[3.0, 3.0], [0, 1, 2], 3]
        assert (variables, kind) == ([10.0], "is one")


def test_a_group_has_what_the_protocol_declares():
    for name, promised in vars(RankGroup).items():
        if name.startswith("_") or isinstance(promised, property):
            continue
        own = inspect.signature(getattr(ProcessGroup, name))
        assert list(own.parameters) == list(inspect.signature(promised).parameters)


def test_bfloat16_and_nan_arrive_bit_for_bit(ranks):
    import tensorflow as tf

    half = tf.bfloat16.as_numpy_dtype
    odd = np.array([np.nan, -0.0, np.inf, 1e-40], np.float32)
    own = [odd * (rank.rank + 1) for rank in ranks.all]
    calls = [("eager", [a, a.astype(half)], 1) for a in own]
    for single, narrow in ranks.call_each("exchange_variables", calls):
        assert single.tobytes() == own[1].tobytes()
        assert narrow.tobytes() == own[1].astype(half).tobytes()


@pytest.mark.slow
def test_large_variables_travel_in_parts(ranks):
    calls = [
        ("eager", [np.full([9 << 20], rank.rank, np.float32)] * 2, 1)
        for rank in ranks.all
    ]
    for got in ranks.call_each("exchange_variables", calls):
        assert all(np.all(array == 1) for array in got)


def test_other_variables_than_the_roots_are_refused(ranks):
    for rank in ranks.all:
        rank.say("exchange_variables", "eager", [np.zeros([2 + rank.rank])], 0)
    for rank in ranks.all:
        with pytest.raises(
            Raised, match=r"v:0 float64 \[2\] on rank 0 and v:0 float64 \[3\] on rank 1"
        ):
            rank.hear()


@pytest.mark.parametrize("mode", ["eager", "function", "session"])
def test_variables_that_differ_in_path_alone_are_paired_by_position(ranks, mode):
    paths = [
        [f"{mode}/dense/kernel", f"{mode}/dense_1/kernel", f"{mode}/dense_1/bias"],
        [
            f"{mode}/a/dense/kernel",
            f"{mode}/a/dense_1/kernel",
            f"{mode}/a/dense_1/bias",
        ],
        [f"{mode}/dense_1/kernel", f"{mode}/dense_2/kernel", f"{mode}/dense_2/bias"],
    ]
    calls = [(mode, own) for own in paths]
    for values, *sums in ranks.call_each("exchange_renamed", calls):
        assert values == [1.0] * 3
        assert sums == [[6.0] * 3] * 2


def test_a_root_that_is_no_rank_is_refused(ranks):
    for rank in ranks.all:
        rank.say("exchange_variables", "eager", [np.zeros([2])], 3)
    for rank in ranks.all:
        with pytest.raises(Raised, match=r"root must be below 3; got 3"):
            rank.hear()


@pytest.mark.parametrize(
    ("mode", "kind"),
    [("eager", "Runtime"), ("function", "Unknown"), ("session", "Unknown")],
)
def test_ranks_that_part_are_named_with_the_first_variable(ranks, mode, kind):
    same = [np.arange(6, dtype=np.float32).reshape(2, 3), np.zeros(0), np.array([True])]
    assert ranks.call("compare_variables", mode, same) == [None] * 3
    other = [np.nextafter(same[0], 9, dtype=np.float32), same[1], ~same[2]]
    moved = [same[0], same[1], ~same[2]]
    for theirs, told in ((other, "2 of 3 .*'v0:0'"), (moved, "1 of 3 .*'v2:0'")):
        for rank in ranks.all:
            rank.say("compare_variables", mode, theirs if rank.rank == 1 else same)
        for rank in ranks.all:
            with pytest.raises(Raised, match=f"{told}.*: ranks 0, 2; rank 1.") as error:
                rank.hear()
            assert error.value.kind == f"{kind}Error"
    swapped = [same[0][::-1], *same[1:]]
    calls = [(mode, swapped if rank.rank == 0 else same) for rank in ranks.all]
    with pytest.raises(Raised, match="ranks 1, 2; rank 0"):
        ranks.call_each("compare_variables", calls)
