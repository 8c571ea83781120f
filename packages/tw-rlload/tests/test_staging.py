"""Own aligned memory: filled from fragments, and never written while in use.

Imports private modules: which memory a load takes shows nowhere else.
"""

import gc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tw_rlload._loading.columns import Column
from tw_rlload._loading.specs import ColumnSpec
from tw_rlload._loading.staging import StagingPool, copy_rows, pad_rows

FLOAT = np.dtype(np.float32)


def column_of(fragments):
    spec = ColumnSpec("x", FLOAT, fragments[0].shape[1:], is_state=False)
    return Column(spec, tuple(fragments))


def held(pool):
    """Bytes of all blocks."""
    return sum(block.size for block in pool._blocks)


@given(st.lists(st.integers(0, 5), min_size=1, max_size=6), st.data())
def test_rows_are_those_of_the_joined_fragments(sizes, data):
    whole = np.arange(2 * sum(sizes), dtype=np.float64).reshape(-1, 2)
    fragments = np.split(whole, np.cumsum(sizes)[:-1])
    start = data.draw(st.integers(0, sum(sizes)))
    stop = data.draw(st.integers(start, sum(sizes)))
    out = np.full((stop - start + 2, 2), -1, np.float32)
    copy_rows(column_of(fragments), range(start, stop), out)
    np.testing.assert_array_equal(out[:-2], whole[start:stop])
    np.testing.assert_array_equal(out[-2:], -1)


def test_pads_repeat_the_last_sequence():
    out = np.float32([0, 1, 2, 3, 0, 0, 0, 0])
    pad_rows(out, 4, 2)
    np.testing.assert_array_equal(out, [0, 1, 2, 3, 2, 3, 2, 3])


@pytest.mark.parametrize("dtype", [np.uint8, np.bool_, np.float32, np.int64])
@pytest.mark.parametrize("shape", [(1,), (3, 5), (7, 0), (0, 3)])
def test_arrays_start_at_a_multiple_of_64_bytes(shape, dtype):
    array = StagingPool().take(shape, np.dtype(dtype))
    assert array.shape == shape and array.dtype == dtype
    assert array.ctypes.data % 64 == 0 or array.size == 0


def test_a_buffer_is_taken_again_once_its_array_is_gone():
    pool = StagingPool()
    first = pool.take((100,), FLOAT)
    address = first.ctypes.data
    del first
    assert pool.take((100,), FLOAT).ctypes.data == address
    assert held(pool) == 400


def test_a_buffer_is_left_alone_while_anything_holds_its_array():
    pool = StagingPool()
    first = pool.take((100,), FLOAT)
    first[:] = 1
    held = memoryview(first)  # as TensorFlow holds it: the array, not its memory
    del first
    gc.collect()
    pool.take((100,), FLOAT)[:] = 2
    np.testing.assert_array_equal(np.asarray(held), 1)


def test_free_buffers_that_no_array_would_fit_are_let_go():
    pool = StagingPool()
    used, free = pool.take((100_000,), FLOAT), pool.take((50_000,), FLOAT)
    del free
    pool.keep_fitting([4 * 50_000])
    assert held(pool) == 600_000
    pool.keep_fitting([4 * 10_000])
    assert held(pool) == 400_000
    del used
    pool.keep_fitting([])
    assert held(pool) == 0


def test_of_many_equal_buffers_only_as_many_are_kept_as_will_be_used():
    pool = StagingPool()
    arrays = [pool.take((10_000,), FLOAT) for _ in range(4)]
    arrays.clear()
    pool.keep_fitting([40_000, 40_000])
    assert held(pool) == 80_000
