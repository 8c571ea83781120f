"""What a function with ``jit_compile=True`` can have, and how the rest is refused."""

from functools import partial

import numpy as np
import pytest
import tensorflow as tf
from reduce_given import KEYS, REDUCERS, balanced, on_towers

from tw_core.testing import CPUS, SparseRows, run_in_function
from tw_reduce import mean, packed, sum_collective, sum_nccl
from tw_reduce.tensorpack import aggregate_grads_colocate, allreduce_grads_naive

BALANCED = balanced(2)
KINDS = {name: make(2) for name, make in REDUCERS.items() if "collective" not in name}
KINDS["naive"] = lambda grads: (
    2 * [allreduce_grads_naive(grads, CPUS[:2], average=False)]
)


def compiled(fn):
    return tf.function(fn, jit_compile=True, autograph=False)


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
    ("where", "place"),
    [("/cpu:0", lambda fn, grads: fn(grads)), ("/cpu:3", on_towers)],
    ids=["towers nowhere", "towers on two devices"],
)
@pytest.mark.parametrize("change", [lambda reducer: reducer, mean], ids=["sum", "mean"])
@pytest.mark.parametrize("name", KINDS)
def test_a_compiled_reducer_gives_the_plain_ones_results(where, place, change, name):
    fn = partial(place, change(KINDS[name]))
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


@pytest.mark.parametrize("name", ["balanced", "packed broadcast", "auto"])
def test_a_reducer_is_traced_again_for_a_plain_function(name):
    reduce = tf.function(KINDS[name], autograph=False)
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
    ],
)
def test_what_joins_devices_is_refused_with_what_to_do(reducer):
    wanted = (
        r"called in a function with jit_compile=True.*Leave jit_compile out of the "
        r"function that reduces.*or use sum_balanced"
    )
    with pytest.raises(RuntimeError, match=wanted):
        compiled(reducer)([[tf.ones([3])], [tf.ones([3])]])
