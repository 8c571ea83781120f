"""Where sums are made and what crosses between devices, read from the graph."""

from functools import partial

import numpy as np
import pytest
import tensorflow as tf

from tw_core.devices import canonical_device
from tw_core.testing import CPUS, run_in_function, run_in_graph
from tw_reduce import (
    accumulate_as,
    all_reduce,
    auto,
    broadcast,
    compress,
    hierarchical,
    mean,
    packed,
    partition,
    reducer_for_mode,
    sum_balanced,
    sum_collective,
    sum_nccl,
    sum_on_device,
    sum_round_robin,
)
from tw_reduce._sums import collectives
from tw_reduce.plans import EIGHT_GPU_CROSS
from tw_reduce.reducers import CollectiveKeys
from tw_reduce.tensorpack import allreduce_grads_naive

GPUS = [f"/job:worker/task:0/gpu:{k}" for k in range(8)]


def towers(devices, shapes=((20,), (3,)), dtype=tf.float32):
    rows = []
    for device in devices:
        with tf.device(device):
            rows.append([tf.compat.v1.placeholder(dtype, s) for s in shapes])
    return rows


def ops(graph, kind):
    return [op for op in graph.get_operations() if op.type == kind]


def cpu(k):
    return f"/device:CPU:{k}"


def devices_of(operations):
    return [canonical_device(op.device) for op in operations]


def crossing(graph):
    """Tensors that an operation on another device takes in, with both devices."""
    return [
        (tensor, canonical_device(tensor.device), canonical_device(op.device))
        for op in graph.get_operations()
        for tensor in op.inputs
        if canonical_device(tensor.device) != canonical_device(op.device)
    ]


def test_packs_are_joined_on_each_tower_added_once_and_cut_up_once(graph):
    reducer = packed(partial(sum_on_device, device=CPUS[3]))
    results = reducer(towers(CPUS[:3], [(20,), (2, 3), (40_000,), ()]))
    assert devices_of(ops(graph, "ConcatV2")) == [cpu(0), cpu(1), cpu(2)]
    assert devices_of(ops(graph, "AddN")) == [cpu(3)] * 2
    assert devices_of(ops(graph, "SplitV")) == [cpu(3)]
    assert all(one is other for one, other in zip(*results[:2], strict=True))
    before = len(ops(graph, "ConcatV2"))
    packed(partial(sum_on_device, device=CPUS[0]), below_bytes=0)(towers(CPUS[:2]))
    assert len(ops(graph, "ConcatV2")) == before


def test_one_tower_is_returned_untouched(graph):
    grads = towers(CPUS[:1])
    before = len(graph.get_operations())
    for reducer in (auto(CPUS[:1]), packed(partial(sum_balanced, devices=CPUS[:1]))):
        assert reducer(grads) == grads
    assert len(graph.get_operations()) == before


@pytest.mark.parametrize("wire", [tf.float16, tf.bfloat16])
@pytest.mark.parametrize(
    "combine",
    [
        compress,
        lambda reducer, wire: packed(compress(reducer, wire)),
        lambda reducer, wire: compress(packed(reducer), wire),
    ],
)
def test_compress_lets_nothing_wide_cross(graph, wire, combine):
    grads = towers(CPUS[:3], [(20,), (7,), (20_000,)])
    combine(partial(sum_on_device, device=CPUS[4]), wire)(grads)
    floats = [(t, to) for t, _, to in crossing(graph) if t.dtype.is_floating]
    assert {to for _, to in floats} == {cpu(4)}
    assert {tensor.dtype for tensor, _ in floats} == {wire}
    assert {op.inputs[0].dtype for op in ops(graph, "AddN")} == {tf.float32}


def test_accumulate_as_adds_in_the_other_dtype(graph):
    reducer = accumulate_as(partial(sum_on_device, device=CPUS[0]), tf.float16)
    [first, _] = reducer(towers(CPUS[:2]))
    assert {op.inputs[0].dtype for op in ops(graph, "AddN")} == {tf.float16}
    assert {tensor.dtype for tensor in first} == {tf.float32}


@pytest.mark.parametrize("given", [tf.float16, tf.float64])
def test_only_tensors_that_were_widened_travel_as_they_were(given, graph):
    rows = []
    for device in CPUS[:2]:
        with tf.device(device):
            own = tf.compat.v1.placeholder(given, [20])
            rows.append([tf.cast(own, tf.float32)])
    sum_on_device(rows, device=CPUS[5])
    kinds = {t.dtype for t, _, to in crossing(graph) if t.dtype.is_floating}
    assert kinds == {tf.float16 if given == tf.float16 else tf.float32}


def test_the_eight_gpu_cross_adds_where_tensorpack_did(graph):
    # tensorpack 0.11: variable n is led by n % 8; the total is made in the other ring.
    grads = towers(CPUS, [(3,)] * 10)
    hierarchical(EIGHT_GPU_CROSS, devices=CPUS)(grads)
    sums = devices_of(ops(graph, "AddN"))
    near, far = sums[: 2 * 10], sums[2 * 10 :]
    for n in range(10):
        lead, across = n % 8, (n % 8 + 4) % 8
        assert near[2 * n : 2 * n + 2] == [cpu(lead), cpu(across)]
        assert far[n] == cpu(across)


@pytest.mark.parametrize("devices", [None, CPUS[:5]])
def test_a_hierarchy_leaves_each_tower_a_copy_on_its_device(graph, devices):
    results = hierarchical([[0, 3, 1], [2, 4]], devices=devices)(towers(CPUS[:5]))
    for k, row in enumerate(results):
        assert {canonical_device(tensor.device) for tensor in row} == {cpu(k)}


def test_in_a_hierarchy_each_group_is_reached_once(graph):
    groups = [[0, 1, 2, 3], [4, 5, 6, 7]]
    hierarchical(groups, devices=CPUS)(towers(CPUS, [(3,)]))
    group_of = {cpu(k): g for g, group in enumerate(groups) for k in group}
    between = [
        tensor
        for tensor, here, there in crossing(graph)
        if tensor.dtype.is_floating and group_of[here] != group_of[there]
    ]
    assert len(between) == 2  # a group's sum goes over, the total comes back


def test_naive_deals_the_devices_out_from_the_last_gradient(graph):
    grads = towers(CPUS[:2], [(3,)] * 5)
    sums = allreduce_grads_naive(grads, devices=list(CPUS[:2]), average=False)
    assert [tensor.device[-1] for tensor in sums] == ["0", "1", "0", "1", "0"]


def test_the_mode_gpu_spreads_sums_over_the_towers_and_cpu_does_not(graph):
    grads = towers(CPUS[2:5], [(30,), (30,), (30,)])
    [first, *_] = reducer_for_mode("gpu", CPUS[2:5])(grads)
    assert [tensor.device[-1] for tensor in first] == ["2", "3", "4"]
    [first, *_] = reducer_for_mode("cpu", CPUS[2:5])(grads)
    assert [tensor.device[-1] for tensor in first] == ["0", "0", "0"]


def test_a_collective_has_an_operation_on_every_device(graph):
    keys = CollectiveKeys(start=100)
    sum_collective(towers(CPUS[:3]), devices=CPUS[:3], keys=keys)
    found = ops(graph, "CollectiveReduce")
    assert devices_of(found) == [cpu(0), cpu(1), cpu(2)] * 2
    assert {op.get_attr("group_key") for op in found} == {100}
    assert [op.get_attr("instance_key") for op in found] == [101] * 3 + [102] * 3
    assert not ops(graph, "AddN")
    assert {op.get_attr("communication_hint") for op in found} == {b"auto"}


def trace_collectives(monkeypatch, kinds, *, has_nccl=True):
    """The collectives of a function on GPUs that are said to be there."""
    info = {"is_cuda_build": has_nccl}
    monkeypatch.setattr(tf.sysconfig, "get_build_info", lambda: info)
    monkeypatch.setattr(tf.config, "get_visible_devices", lambda kind: GPUS[:2])
    monkeypatch.setattr(collectives, "check_devices", lambda *_, **__: None)
    keys = CollectiveKeys(start=50)

    @tf.function
    def add():
        grads = []
        for gpu in GPUS[:2]:
            with tf.device(gpu):
                grads.append([tf.zeros([n + 2], kind) for n, kind in enumerate(kinds)])
        return sum_collective(grads, devices=GPUS[:2], keys=keys)

    found = ops(add.get_concrete_function().graph, "CollectiveReduce")
    names = ("communication_hint", "instance_key", "wait_for")
    return [tuple(map(op.get_attr, names)) for op in found]


def test_collectives_on_gpus_ask_for_nccl_in_one_order(monkeypatch):
    kinds = [tf.float32, tf.bfloat16, tf.float16, tf.int32]
    assert trace_collectives(monkeypatch, kinds) == [
        *[(b"nccl", 51, [])] * 2,
        *[(b"auto", 52, [])] * 2,  # NCCL has no sums of bfloat16.
        *[(b"nccl", 53, [51])] * 2,
        *[(b"nccl", 54, [53])] * 2,
    ]


def test_collectives_ask_for_nccl_only_where_tensorflow_has_it(monkeypatch):
    found = trace_collectives(monkeypatch, [tf.float32] * 2, has_nccl=False)
    assert found == [*[(b"auto", 51, [])] * 2, *[(b"auto", 52, [])] * 2]


def test_nccl_has_an_operation_on_every_gpu_and_a_name_a_reduction(graph):
    keys = CollectiveKeys(start=7)
    grads = towers(GPUS[:4])
    results = sum_nccl(grads, devices=GPUS[:4], keys=keys)
    found = ops(graph, "NcclAllReduce")
    homes = [canonical_device(gpu) for gpu in GPUS[:4]]
    assert devices_of(found) == homes * 2
    assert {op.get_attr("num_devices") for op in found} == {4}
    assert {op.get_attr("reduction") for op in found} == {b"sum"}
    names = [op.get_attr("shared_name") for op in found]
    assert names == [b"tw_reduce_7"] * 4 + [b"tw_reduce_8"] * 4
    for tower, row in zip(grads, results, strict=True):
        assert [tensor.op.inputs[0].op.inputs[0] for tensor in row] == tower


def test_auto_packs_for_nccl_and_adds_elsewhere_what_nccl_cannot(graph):
    rows = []
    for gpu in GPUS[:2]:
        with tf.device(gpu):
            halves = tf.compat.v1.placeholder(tf.bfloat16, [5])
            # On GPUs packs hold tensors that are larger than elsewhere.
            small = [tf.compat.v1.placeholder(tf.float32, [n]) for n in (3, 65_535)]
            rows.append(
                [halves, *small, tf.IndexedSlices(tf.ones([2, 2]), tf.constant([0, 1]))]
            )
    auto(GPUS[:2])(rows)
    assert len(ops(graph, "NcclAllReduce")) == 2
    assert [op.inputs[0].dtype for op in ops(graph, "AddN")] == [tf.bfloat16]


def test_the_hidden_shape_comes_from_the_cpu_of_the_same_task(graph):
    device = "/job:worker/task:3/gpu:1"
    sum_on_device(towers([device] * 2), device=device)
    task = canonical_device("/job:worker/task:3/cpu:0")
    assert devices_of(ops(graph, "Unique")) == [task]
    assert devices_of(ops(graph, "AddN")) == [canonical_device(device)] * 2


def test_broadcast_copies_each_result_to_its_towers_device_once(graph):
    devices = [CPUS[0], CPUS[1], CPUS[1], CPUS[2]]
    on_first = partial(sum_on_device, device=CPUS[0])
    results = broadcast(on_first)(towers(devices))
    for tower, device in zip(results, devices, strict=True):
        assert devices_of(tower) == [canonical_device(device)] * 2
    assert list(map(id, results[1])) == list(map(id, results[2]))


def in_partition(devices):
    own = {
        "small": packed(partial(sum_balanced, devices=devices)),
        "large": auto(devices),
    }
    return partition(lambda info: "large" if info.shape[0] > 9_000 else "small", own)


@pytest.mark.parametrize("weighs", [False, True], ids=["plain", "weighted"])
@pytest.mark.parametrize("num_towers", [2, 4])
@pytest.mark.parametrize("make", [all_reduce, auto, in_partition])
def test_a_mean_multiplies_a_pack_as_one(make, num_towers, weighs, graph):
    weights = [3] * (num_towers - 1) + [5] if weighs else None
    shapes = [(own,) for own in range(1, 9)] + [(10_000,)]
    made = towers(CPUS[:num_towers], shapes)
    mean(make(list(CPUS[:num_towers])), weights=weights)(made)
    assert len(ops(graph, "Mul")) == 2  # the pack, and the one that is large
    assert len(ops(graph, "MulNoNan")) == (2 * num_towers if weighs else 0)


@pytest.mark.parametrize("run", [run_in_graph, run_in_function])
@pytest.mark.parametrize("make", [all_reduce, auto, in_partition])
def test_a_pack_that_is_multiplied_as_one_has_the_bits_of_its_gradients(run, make):
    random = np.random.default_rng(0)
    shapes = [(own,) for own in range(1, 9)] + [(10_000,)]
    given = [[random.normal(size=s).astype(np.float32) for s in shapes] for _ in "abc"]
    reduce = make(list(CPUS[:3]))
    sums, means = run(lambda grads: (reduce(grads), mean(reduce)(grads)), given)
    for got, own in zip(means, sums, strict=True):
        for value, total in zip(got, own, strict=True):
            np.testing.assert_array_equal(value, total * np.float32(1 / 3))


OF_TF_CONFIG = {
    "all_reduce": lambda devices: all_reduce(devices),
    "auto": lambda devices: auto(devices),
    "hierarchical": lambda devices: hierarchical([[0], [1]], devices=devices),
    "sum_balanced": lambda devices: partial(sum_balanced, devices=devices),
    "sum_collective": lambda devices: partial(
        sum_collective, devices=devices, keys=CollectiveKeys()
    ),
    "sum_on_device": lambda devices: partial(sum_on_device, device=devices[1]),
    "sum_round_robin": lambda devices: partial(sum_round_robin, devices=devices),
    "reducer_for_mode": lambda devices: reducer_for_mode("gpu", devices),
    "allreduce_grads_naive": lambda devices: partial(
        allreduce_grads_naive, devices=devices, average=False
    ),
}


@pytest.mark.parametrize("name", OF_TF_CONFIG)
def test_logical_devices_of_tf_config_are_taken_for_their_names(name):
    reduce = OF_TF_CONFIG[name](tf.config.list_logical_devices("CPU")[:2])
    sums = run_in_function(lambda: reduce([[tf.ones([3])], [tf.fill([3], 2.0)]]))
    np.testing.assert_array_equal(tf.nest.flatten(sums)[0], [3.0] * 3)
