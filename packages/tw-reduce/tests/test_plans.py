"""The plans behind the reducers: plain Python, tested by property."""

from collections import Counter
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from tw_reduce.plans import (
    TensorInfo,
    plan_auto,
    plan_balanced,
    plan_hierarchy,
    plan_packs,
    plan_splits,
)

SIZES = st.lists(st.integers(0, 10**7), max_size=40)
DEVICES = st.integers(1, 8).map(lambda k: [f"/cpu:{i}" for i in range(k)])
DTYPES = st.sampled_from([("float32", 4), ("float16", 2), ("float64", 8)])
SHAPES = st.lists(st.one_of(st.integers(0, 300), st.none()), max_size=3)


@st.composite
def infos(draw, known=False):
    found = []
    for n in range(draw(st.integers(0, 20))):
        dtype, size = draw(DTYPES)
        shape = tuple(draw(SHAPES))
        if known:
            shape = tuple(side or 1 for side in shape)
        sparse = not known and draw(st.booleans())
        found.append(TensorInfo(n, shape, dtype, size, sparse))
    return found


@given(SIZES, DEVICES)
def test_balance_counts_all_bytes_and_is_within_four_thirds_of_the_best(sizes, devices):
    plan = plan_balanced(sizes, devices)
    assert len(plan.device_of) == len(sizes)
    for i, load in enumerate(plan.loads):
        assert load == sum(
            size for size, d in zip(sizes, plan.device_of, strict=True) if d == i
        )
    # Graham's bound for the largest first; best >= mean load, largest size.
    k = len(devices)
    ordered = sorted(sizes, reverse=True)
    paired = ordered[k - 1] + ordered[k] if len(ordered) > k else 0
    best = max([sum(sizes) / k, paired, *ordered[:1]])
    assert max(plan.loads) <= (4 / 3 - 1 / (3 * k)) * best + 1e-6


def test_an_unknown_size_counts_as_the_mean_of_the_known_ones():
    assert plan_balanced([10, None, 30], ["a", "b"]).loads == (30, 30)


@given(infos(), st.integers(0, 20_000))
def test_every_gradient_is_packed_once_or_alone(infos, below_bytes):
    plan = plan_packs(infos, below_bytes=below_bytes)
    everywhere = [n for pack in plan.packs for n in pack] + list(plan.alone)
    assert sorted(everywhere) == list(range(len(infos)))
    for pack in plan.packs:
        assert len(pack) > 1
        assert len({infos[n].dtype for n in pack}) == 1
        for n in pack:
            assert not infos[n].is_sparse
            assert infos[n].num_bytes < below_bytes


@st.composite
def groups(draw):
    towers = draw(st.permutations(range(draw(st.integers(1, 10)))))
    cuts = sorted(draw(st.sets(st.integers(1, max(1, len(towers) - 1)), max_size=3)))
    bounds = [0, *[cut for cut in cuts if cut < len(towers)], len(towers)]
    return tuple(tuple(towers[a:b]) for a, b in pairwise(bounds))


@given(groups(), st.integers(0, 50))
def test_a_hierarchy_uses_each_group_once_and_a_main_from_each(groups, index):
    plan = plan_hierarchy(groups, index)
    assert Counter(plan.members) == Counter(groups)
    for main, members in zip(plan.mains, plan.members, strict=True):
        assert main in members
    assert plan.root in plan.mains


@given(groups())
def test_over_as_many_variables_as_towers_each_leads_once(groups):
    count = sum(map(len, groups))
    leads = [plan_hierarchy(groups, n).mains[0] for n in range(count)]
    assert sorted(leads) == list(range(count))


@given(infos(known=True), st.integers(1, 12))
def test_splits_hold_every_element_in_equal_pieces(infos, num_split):
    plans = plan_splits(infos, num_split=num_split)
    if not plans:
        return
    assert sorted(n for p in plans for n in p.positions) == list(range(len(infos)))
    for plan in plans:
        assert sum(plan.sizes) == sum(infos[n].num_elements for n in plan.positions)
        assert len(set(plan.sizes[:-1])) <= 1


def test_auto_chooses_by_kind_of_device_size_and_dtype():
    infos = [
        TensorInfo(0, (10,), "float32", 4),
        TensorInfo(1, (20,), "float32", 4),
        TensorInfo(2, (1_000_000,), "float32", 4),
        TensorInfo(3, (5, 2), "float32", 4, is_sparse=True),
        TensorInfo(4, (3,), "bfloat16", 2),
    ]
    on_cpus = plan_auto(infos, ["/cpu:0", "/cpu:1"]).choices
    assert {choice.algorithm for choice in on_cpus} <= {"sum_on_device", "sum_balanced"}
    assert [choice.packed_with for choice in on_cpus] == [2, 2, 1, 1, 1]
    large = TensorInfo(2, (65_536,), "float32", 4)
    kernels = [*infos[:2], large, TensorInfo(3, (64, 64), "float32", 4)]
    for devices, packed in [(["/gpu:0", "/gpu:1"], 3), (["/gpu:0", "/cpu:0"], 2)]:
        counts = [c.packed_with for c in plan_auto(kernels, devices).choices]
        assert counts == [packed, packed, 1, packed if packed == 3 else 1]
    on_gpus = [c.algorithm for c in plan_auto(infos, ["/gpu:0", "/gpu:1"]).choices]
    assert on_gpus[:3] == ["sum_nccl"] * 3
    assert on_gpus[3:] == ["sum_balanced"] * 2
    mixed = plan_auto(infos, ["/gpu:0", "/cpu:0"]).choices
    assert {choice.algorithm for choice in mixed} == {"sum_balanced"}
    assert "4,000,000 bytes" in str(on_cpus[2])


@given(infos(), DEVICES)
def test_auto_counts_every_known_byte_on_the_device_that_adds_it(infos, devices):
    plan = plan_auto(infos, devices)
    assert [choice.tensor for choice in plan.choices] == infos
    assert len(str(plan).splitlines()) == len(infos) + 1
    known = sum(info.num_bytes or 0 for info in infos)
    assert sum(plan.bytes_on.values()) == known
    assert set(plan.bytes_on) <= {"/cpu:0"}
    mixed = plan_auto(infos, ["/gpu:0", "/cpu:0"])
    assert sum(mixed.bytes_on.values()) == known
    for device, load in mixed.bytes_on.items():
        placed = [c.tensor for c in mixed.choices if c.devices == (device,)]
        assert load == sum(info.num_bytes or 0 for info in placed)
