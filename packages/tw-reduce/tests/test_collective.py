"""Collectives end: in both modes, run after run, at the same time, or at a bound."""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import pytest
import tensorflow as tf

from tw_core.testing import CPUS, run_in_function, run_in_graph
from tw_reduce import sum_collective
from tw_reduce._sums import collectives
from tw_reduce.reducers import CollectiveKeys

WAIT_S = 30.0
both_modes = pytest.mark.parametrize("run", [run_in_graph, run_in_function])


def reducer(num_towers, keys, **options):
    options = {"timeout_s": WAIT_S} | options
    return partial(sum_collective, devices=CPUS[:num_towers], keys=keys, **options)


def ones(num_towers, *sizes):
    return [[np.full(n, k + 1, np.float32) for n in sizes] for k in range(num_towers)]


@both_modes
def test_one_object_serves_other_graphs_shapes_and_numbers_of_towers(run):
    keys = CollectiveKeys()
    for num_towers, sizes in ((2, [3]), (4, range(1, 60)), (8, [3]), (2, [9])):
        got = run(reducer(num_towers, keys), ones(num_towers, *sizes))
        for row in got:
            for size, value in zip(sizes, row, strict=True):
                want = [num_towers * (num_towers + 1) / 2] * size
                np.testing.assert_array_equal(value, want)


THREADS = """if True:
    from concurrent.futures import ThreadPoolExecutor
    from functools import partial
    import numpy as np
    import tensorflow as tf
    from tw_core.testing import CPUS, start_logical_cpus
    from tw_reduce import sum_collective
    from tw_reduce.reducers import CollectiveKeys

    start_logical_cpus()
    KEYS = CollectiveKeys()

    def reduced(x):
        # Sums of two towers: 3x, of three gradients.
        reducer = partial(sum_collective, devices=CPUS[:2], keys=KEYS)
        towers = []
        for k, device in enumerate(CPUS[:2]):
            with tf.device(device):
                towers.append([x * (k + 1.0), x[:3] * (k + 1.0), x[:0]])
        return reducer(towers)

    def check(values, x):
        for row in values:
            for value in row:
                np.testing.assert_array_equal(value, np.full(np.shape(value), 3 * x))

    def session_of(fn):
        with tf.Graph().as_default() as graph:
            fed = tf.compat.v1.placeholder(tf.float32, [50])
            fetched = fn(fed)
            config = tf.compat.v1.ConfigProto(device_count={"CPU": 8})
            session = tf.compat.v1.Session(graph=graph, config=config)
        return lambda x: check(session.run(fetched, {fed: np.full(50, x)}), x)

    def function_of(fn):
        step = tf.function(fn, autograph=False)
        return lambda x: check(step(tf.fill([50], float(x))), x)

    def twice(x):
        inner = tf.function(reduced, autograph=False)
        return [*inner(x), *inner(x)]

    def looped(x):
        body = lambda turn, x, _: (turn + 1, x, reduced(x)[1][0])
        return [[tf.while_loop(lambda turn, *_: turn < 3, body, [0, x, x])[2]]]

    def in_a_branch(x):
        return tf.cond(x[0] > -1, lambda: reduced(x), lambda: reduced(-x))

    STEPS = {
        "one function": [function_of(reduced)] * 3,
        "several functions": [function_of(reduced) for _ in range(3)],
        "one session": [session_of(reduced)] * 3,
        "several sessions": [session_of(reduced) for _ in range(3)],
        "twice in a function": [function_of(twice)] * 3,
        "in a function's branch": [function_of(in_a_branch)] * 3,
        "in a session's branch": [session_of(in_a_branch)] * 3,
        "in a function's loop": [function_of(looped)] * 3,
        "in a session's loop": [session_of(looped)] * 3,
    }
    for name, steps in STEPS.items():
        def work(number):
            for turn in range(20):
                steps[number](number + 1 + turn)
        with ThreadPoolExecutor(3) as pool:
            list(pool.map(work, range(3)))
        print("done:", name, flush=True)
"""


@pytest.mark.slow
def test_threads_may_call_what_reduces_at_the_same_time():
    # In a process of its own: where the towers of two calls meet, all collectives of
    # the process are ended, or wait forever.
    done = subprocess.run(
        [sys.executable, "-c", THREADS], capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert done.stdout.count("done:") == 9


def test_each_reduction_of_each_reducer_takes_its_own_lock():
    with tf.Graph().as_default() as graph:
        for _ in range(3):
            reducer(2, CollectiveKeys())([[tf.ones([3]), tf.ones([2])]] * 2)
        locks = [op for op in graph.get_operations() if op.type == "MutexV2"]
    assert len({op.get_attr("shared_name") for op in locks}) == len(locks) == 3


def test_keys_never_come_twice():
    keys = CollectiveKeys()
    with ThreadPoolExecutor(8) as pool:
        given = list(pool.map(lambda _: keys.instance(), range(2000)))
    group = keys.group(CPUS[:2])
    assert keys.group(["/device:CPU:1", "/cpu:0"]) == group
    given += [group, keys.group(CPUS[:3])]
    assert len(set(given)) == len(given)
    # Objects that do not know of each other keep apart, but for a start that is given.
    starts = [CollectiveKeys().instance() for _ in range(50)]
    assert len(set(starts)) == 50
    assert min(starts) > 1_000_000  # TensorFlow's own count from 1
    assert [CollectiveKeys(start=5).instance() for _ in range(2)] == [5, 5]


@pytest.mark.parametrize("own_bound_s", [0.5, None])
def test_a_tower_that_stays_away_ends_at_the_bound(own_bound_s):
    # One operation alone, behind the reducer's back: its own bound, or the session's.
    with tf.Graph().as_default() as graph:
        fed = tf.compat.v1.placeholder(tf.float32, [3])
        reducer(2, CollectiveKeys(), timeout_s=own_bound_s)([[fed], [fed]])
        ops = [op for op in graph.get_operations() if op.type == "CollectiveReduce"]
        config = tf.compat.v1.ConfigProto(
            device_count={"CPU": len(CPUS)}, operation_timeout_in_ms=1500
        )
        with (
            tf.compat.v1.Session(config=config) as session,
            pytest.raises(tf.errors.DeadlineExceededError) as caught,
        ):
            session.run(ops[0].outputs[0], {fed: np.ones(3)})
    assert ("CollectiveReduce" in str(caught.value)) == (own_bound_s is not None)


@both_modes
@pytest.mark.parametrize("tower", [0, 2])
def test_one_towers_result_brings_all_towers_about(run, tower):
    def fn(grads):
        return reducer(3, CollectiveKeys())(grads)[tower]

    got = run(fn, ones(3, 4, 5))
    assert all(np.all(value == 6) for value in got)


def test_what_could_wait_for_ever_is_refused():
    reduce, towers = reducer(2, CollectiveKeys()), [[tf.ones([2])]] * 2
    with pytest.raises(RuntimeError, match=r"called eagerly.*Call them in a tf\.func"):
        reduce(towers)
    rows = tf.IndexedSlices(tf.ones([2, 3]), tf.constant([0, 1]))
    wanted = "An IndexedSlices must become dense.*no tower's has a dense"
    with pytest.raises(ValueError, match=wanted):
        tf.function(lambda: reduce([[rows], [rows]]), autograph=False)()
    step = tf.function(reduce, autograph=False)
    wanted = (
        r"in a tf\.function that a session graph calls.*Call it in the graph itself"
    )
    with tf.Graph().as_default(), pytest.raises(RuntimeError, match=wanted):
        step([[tf.ones([2])], [tf.ones([2])]])


@pytest.mark.parametrize(
    ("dtype", "sent_as"), [(tf.bfloat16, tf.float32), (tf.int32, tf.int64)]
)
def test_dtypes_that_gpus_do_not_add_are_sent_as_wider_ones(
    monkeypatch, dtype, sent_as
):
    monkeypatch.setattr(collectives, "canonical_device", lambda device: "/device:GPU:0")
    keys = CollectiveKeys()

    @tf.function(autograph=False)
    def step():
        grads = [[tf.cast(tf.range(5) + k, dtype)] for k in range(2)]
        return sum_collective(grads, devices=CPUS[:2], keys=keys)

    for [total] in step():
        assert total.dtype == dtype
        np.testing.assert_array_equal(total, np.arange(1, 11, 2))
    graph = step.get_concrete_function().graph
    sent = [op for op in graph.get_operations() if op.type == "CollectiveReduce"]
    assert [op.get_attr("T") for op in sent] == [sent_as] * 2
