"""What reaches the devices, in both modes: the caller's rows, copied once."""

import tracemalloc

import numpy as np
import pytest
import tensorflow as tf

WIDE = {"x": (np.float32, [5])}


def probe(variables, inputs, *weights):
    """A loss whose scalars tell what the towers see."""
    x = inputs["x"]
    total = tf.reduce_sum(tf.cast(x, tf.float32))
    others = {"sum": total, "rows": tf.shape(x)[0], "first": tf.reshape(x, [-1])[0]}
    return variables["w"] * total, others


def aligned(shape, dtype, *, offset):
    """Makes an array that starts ``offset`` bytes after a multiple of 64."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    memory = np.zeros(size + 128, np.uint8)
    start = -memory.ctypes.data % 64 + offset
    return memory[start : start + size].view(dtype).reshape(shape)


def seen(trainer, name="sum"):
    """Returns [S, K], what the towers saw in each step."""
    result = trainer.run_epochs(1)
    return np.stack([tower[name][0] for tower in result.towers], axis=-1)


def sums_of(rows, devices, step):
    """What they should have seen."""
    per_device = len(rows) // devices
    parts = rows.reshape(devices, per_device // step, -1).sum(-1)
    return parts.T


@pytest.mark.parametrize("offset", [0, 4, 36])
def test_changing_the_callers_array_afterwards_changes_nothing(make_trainer, offset):
    trainer = make_trainer(probe, {"w": np.float32(0)}, WIDE)
    rows = aligned((16, 5), np.float32, offset=offset)
    rows[:] = np.arange(80).reshape(16, 5)
    wanted = sums_of(rows.copy(), 2, 4)
    trainer.load({"x": rows})
    rows[:] = -1
    np.testing.assert_array_equal(seen(trainer), wanted)


@pytest.mark.parametrize(
    ("given", "dtype"),
    [
        *(("float64", "float32"), ("int16", "float32"), ("bool", "float32")),
        *(
            (dtype, dtype)
            for dtype in ("bool", "int8", "uint16", "float16", "bfloat16")
        ),
    ],
)
def test_columns_are_cast_to_their_dtype_and_held_in_it(make_trainer, given, dtype):
    given, dtype = (tf.as_dtype(name).as_numpy_dtype for name in (given, dtype))
    trainer = make_trainer(probe, {"w": np.float32(0)}, {"x": (dtype, [5])})
    rows = (np.arange(80).reshape(16, 5) % 2).astype(given)
    trainer.load([rows])
    np.testing.assert_array_equal(seen(trainer), sums_of(rows.astype("f"), 2, 4))


def test_a_later_load_of_fragments_may_be_of_other_sizes(make_trainer):
    trainer = make_trainer(probe, {"w": np.float32(0)}, {"x": (np.float32, [None])})
    for num_rows, size in ((16, 5), (64, 2), (8, 7), (6, 1)):
        rows = np.arange(num_rows * size, dtype=np.float32).reshape(num_rows, size)
        report = trainer.load([[rows[:3], rows[3:5], rows[5:]]])
        step = min(4, num_rows // 2)
        assert report.rows_per_device_step == step
        wanted = sums_of(rows[: report.rows_loaded], 2, step)
        np.testing.assert_array_equal(seen(trainer), wanted)


def test_rows_of_no_size_can_be_loaded(make_trainer):
    def loss(variables, inputs):
        return variables["w"] * 1.0, {"rows": tf.shape(inputs["x"])[0]}

    trainer = make_trainer(loss, {"w": np.float32(0)}, {"x": (np.float32, [0])})
    trainer.load([np.zeros((16, 0), np.float32)])
    np.testing.assert_array_equal(seen(trainer, "rows"), 4)


@pytest.mark.parametrize("offset", [0, 4])
def test_a_warm_load_takes_a_tenth_of_the_batch_at_most(make_trainer, offset):
    trainer = make_trainer(probe, {"w": np.float32(0)}, {"x": (np.uint8, [1000])})
    rows = aligned((4000, 1000), np.uint8, offset=offset)
    trainer.load([rows])
    tracemalloc.start()
    try:
        trainer.load([rows])
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 0.1 * rows.nbytes


def test_two_buffers_take_two_batches_and_no_more(make_trainer):
    trainer = make_trainer(
        *(probe, {"w": np.float32(0)}, {"x": (np.float32, [64])}), num_buffers=2
    )
    batch = np.ones((2000, 64), np.float32)
    tracemalloc.start()
    try:
        trainer.load([batch])
        for _ in range(4):
            trainer.load_next([batch])
            trainer.use_next()
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    report = trainer.report
    assert report.bytes_resident == 2 * report.bytes_loaded == 2 * batch.nbytes
    assert 1.9 * batch.nbytes < peak < 2.2 * batch.nbytes


def test_an_index_at_which_no_step_starts_is_refused(make_trainer):
    trainer = make_trainer(probe, {"w": np.float32(0)}, WIDE)
    with pytest.raises(RuntimeError, match="nothing has been loaded yet"):
        trainer.optimize(0)
    trainer.load([np.zeros((16, 5), np.float32)])
    for index in (1, -4, 8, 100, np.int64(3)):
        with pytest.raises(IndexError, match=rf"\[0, 4\]; got {index}"):
            trainer.optimize(index)
    with pytest.raises(TypeError):
        trainer.optimize(0.0)
    trainer.optimize(np.int32(4))


def recurrent_trainer(make_trainer, **options):
    def loss(variables, inputs):
        return variables["w"] * tf.reduce_sum(inputs["x"]) * tf.reduce_sum(inputs["h"])

    columns = {"x": (np.float32, [2]), "y": (np.float32, [])}
    states = {"h": (np.float32, [3]), "c": (np.float32, [])}
    return make_trainer(loss, {"w": np.float32(0)}, columns, states, **options)


def recurrent_batch(rows, sequences, **changes):
    batch = {
        "x": np.zeros((rows, 2), np.float32),
        "y": np.zeros(rows, np.float32),
        "h": np.zeros((sequences, 3), np.float32),
        "c": np.zeros(sequences, np.float32),
        **changes,
    }
    return [{n: batch[n] for n in names} for names in ("xy", "hc")]


def test_a_bad_batch_is_refused_whole(make_trainer):
    trainer = recurrent_trainer(make_trainer, check_finite=True)
    for batch, message in (
        (recurrent_batch(12, 6, y=np.zeros(11, "f")), r"columns .*'x': 12, 'y': 11"),
        (recurrent_batch(12, 6, c=np.zeros(5, "f")), r"states .*'h': 6, 'c': 5"),
        (recurrent_batch(13, 6), "13 rows cannot be divided among 6 states"),
        (recurrent_batch(0, 0), "nothing to load: got 0 rows, 0 states"),
        (recurrent_batch(12, 1), "is 4 rows, and one sequence has 12"),
        (recurrent_batch(4, 1), "got 1 sequences of 4 rows for 2 devices"),
        (recurrent_batch(12, 6, h=np.zeros((6, 2), "f")), r"'h' has shape \[6, 2\]"),
        (recurrent_batch(12, 6, c=np.full(6, 1e300)), "'c': .* overflow float32"),
        (recurrent_batch(12, 6, y=np.full(12, np.nan)), "'y': 12 of 12 values are NaN"),
    ):
        trainer.load(*recurrent_batch(12, 6))
        with pytest.raises(ValueError, match=message):
            trainer.load(*batch)
        assert trainer.report is None
        for train in (lambda: trainer.optimize(0), lambda: trainer.run_epochs(1)):
            with pytest.raises(RuntimeError, match="the last load was refused"):
                train()
    assert trainer.load(*recurrent_batch(24, 12)).batch_offsets == (0, 4, 8)
