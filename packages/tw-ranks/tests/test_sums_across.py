"""Sums and means between processes, against NumPy."""

import itertools
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf
from harness.ranks import Raised, Ranks

from tw_ranks._endpoint.hosts import Hosts
from tw_ranks._exchanges.collectives import add_up
from tw_ranks._exchanges.running import _outermost_graph

MODES = ["eager", "function", "session"]
OVER_SERVERS = ["server", "monitored"]
SHAPES = [(3,), (), (2, 4), (0,), (70_001,), (300_000,), (5, 1)]


@pytest.fixture(
    scope="module", params=[(0, 0), (0, 0, 0), (0, 0, 1)], ids=["2", "3", "hosts"]
)
def ranks(request, processes):
    machines = request.param
    group = Ranks(processes, len(machines), machines=machines).joined()
    yield group
    group.end()


def brought(rank, *, towers=1, dtype="float32", shapes=SHAPES):
    """Whole numbers, of which every sum is exact."""
    draw = np.random.default_rng(100 + rank)
    return [
        [draw.integers(-8, 8, shape).astype(dtype) for shape in shapes]
        for _ in range(towers)
    ]


def expected(groups):
    return [
        np.sum([item for tower in column for item in tower], axis=0)
        for column in zip(
            *(zip(*towers, strict=True) for towers in groups), strict=True
        )
    ]


def arguments(ranks, mode, options=None, times=1, **drawn):
    own = [brought(rank.rank, **drawn) for rank in ranks.all]
    return own, [(mode, towers, options or {}, times) for towers in own]


def weighed(own, weights):
    """All gradients times the weights of their ranks."""
    return [
        [[weight * item for item in tower] for tower in towers]
        for towers, weight in zip(own, weights, strict=True)
    ]


def check(results, wanted, *, rtol=0.0, atol=0.0):
    """Compares all towers of all ranks."""
    for tower in itertools.chain.from_iterable(results):
        for got, want in zip(tower, wanted, strict=True):
            np.testing.assert_allclose(got, want, rtol, atol)


@pytest.mark.parametrize("mode", [*MODES, *OVER_SERVERS])
@pytest.mark.parametrize("towers", [1, 2])
def test_all_get_the_numpy_sum(ranks, mode, towers):
    own, calls = arguments(ranks, mode, times=3, towers=towers)
    results = ranks.call_each("reduce", calls)
    assert [len(result) for result in results] == [towers] * len(own)
    check(results, expected(own))


def test_dtypes_can_be_mixed(ranks):
    dtypes = ["float32", "float64", "int32", "float32", "float16", "int64", "int32"]
    own = [
        [[a.astype(d) for a, d in zip(brought(r.rank)[0], dtypes, strict=True)]]
        for r in ranks.all
    ]
    calls = [("function", towers, {}, 1) for towers in own]
    results = ranks.call_each("reduce", calls)
    check(results, expected(own))
    for result in results:
        assert [got.dtype for got in result[0]] == dtypes


@pytest.mark.parametrize("mode", MODES)
def test_towers_of_all_ranks_are_weighed_by_their_rows(ranks, mode):
    own, _ = arguments(ranks, mode, towers=2)
    # Two ranks have 4 rows, three 8; one tower has none, and so NaN.
    weights = [[1, 2], [0, 1], [3, 1]][: len(own)]
    of_towers = [[tower] for towers in own for tower in towers]
    want = expected(weighed(of_towers, [w for ws in weights for w in ws]))
    own[1][0] = [np.full_like(item, np.nan) for item in own[1][0]]
    calls = [
        (mode, towers, {"mean": True, "weights": ws}, 2)
        for towers, ws in zip(own, weights, strict=True)
    ]
    count = sum(map(sum, weights))
    check(ranks.call_each("reduce", calls), [total / count for total in want])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("by_tower", [False, True])
@pytest.mark.parametrize("wire", [None, "float16", "bfloat16"])
def test_weights_may_be_larger_than_what_travels_can_hold(ranks, mode, by_tower, wire):
    weights = [65_536, 0, 3 * 65_536][: len(ranks.all)]
    dtype = "float32" if wire else "float16"
    own = []
    for rank, weight in zip(ranks.all, weights, strict=True):
        towers = brought(rank.rank, dtype=dtype, shapes=[(3,), (), (0,), (900,)])
        towers[0] = [item * np.array(100, dtype) for item in towers[0]]
        towers[0].append((towers[0][3][:6].reshape(3, 2), np.arange(3), (9, 2)))
        if not weight:
            towers[0][:4] = [np.full_like(item, np.nan) for item in towers[0][:4]]
        own.append(towers)
    shares = [weight / sum(weights) for weight in weights]
    calls = [
        (
            mode,
            t,
            {"mean": True, "wire_dtype": wire}
            | ({"weights": [w]} if by_tower else {"weight": w}),
            1,
        )
        for t, w in zip(own, weights, strict=True)
    ]
    wide = [[np.nan_to_num(item.astype(float)) for item in t[0][:4]] for t in own]
    for result in ranks.call_each("reduce", calls):
        for n, got in enumerate(result[0][:4]):
            assert got.dtype == dtype
            want = sum(s * w[n] for s, w in zip(shares, wide, strict=True))
            np.testing.assert_allclose(got, want, rtol=2**-7)
        want = [s * t[0][4][0] for s, t in zip(shares, own, strict=True)]
        np.testing.assert_allclose(result[0][4][0], np.concatenate(want), rtol=2**-7)


@pytest.mark.parametrize("mean", [True, "ranks"])
def test_weighted_means_of_float64_are_not_rounded_to_float32(ranks, mean):
    own, _ = arguments(ranks, "function", dtype="float64", towers=3)
    weights = [1, 3, 7][: len(own)]
    calls = [
        ("function", towers, {"mean": mean, "weight": weight}, 1)
        for towers, weight in zip(own, weights, strict=True)
    ]
    count = sum(weights) * (1 if mean == "ranks" else 3)
    want = [total / count for total in expected(weighed(own, weights))]
    check(ranks.call_each("reduce", calls), want, rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"weights": [1, 2]}, "weights must be one per tower .1.; got 2"),
        ({"weights": [-1]}, "weights must be finite and 0 or more; got tower 0: -1"),
        ({"weights": ["1"]}, "weights must hold real numbers or scalar tensors"),
        ({"weights": 1}, "weights must be a list of numbers"),
        ({"weight": True}, "weight must be a real number"),
        ({"weight": 1, "weights": [1]}, "pass weight or weights, not both"),
    ],
)
def test_bad_weights_are_refused_by_the_rank(ranks, options, message):
    _, calls = arguments(ranks, "eager", {"mean": True, **options})
    with pytest.raises(Raised, match=message):
        ranks.call_each("reduce", calls)


def test_a_mean_in_which_nobody_has_weight_is_zero(ranks):
    _, calls = arguments(ranks, "function", {"mean": True, "weight": 0.0})
    for result in ranks.call_each("reduce", calls):
        assert not any(np.any(got) for got in result[0])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("wire", ["bfloat16", "float16"])
@pytest.mark.parametrize("mean", [False, True])
def test_what_travels_narrow_is_added_wide(ranks, mode, wire, mean):
    own, calls = arguments(ranks, mode, {"wire_dtype": wire, "mean": mean})
    results = ranks.call_each("reduce", calls)
    # Whole numbers of up to 24 are exact in both.
    want = [total / (len(own) if mean else 1) for total in expected(own)]
    check(results, want, rtol=2**-8 if mean else 0.0)
    assert {got.dtype for result in results for got in result[0]} == {np.dtype("f4")}


def test_narrow_gradients_are_added_in_float32(ranks):
    # In float16, 2048 + 1 is 2048.
    values = [2048.0, 1.0, 1.0]
    calls = [
        ("function", [[np.full([5], values[rank.rank], np.float16)]], {}, 1)
        for rank in ranks.all
    ]
    want = np.float16(sum(values[: len(calls)]))
    for result in ranks.call_each("reduce", calls):
        np.testing.assert_array_equal(result[0][0], np.full([5], want))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("towers", [1, 2])
def test_rows_of_all_ranks_are_joined(ranks, mode, towers):
    own = [
        [
            [
                rows(rank.rank, tower, count=3 * rank.rank + tower),
                np.ones([2], np.float32),
                rows(rank.rank, tower, count=1),
                rows(rank.rank, tower, count=3 * rank.rank + tower, width=16_400),
                rows(rank.rank, tower, count=1, width=16_400),
            ]
            for tower in range(towers)
        ]
        for rank in ranks.all
    ]
    calls = [(mode, given, {}, 2) for given in own]
    for result in ranks.call_each("reduce", calls):
        for place in (0, 2, 3, 4):  # the last ones are wide
            values, indices = result[0][place]
            parts = [tower[place] for given in own for tower in given]
            np.testing.assert_array_equal(values, np.concatenate([p[0] for p in parts]))
            np.testing.assert_array_equal(
                indices, np.concatenate([p[1] for p in parts])
            )
        np.testing.assert_array_equal(result[0][1], np.full([2], towers * len(own)))


@pytest.mark.parametrize("mode", MODES)
def test_towers_may_mix_rows_and_dense_gradients_of_a_variable(ranks, mode):
    own, wanted = [], np.zeros([50, 4])
    for rank in ranks.all:
        some = rows(rank.rank, 0, count=3)
        [[whole]] = brought(rank.rank, shapes=[(50, 4)])
        np.add.at(wanted, some[1], some[0])
        wanted += whole
        own.append([[some], [whole]] if rank.rank != 1 else [[whole], [some]])
    for mean, count in ((False, 1), (True, 2 * len(own)), ("ranks", len(own))):
        calls = [(mode, towers, {"mean": mean}, 1) for towers in own]
        for [first], [second] in ranks.call_each("reduce", calls):
            np.testing.assert_array_equal(first, second)
            np.testing.assert_allclose(first, wanted / count, rtol=1e-6)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("wire", ["float16", "bfloat16"])
@pytest.mark.parametrize("mean", [False, True])
def test_values_of_rows_travel_narrow_and_their_places_as_they_are(
    ranks, mode, wire, mean
):
    draw = np.random.default_rng(7)
    own = [
        (
            draw.normal(size=(rank.rank + 2, 3)).astype(np.float32),
            draw.integers(2**40, 2**41, rank.rank + 2),
            (2**42, 3),
        )
        for rank in ranks.all
    ]
    calls = [(mode, [[given]], {"wire_dtype": wire, "mean": mean}, 2) for given in own]
    narrow = ml_dtypes.bfloat16 if wire == "bfloat16" else np.float16
    want = np.concatenate([given[0] for given in own]).astype(narrow)
    share = len(own) if mean else 1
    for result in ranks.call_each("reduce", calls):
        values, places = result[0][0]
        assert values.dtype == np.float32
        np.testing.assert_allclose(values, want.astype(np.float32) / share, rtol=1e-6)
        np.testing.assert_array_equal(places, np.concatenate([g[1] for g in own]))


@pytest.mark.parametrize("mode", ["function", "session"])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_rows_that_no_rank_repeats_are_not_repeated(ranks, mode, dtype):
    size = len(ranks.all)
    words = [word for rank in range(size) for word in (rank, rank, rank + 1)]
    distinct = list(range(size + 1))
    counts = np.array([1, *[2] * (size - 1), 1])[:, None] * np.ones([1, 2])
    for result in ranks.call("reduce_lookups", mode, dtype):
        (values, indices), once, (both, of_both) = result
        assert list(indices) == words and list(once[1]) == distinct
        np.testing.assert_array_equal(values, np.full([3 * size, 2], 1 / size, dtype))
        np.testing.assert_array_equal(once[0], (counts / size).astype(dtype))
        assert list(of_both) == [*distinct, *words]
        np.testing.assert_array_equal(both, np.concatenate([once[0], values]))


def rows(rank, tower, *, count, width=4):
    draw = np.random.default_rng(10 * rank + tower)
    values = draw.integers(0, 9, (count, width)).astype(np.float32)
    return values, draw.integers(0, 50, count), (50, width)


@pytest.mark.slow(
    by_day=[
        "2-None-function",
        "2-float16-session",
        "2-bfloat16-function",
        "3-bfloat16-session",
    ]
)
@pytest.mark.parametrize("mode", ["function", "session"])
@pytest.mark.parametrize("wire", [None, "float16", "bfloat16"])
def test_shapes_need_not_be_known(ranks, mode, wire):
    options = {"hides_shapes": True, "wire_dtype": wire}
    for size in (5, 1_000, 7):
        own, calls = arguments(ranks, mode, options, shapes=[(size,), (2, size)])
        check(ranks.call_each("reduce", calls), expected(own))


def test_all_ranks_get_the_same_bits_every_time(ranks):
    draw = np.random.default_rng(0)
    own = [[[draw.normal(size=[40_000]).astype(np.float32)]] for _ in ranks.all]
    calls = [("function", towers, {}, 2) for towers in own]
    results = [ranks.call_each("reduce", calls) for _ in range(3)]
    first = results[0][0][0][0]
    for result in itertools.chain.from_iterable(results):
        np.testing.assert_array_equal(result[0][0], first)


SAME, KERNEL = ("bias", "float32", [4]), ("kernel", "float32", [3, 4])


@pytest.mark.parametrize(
    ("theirs", "says"),
    [
        ([SAME, ("kernel", "float32", [3, 5])], "kernel float32 [3, 5] on rank 1"),
        ([SAME, ("kernel", "float64", [3, 4])], "kernel float64 [3, 4] on rank 1"),
        ([SAME, ("weight", "float32", [3, 4])], "weight float32 [3, 4] on rank 1"),
        ([SAME], "rank 0 passes 2 tensors"),
    ],
)
def test_other_gradients_than_another_rank_has_are_refused(ranks, theirs, says):
    for rank in ranks.all:
        rank.say("build_unlike", theirs if rank.rank == 1 else [SAME, KERNEL])
    for rank in ranks.all:
        with pytest.raises(Raised) as raised:
            rank.hear()
        assert raised.value.kind == "DifferenceError"
        assert says in raised.value.text
        assert "kernel float32 [3, 4]" in raised.value.text
    # After a refusal the group still works.
    assert ranks.call("step_until", 2) == [2 * len(ranks.all)] * len(ranks.all)


@pytest.mark.parametrize("mode", ["function", "session"])
def test_an_exchange_in_a_branch_gets_another_key_than_the_same_outside(mode):
    found = []

    def build():
        found.append(_outermost_graph())
        tf.cond(tf.equal(tf.timestamp(), 0.0), build_branch, lambda: 0.0)

    def build_branch():
        found.append(_outermost_graph())  # Its keys are counted there.
        return 1.0

    if mode == "function":
        graph = tf.function(build).get_concrete_function().graph
    else:
        with tf.Graph().as_default() as graph:
            build()
    assert found == [graph, graph]


@pytest.mark.parametrize(
    ("rank", "sends"),
    [
        (0, [("ReduceV2", 2), ("ReduceV2", 3), ("BcastSendV2", 2)]),
        (1, [("ReduceV2", 2), ("BcastRecvV2", 2)]),
        (2, [("ReduceV2", 3)]),
        (3, [("ReduceV2", 3)]),
    ],
)
def test_one_rank_of_each_machine_sends_to_others(rank, sends):
    hosts = Hosts.of([0, 0, 1, 2], rank)
    endpoint = SimpleNamespace(mpi=None, size=4, hosts=hosts)
    with tf.Graph().as_default() as graph:
        add_up(tf.zeros([8]), endpoint, 7, "Add", divides=True)
    found = [
        # The group's size follows the tensor, if the op has one.
        (op.type, int(tf.get_static_value(op.inputs[0 if "Recv" in op.type else 1])))
        for op in graph.get_operations()
        if op.type.startswith("Collective")
    ]
    assert found == [(f"Collective{kind}", size) for kind, size in sends]
    divisions = [op for op in graph.get_operations() if op.type == "Div"]
    divisors = [int(tf.get_static_value(op.inputs[1])) for op in divisions]
    assert divisors == [4] * hosts.is_first  # By all ranks, and once.


@pytest.mark.parametrize("hosts", [[0], [0, 0, 0], [0, 1, 2]])
def test_ranks_of_one_machine_or_alone_add_in_one_ring(hosts):
    assert Hosts.of(hosts, 0) is None
