"""What is refused and how it is said, where no other test reads the message."""

from functools import partial

import pytest
import tensorflow as tf

from tw_core.testing import CPUS
from tw_reduce import (
    accumulate_as,
    auto,
    hierarchical,
    packed,
    partition,
    sum_balanced,
    sum_nccl,
    sum_on_device,
)
from tw_reduce.reducers import CollectiveKeys
from tw_reduce.tensorpack import GradientPacker, allreduce_grads

KEYS = CollectiveKeys()
ON_FIRST = partial(sum_on_device, device="/cpu:0")


@pytest.fixture(autouse=True)
def graph():
    """A fresh graph, the default one during the test."""
    with tf.Graph().as_default() as graph:
        yield graph


def ones(num_towers, *dtypes):
    return [[tf.ones([2], dtype) for dtype in dtypes] for _ in range(num_towers)]


def refused(message, error=ValueError):
    return pytest.raises(error, match=message)


def test_groups_name_what_is_missing_twice_unknown_and_empty():
    with refused(r"each of the 4 towers.*missing \[3\], twice \[1\], unknown \[7\]"):
        hierarchical([[0, 1], [1, 2], [7]], devices=CPUS[:4])
    with refused(r"twice \[1\].*Write e\.g\. \[\[0, 1\], \[2, 3\]\]"):
        hierarchical([[0, 1], [1]])
    with refused(r"empty groups \[1\]"):
        hierarchical([[0], []])
    with refused(r"each of the 0 towers"):
        hierarchical([])
    with refused(r"each of the 3 towers \(by the gradient lists\).*missing \[2\]"):
        hierarchical([[0, 1]])(ones(3, tf.float32))


def test_nccl_names_dtypes_it_cannot_add():
    gpus = [f"/job:worker/task:0/gpu:{k}" for k in range(2)]
    grads = ones(2, tf.bfloat16, tf.float32, tf.int8)
    with refused(r"others at positions 0 \(bfloat16\), 2 \(int8\)\. Wrap it in acc"):
        sum_nccl(grads, devices=gpus, keys=KEYS)


def test_nccl_names_devices_that_are_no_gpus():
    with refused(r"between GPUs only; got \['/cpu:0'\]\. On other devices use sum_bal"):
        sum_nccl(ones(2, tf.float32), devices=["/gpu:0", "/cpu:0"], keys=KEYS)


def test_nccl_needs_one_gpu_per_tower():
    gpu = "/job:worker/task:0/gpu:0"
    with refused("one device per tower; got 1 for 2 towers"):
        sum_nccl(ones(2, tf.float32), devices=[gpu], keys=KEYS)
    with refused("a device of its own"):
        sum_nccl(ones(2, tf.float32), devices=[gpu, gpu], keys=KEYS)


@pytest.mark.parametrize("devices", ["/cpu:0", [0, 1]])
def test_devices_must_be_a_list_of_strings(devices):
    with refused("devices must be a list of device strings", TypeError):
        sum_balanced(ones(2, tf.float32), devices=devices)
    with refused("devices must be a list of device strings", TypeError):
        auto(devices)


def test_a_session_tells_which_devices_it_lacks():
    config = tf.compat.v1.ConfigProto(device_count={"CPU": 2})
    with (
        tf.compat.v1.Session(config=config),
        refused(r"Unknown devices \['/cpu:5'\]"),
    ):
        sum_on_device(ones(2, tf.float32), device="/cpu:5")


def test_auto_needs_as_many_towers_as_devices():
    with refused("devices must hold one device per tower; got 2 for 3 towers"):
        auto(CPUS[:2])(ones(3, tf.float32))


def test_thresholds_below_zero_are_refused_at_once():
    with refused("below_bytes must be at least 0; got -1"):
        packed(ON_FIRST, below_bytes=-1)
    with refused("below_bytes must be at least 0; got -5"):
        auto(CPUS[:2], below_bytes=-5)


@pytest.mark.parametrize(
    "wrap",
    [
        partial(accumulate_as, dtype=tf.float64),
        lambda reducer: partition(lambda _: "a", {"a": reducer}),
    ],
)
@pytest.mark.parametrize(
    ("result", "came"), [(None, "NoneType"), ([[], []], r"lists of lengths \[0, 0\]")]
)
def test_a_reducer_that_returns_something_else_is_named(wrap, result, came):
    with refused(rf"of lengths \[1, 1\]; got {came}\. A reducer is \[K\]\[N\]"):
        wrap(lambda grads: result)(ones(2, tf.float32))


def test_accumulate_as_takes_floating_dtypes_only():
    with refused("dtype must be floating; got int32"):
        accumulate_as(ON_FIRST, tf.int32)


def test_a_route_names_the_reducers_there_are():
    reducer = partition(lambda info: f"r{info.index}", {"r0": ON_FIRST})
    with refused(r"one of \['r0'\].*at 1 \('r1'\), 2 \('r2'\)\. Add a reducer"):
        reducer(ones(2, *[tf.float32] * 3))


def test_allreduce_grads_needs_a_towers_gradients_on_one_device():
    rows = []
    for k in range(2):
        with tf.device(CPUS[k]):
            first = tf.ones([2])
        with tf.device(CPUS[3]):
            rows.append([first, tf.ones([2])])
    with refused("all gradients of a tower must lie on its device; got .*CPU:3"):
        allreduce_grads(rows, False, "collective")


def test_the_packer_counts_pieces_and_devices():
    packer = GradientPacker(2)
    grads = [tf.ones([4000])]
    assert packer.compute_strategy(grads)
    with refused("tensors must be pieces as pack gives them; there are 1 ins"):
        packer.unpack([tf.ones([4000])])
    with refused("One device per tower is needed; got 2 devices for 1"):
        packer.pack_all([grads], CPUS[:2])
    with refused("One device per tower"):
        packer.unpack_all([packer.pack(grads)], CPUS[:2])
    with refused(r"saw; 0 is float32 \(3,\) instead of float32 \(4000,\)"):
        packer.pack([tf.ones([3])])


def test_the_packer_leaves_sparse_gradients_and_says_so(caplog):
    rows = tf.IndexedSlices(tf.ones([2000, 2]), tf.range(2000), tf.constant([5000, 2]))
    with caplog.at_level("WARNING", "tw_reduce"):
        assert GradientPacker(1).compute_strategy([tf.ones([4000]), rows]) is False
    assert "sparse or of unknown shape: [1]" in caplog.text


def test_the_packer_refuses_none():
    with refused(r"(?s)^Every tower must .*position 1 has gradient None in"):
        GradientPacker(1).compute_strategy([tf.ones([4000]), None])
