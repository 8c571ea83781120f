"""What a function with ``jit_compile=True`` can have, and how the rest is refused."""

from functools import partial

import numpy as np
import pytest
import tensorflow as tf

from tw_core.testing import CPUS, SparseRows, run_in_function
from tw_reduce import (
    accumulate_as,
    auto,
    broadcast,
    compress,
    hierarchical,
    mean,
    packed,
    partition,
    sum_balanced,
    sum_collective,
    sum_nccl,
    sum_on_device,
    sum_round_robin,
)
from tw_reduce.reducers import CollectiveKeys
from tw_reduce.tensorpack import (
    GradientPacker,
    aggregate_grads_colocate,
    allreduce_grads_naive,
)

KEYS = CollectiveKeys()
BALANCED = partial(sum_balanced, devices=CPUS[:2])
REDUCERS = {
    "on one device": partial(sum_on_device, device=CPUS[0]),
    "round robin": partial(sum_round_robin, devices=CPUS[:2]),
    "balanced": BALANCED,
    "hierarchical": hierarchical([[0], [1]], devices=CPUS[:2]),
    "packed": packed(BALANCED),
    "packed broadcast": packed(broadcast(BALANCED)),
    "compress": compress(BALANCED, tf.bfloat16),
    "accumulate as": accumulate_as(BALANCED, tf.float64),
    "partition": partition(
        lambda info: info.dtype, {"float32": BALANCED, "float16": BALANCED}
    ),
    "auto": auto(CPUS[:2]),
    "naive": lambda grads: 2 * [allreduce_grads_naive(grads, CPUS[:2], average=False)],
}
each_reducer = pytest.mark.parametrize("name", REDUCERS)


def compiled(fn):
    return tf.function(fn, jit_compile=True, autograph=False)


def on_devices(devices, fn, grads):
    placed = []
    for device, tower in zip(devices, grads, strict=True):
        with tf.device(device):
            placed.append(
                [
                    tf.nest.map_structure(tf.identity, grad, expand_composites=True)
                    for grad in tower
                ]
            )
    return fn(placed)


def towers():
    random = np.random.default_rng(5)

    def rows(k):
        values = random.standard_normal((3, 2)).astype(np.float32)
        return SparseRows(values, np.array([4, k, 4]), np.array([6, 2]))

    return [
        [
            random.standard_normal((2, 3)).astype(np.float32),
            random.standard_normal((70, 70)).astype(np.float32),
            random.standard_normal(3).astype(np.float16),
            rows(k),
            rows(k) if k else random.standard_normal((6, 2)).astype(np.float32),
        ]
        for k in range(2)
    ]


@pytest.mark.parametrize(
    ("where", "devices"),
    [("/cpu:0", ["", ""]), ("/cpu:3", CPUS[:2])],
    ids=["towers nowhere", "towers on two devices"],
)
@pytest.mark.parametrize("change", [lambda reducer: reducer, mean], ids=["sum", "mean"])
@each_reducer
@pytest.mark.each_choice
def test_a_compiled_reducer_gives_the_plain_ones_results(where, devices, change, name):
    fn = partial(on_devices, devices, change(REDUCERS[name]))
    grads = towers()
    want = run_in_function(fn, grads)
    with tf.device(where):
        got = run_in_function(compiled(fn), grads)
    for row, wanted in zip(got, want, strict=True):
        for value, expected in zip(row, wanted, strict=True):
            assert type(value) is type(expected)
            for one, other in zip(
                tf.nest.flatten(value), tf.nest.flatten(expected), strict=True
            ):
                assert one.dtype == other.dtype
                # XLA multiplies and rounds in its own order where it fuses.
                np.testing.assert_allclose(one, other, rtol=2e-6, atol=1e-6)


@each_reducer
def test_a_reducer_is_traced_again_for_a_plain_function(name):
    reduce = tf.function(REDUCERS[name], autograph=False)
    grads = [[tf.ones([3]), tf.ones([5_000])] for _ in range(2)]
    plain = reduce(grads)
    within = compiled(lambda grads: reduce(grads))(grads)
    again = reduce(grads)
    for one, two, three in zip(plain, within, again, strict=True):
        for values in zip(one, two, three, strict=True):
            for value in values:
                np.testing.assert_array_equal(value, np.full(value.shape, 2))


def test_steps_of_a_whole_training_compile():
    variables = [tf.Variable(tf.ones([4, 3])), tf.Variable(tf.zeros([3]))]

    def grads_of(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((x @ variables[0] + variables[1]) ** 2)
        return tape.gradient(loss, variables)

    def step(x):
        grads = list(map(grads_of, tf.split(x, 2)))
        for variable, grad in zip(
            variables, mean(packed(BALANCED))(grads)[0], strict=True
        ):
            variable.assign_sub(0.1 * grad)
        pairs = [list(zip(tower, variables, strict=True)) for tower in grads]
        return [grad for grad, _ in aggregate_grads_colocate(pairs)]

    x = np.arange(16, dtype=np.float32).reshape(4, 4) / 16
    want = run_in_function(grads_of, x)
    got = run_in_function(compiled(step), x)
    for value, wanted in zip(got, want, strict=True):
        np.testing.assert_allclose(value, wanted, rtol=2e-6)
    np.testing.assert_allclose(variables[1], -0.1 * want[1], rtol=2e-6)


def test_the_packer_compiles():
    def there_and_back(grads):
        packer = GradientPacker(2)
        assert packer.compute_strategy(grads)
        return packer.unpack(packer.pack(grads))

    grads = [np.arange(5_000, dtype=np.float32), np.ones((2, 3), np.float32)]
    for value, wanted in zip(
        run_in_function(compiled(there_and_back), grads), grads, strict=True
    ):
        np.testing.assert_array_equal(value, wanted)


def test_shapes_that_differ_are_refused_when_xla_compiles():
    @tf.function(
        jit_compile=True, autograph=False, input_signature=[tf.TensorSpec(None)] * 2
    )
    def step(first, second):
        known = [tf.zeros([2, 3]), tf.zeros([4])]
        return packed(BALANCED)([known, [first, second]])[0][0] + 0

    assert step(tf.ones([2, 3]), tf.ones([4])).shape == (2, 3)
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"\[3,2\].*\[2,3\]"):
        step(tf.ones([3, 2]), tf.ones([4]))


@pytest.mark.parametrize(
    "reducer",
    [
        partial(sum_collective, devices=CPUS[:2], keys=KEYS),
        partial(sum_nccl, devices=["/gpu:0", "/gpu:1"], keys=KEYS),
        packed(partial(sum_collective, devices=CPUS[:2], keys=KEYS)),
    ],
)
def test_what_joins_devices_is_refused_with_what_to_do(reducer):
    wanted = (
        r"called in a function with jit_compile=True.*Leave jit_compile out of the "
        r"function that reduces.*or use sum_balanced"
    )
    with pytest.raises(RuntimeError, match=wanted):
        compiled(reducer)([[tf.ones([3])], [tf.ones([3])]])
