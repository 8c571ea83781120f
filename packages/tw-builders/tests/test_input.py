"""Each tower gets its part of every batch, on its device, in both modes."""

import gc
import threading
import time
from contextlib import contextmanager

import numpy as np
import pytest
import tensorflow as tf

from tw_builders import per_tower
from tw_builders.tensorpack import StagingInput
from tw_core import towers
from tw_core.testing import CPUS

v1 = tf.compat.v1
NUMBERS = [tf.float32, tf.float16, tf.bfloat16, tf.int32, tf.int64, tf.bool]
DEADLINE_S = 30


def ours(count):
    return towers(CPUS[1 : count + 1])


def plain(parts):
    """Nests of arrays and lists, for what parts hold."""

    def leaf(value):
        if isinstance(value, tf.SparseTensor):
            return tf.sparse.to_dense(value).numpy().tolist()
        if isinstance(value, tf.RaggedTensor):
            return value.to_list()
        return value if value is None else np.asarray(value).tolist()

    return tf.nest.map_structure(leaf, parts)


def flat_tensors(parts):
    flat = tf.nest.flatten(parts, expand_composites=True)
    return [tensor for tensor in flat if tensor is not None]


def nested(found, make, count):
    """Nests arrays again that were read as flat lists."""
    spec = per_tower(make(), ours(count)).element_spec
    return [
        plain(
            tf.nest.pack_sequence_as(
                spec, list(map(tf.constant, flat)), expand_composites=True
            )
        )
        for flat in found
    ]


def read_in_loop(make, count):
    return [plain(parts) for parts in per_tower(make(), ours(count))]


def read_in_function(make, count):
    """Keeps each part of each item in a table of its own, from a loop in a function."""
    found = []

    def keep(step, *flat):
        del step
        found.append([value.numpy() for value in flat])
        return np.int64(0)

    data = per_tower(make(), ours(count))

    @tf.function
    def loop():
        number = tf.constant(0)
        for parts in data:
            tf.py_function(keep, [number, *flat_tensors(parts)], tf.int64)
            number += 1
        return number

    assert int(loop()) == len(found)
    return nested(found, make, count)


def steps(sess, staging, fetches):
    """Yields what each step of an epoch fetches."""
    sess.run(staging.initializer)
    while True:
        try:
            yield sess.run([fetches, staging.stage])[0]
        except tf.errors.OutOfRangeError:
            return


@contextmanager
def graph_session():
    with tf.Graph().as_default(), v1.Session() as sess:
        yield sess


def read_in_session(make, count):
    with graph_session() as sess:
        staging = StagingInput(make(), ours(count))
        found = list(steps(sess, staging, flat_tensors(staging.parts)))
    return nested(found, make, count)


def read_in_session_of_version_1(make, count):
    """With a Dimension for each axis, as ``disable_v2_behavior`` makes shapes."""
    v1.disable_v2_tensorshape()
    try:
        return read_in_session(make, count)
    finally:
        v1.enable_v2_tensorshape()


READERS = [read_in_loop, read_in_function, read_in_session]
READERS += [read_in_session_of_version_1]
each_reader = pytest.mark.parametrize("read", READERS)


@each_reader
@pytest.mark.parametrize("count", [1, 2, 3, 4])
@pytest.mark.parametrize("rows, batch", [(24, 8), (10, 4), (5, 5), (1, 1), (0, 4)])
def test_parts_are_numpys_array_split(read, count, rows, batch):
    x = np.arange(rows * 3).reshape(rows, 3)

    def make():
        return tf.data.Dataset.from_tensor_slices((x, -x[:, 0])).batch(batch)

    want = [
        [
            (part.tolist(), (-part[:, 0]).tolist())
            for part in np.array_split(x[start : start + batch], count)
        ]
        for start in range(0, rows, batch)
    ]
    assert read(make, count) == want


def test_staging_needs_no_thread_for_each_tower():
    read = []

    def run():
        config = v1.ConfigProto(
            inter_op_parallelism_threads=2,
            use_per_session_threads=True,
            device_count={"CPU": len(CPUS)},
        )
        x = np.arange(2_000.0)
        with tf.Graph().as_default(), v1.Session(config=config) as sess:
            dataset = tf.data.Dataset.from_tensor_slices(x).batch(4)
            staging = StagingInput(dataset, ours(4))
            for parts in steps(sess, staging, staging.parts):
                read.extend(np.concatenate(parts))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(timeout=120)
    assert not thread.is_alive(), f"hung after {len(read)} rows"
    np.testing.assert_array_equal(read, np.arange(2_000.0))


@each_reader
def test_every_dtype_arrives(read):
    x = np.arange(5) % 2

    def make():
        columns = *(tf.cast(x, dtype) for dtype in NUMBERS), tf.as_string(x)
        return tf.data.Dataset.from_tensor_slices(columns).batch(5, drop_remainder=True)

    (parts,) = read(make, 2)
    for (*numbers, texts), own in zip(parts, (x[:3], x[3:]), strict=True):
        assert numbers == [list(own)] * len(NUMBERS)
        assert texts == [str(number).encode() for number in own]


def composite_batches():
    """Batches of 4, 4 and 2 rows with a ragged and a sparse tensor, and a None."""

    def batch(x):
        lengths = tf.cast(x % 3, tf.int32)
        dense = tf.stack([x, tf.zeros_like(x)], axis=1)
        return {
            "ragged": tf.ragged.range(lengths),
            "both": (tf.sparse.from_dense(dense), None),
        }

    return tf.data.Dataset.range(10).batch(4).map(batch)


def composite_parts(count):
    return [
        [
            {
                "ragged": [list(range(x % 3)) for x in part],
                "both": ([[x, 0] for x in part], None),
            }
            for part in np.array_split(np.arange(10)[start : start + 4], count)
        ]
        for start in (0, 4, 8)
    ]


@each_reader
@pytest.mark.parametrize("count", [1, 3])
def test_ragged_and_sparse_tensors_are_cut_and_none_stays(read, count):
    assert read(composite_batches, count) == composite_parts(count)


def test_a_part_is_on_its_towers_device_and_of_a_known_shape():
    def make():
        data = tf.data.Dataset.from_tensor_slices((np.ones([4, 2]), ["a"] * 4))
        return data.batch(4, drop_remainder=True)

    data = per_tower(make(), ours(3))
    assert [spec[1].shape for spec in data.element_spec] == [2, 1, 1]
    (parts,) = data
    with tf.Graph().as_default():
        staged = StagingInput(make(), ours(3)).parts
    assert [part[1].shape for part in staged] == [2, 1, 1]
    for k, (eager, graph) in enumerate(zip(parts, staged, strict=True)):
        for tensor in (*tf.nest.flatten(eager), *tf.nest.flatten(graph)):
            assert tensor.device.endswith(f"CPU:{k + 1}")


def total(state, parts):
    return state + sum(tf.reduce_sum(part) for part in parts)


def test_reduce_passes_a_state_from_item_to_item():
    def total_or_more(state, parts):
        state = total(state, parts)
        if state > 106:  # a tensor, which only AutoGraph can branch on
            state += 1000
        return state

    data = per_tower(tf.data.Dataset.range(10).batch(4), ours(3))
    start = tf.constant(100, tf.int64)
    traced = tf.function(lambda: data.reduce(start, total), autograph=False)
    assert [int(traced()), int(traced()), int(data.reduce(start, total))] == [145] * 3
    assert int(tf.function(lambda: data.reduce(start, total_or_more))()) == 2145


def test_a_dataset_made_in_a_function_is_read_there():
    @tf.function
    def loop(start):
        result = tf.constant(0, tf.int64)
        for parts in per_tower(tf.data.Dataset.range(start, 10).batch(4), ours(3)):
            result += tf.reduce_sum(parts[0]) - tf.reduce_sum(parts[2])
        return result

    def want(start):
        batches = [np.arange(start, 10)[i : i + 4] for i in range(0, 10 - start, 4)]
        parts = [np.array_split(batch, 3) for batch in batches]
        return sum(part[0].sum() - part[2].sum() for part in parts)

    for start in (0, 3, 10):
        assert int(loop(tf.constant(start, tf.int64))) == want(start)


def test_every_loop_and_every_initializer_begins_anew():
    dataset = tf.data.Dataset.range(4).batch(3)
    data, want = per_tower(dataset, ours(2)), [[[0, 1], [2]], [[3], []]]
    assert [plain(parts) for parts in data] == want
    first, second = iter(data), iter(data)  # apart from each other
    assert plain(next(first)) == plain(next(second)) == want[0]
    assert [plain(parts) for parts in first] == want[1:]
    assert next(first, None) is None
    with graph_session() as sess:
        staging = StagingInput(tf.data.Dataset.range(4).batch(3), ours(2))
        for _ in range(2):
            found = [plain(parts) for parts in steps(sess, staging, staging.parts)]
            assert found == want
            with pytest.raises(tf.errors.OutOfRangeError):  # and stays at the end
                sess.run([staging.parts, staging.stage])
        next(steps(sess, staging, staging.parts))
        assert len(list(steps(sess, staging, staging.parts))) == 2


class Counted:
    """A dataset of batches that counts how many were read."""

    def __init__(self, fails_at=None, limit=10_000):
        self.read = 0
        self.fails_at, self.limit = fails_at, limit

    def _rows(self):
        for n in range(self.limit):
            if n == self.fails_at:
                raise ValueError("the disk is gone")
            self.read += 1
            yield np.full([4], n)

    def dataset(self):
        spec = tf.TensorSpec([None], tf.int64)
        return tf.data.Dataset.from_generator(self._rows, output_signature=spec)

    def settled(self, count):
        """Waits until ``count`` are read, and a little for more to be read."""
        end = time.monotonic() + DEADLINE_S
        while self.read < count and time.monotonic() < end:
            time.sleep(0.01)
        time.sleep(0.1)
        return self.read


@pytest.mark.parametrize("prefetch", [1, 5])
def test_prefetch_bounds_what_is_read_ahead(prefetch):
    source = Counted()
    items = iter(per_tower(source.dataset(), ours(2), prefetch=prefetch))
    assert source.read == 0
    for used in range(1, 4):
        next(items)
        assert source.settled(used + prefetch + 1) == used + prefetch + 1
    del items
    gc.collect()
    now = source.read
    assert source.settled(now) == now  # an abandoned loop reads no more


@pytest.mark.parametrize("nr_stage", [1, 3])
def test_nr_stage_bounds_what_is_read_ahead(nr_stage):
    source = Counted()
    with graph_session() as sess:
        staging = StagingInput(source.dataset(), ours(2), nr_stage=nr_stage)
        epoch = steps(sess, staging, staging.parts)
        for used in range(1, 4):
            assert plain(next(epoch)) == [[used - 1] * 2] * 2
            # Each of the two maps behind the areas reads one ahead.
            assert source.settled(used + nr_stage) <= used + nr_stage + 2


def worse():
    """Fails at its third batch."""
    return Counted(fails_at=2).dataset()


def test_an_error_of_the_dataset_arrives_after_the_batches_before_it_and_ends_it():
    items = iter(per_tower(worse(), ours(2)))
    assert [plain(next(items)) for _ in range(2)] == [[[0] * 2] * 2, [[1] * 2] * 2]
    with pytest.raises(tf.errors.InvalidArgumentError, match="the disk is gone"):
        next(items)
    assert next(items, None) is None
    data, start = per_tower(worse(), ours(2)), tf.constant(0, tf.int64)
    with pytest.raises(tf.errors.InvalidArgumentError, match="the disk is gone"):
        tf.function(lambda: data.reduce(start, total))()
    with graph_session() as sess:
        staging = StagingInput(worse(), ours(2))
        epoch = steps(sess, staging, staging.parts)
        assert plain(next(epoch)) == [[0] * 2] * 2
        with pytest.raises(tf.errors.InvalidArgumentError, match="the disk is gone"):
            next(epoch)
        with pytest.raises(tf.errors.InvalidArgumentError, match="after a step that"):
            sess.run([staging.parts, staging.stage])


def test_unlike_numbers_of_rows_are_refused_while_reading():
    spec = (tf.TensorSpec([None], tf.int32), tf.TensorSpec([None], tf.int32))
    source = tf.data.Dataset.from_generator(
        lambda: iter([([1, 2], [3, 4]), ([1, 2], [3])]), output_signature=spec
    )
    items = iter(per_tower(source, ours(2)))
    next(items)
    with pytest.raises(tf.errors.InvalidArgumentError, match="same number of rows"):
        next(items)


def test_a_step_before_the_initializer_or_without_stage_is_refused():
    with graph_session() as sess:
        staging = StagingInput(tf.data.Dataset.range(12).batch(4), ours(2))
        with pytest.raises(tf.errors.InvalidArgumentError, match="`initializer` first"):
            sess.run(staging.parts)
        sess.run(staging.initializer)
        sess.run(staging.parts)
        for _ in range(2):
            with pytest.raises(tf.errors.InvalidArgumentError, match="with every step"):
                sess.run([staging.parts, staging.stage])
        sess.run(staging.initializer)
        assert plain(sess.run(staging.parts)) == [[0, 1], [2, 3]]


def test_two_inputs_advance_apart_from_each_other_and_whole():
    with graph_session() as sess:
        one, other = [
            StagingInput(tf.data.Dataset.range(12).batch(4), ours(2)) for _ in "ab"
        ]
        sess.run([one.initializer, other.initializer])
        sess.run(one.stage)  # skips a batch
        fetches = [one.parts[1], other.parts, one.stage, other.stage]
        assert plain(sess.run(fetches)[:2]) == [[6, 7], [[0, 1], [2, 3]]]
        found = sess.run([one.parts, other.parts])
        assert plain(found) == [[[8, 9], [10, 11]], [[4, 5], [6, 7]]]


def test_a_monitored_session_initialises_stages_and_ends():
    with tf.Graph().as_default():
        staging = StagingInput(tf.data.Dataset.range(10).batch(4), ours(2))
        train = v1.assign_add(v1.train.get_or_create_global_step(), 1)
        used = tf.add_n([tf.reduce_sum(part) for part in staging.parts])
        with tf.control_dependencies([used]):
            step = tf.group(train)
        found = []
        with v1.train.MonitoredTrainingSession(hooks=[staging.hook()]) as sess:
            while not sess.should_stop():
                sess.run(train)  # uses no part, and so skips none
                found.append(sess.run({"sum": used, "step": step})["sum"])
    assert found == [0 + 1 + 2 + 3, 4 + 5 + 6 + 7, 8 + 9]


@pytest.mark.slow
def test_towers_never_get_parts_of_different_batches_after_a_failed_step():
    good = 0
    with graph_session() as sess:
        staging = StagingInput(tf.data.Dataset.range(4000).batch(4), ours(4))
        wrong = v1.placeholder(tf.bool, [])
        with tf.control_dependencies([staging.parts[0]]):  # others may not have theirs
            fail = tf.debugging.Assert(tf.logical_not(wrong), ["on purpose"])
        sess.run(staging.initializer)
        for turn in range(150):
            fetches = [staging.parts, staging.stage, fail]
            try:
                parts = sess.run(fetches, {wrong: turn % 3 == 0})[0]
            except tf.errors.InvalidArgumentError as error:
                if "on purpose" not in str(error):
                    assert "after a step that failed" in str(error)
                    sess.run(staging.initializer)
                continue
            first = parts[0][0]
            assert plain(parts) == [[first], [first + 1], [first + 2], [first + 3]]
            good += 1
    assert good >= 50


def test_a_loop_in_another_mode_is_refused():
    data = per_tower(tf.data.Dataset.range(4).batch(2), ours(2))
    with tf.Graph().as_default(), pytest.raises(RuntimeError, match="StagingInput"):
        next(iter(data))
    with pytest.raises(RuntimeError, match="call reduce"):
        tf.function(lambda: [parts for parts in data], autograph=False)()
    with pytest.raises(RuntimeError, match="Elsewhere use"):
        StagingInput(tf.data.Dataset.range(4).batch(2), ours(2))
