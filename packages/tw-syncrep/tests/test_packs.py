"""Plans of what travels together.

Private modules are imported because a plan is made within apply_gradients, and shows
only in how many transfers a step has.
"""

from types import SimpleNamespace

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

from tw_syncrep._parameters.packs import plan_packs, with_head
from tw_syncrep._protocol.graph import share_out

SERVERS = ["/job:ps/task:0", "/job:ps/task:1"]
VARIABLES = st.lists(
    st.builds(
        SimpleNamespace,
        device=st.sampled_from(SERVERS),
        dtype=st.sampled_from([tf.float32, tf.float64]),
        shape=st.lists(st.integers(0, 5), max_size=3).map(tf.TensorShape),
    ),
    max_size=12,
).map(lambda made: dict(enumerate(made)))


def size_bytes(variable):
    return variable.shape.num_elements() * variable.dtype.size


def kind(variable):
    return variable.device, variable.dtype.name


@pytest.mark.slow(by_day=True)
@given(VARIABLES, st.integers(0, 200))
def test_every_tensor_is_in_one_pack_of_its_server_and_dtype(variables, below_bytes):
    packs = plan_packs(variables, below_bytes=below_bytes)
    assert sorted(n for pack in packs for n in pack.indices) == list(variables)
    for pack in packs:
        assert {kind(variables[n]) for n in pack.indices} == {(pack.server, pack.dtype)}
        assert pack.shapes == tuple(tuple(variables[n].shape) for n in pack.indices)


@given(VARIABLES, st.integers(0, 200))
def test_large_tensors_travel_alone_and_small_ones_never_apart(variables, below_bytes):
    packs = plan_packs(variables, below_bytes=below_bytes)
    is_small = {n: size_bytes(v) < below_bytes for n, v in variables.items()}
    joined = [pack for pack in packs if len(pack.indices) > 1]
    assert all(is_small[n] for pack in joined for n in pack.indices)
    small = {kind(v) for n, v in variables.items() if is_small[n]}
    assert len(packs) == len(small) + list(is_small.values()).count(False)


DTYPES = [tf.float16, tf.bfloat16, tf.float32, tf.float64]
WHOLE_NUMBERS = [0, 1, -1, 255, 256, -(2**63), 2**63 - 1, 1_763_823_689_000_123]


@pytest.mark.parametrize("shapes", [[[]], [[2, 3]], [[2, 3], [], [5]]])
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: dtype.name)
def test_a_head_and_the_tensors_behind_it_come_out_as_they_went_in(dtype, shapes):
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        tensors = {
            n: tf.random.stateless_uniform(shape, [n, 0], dtype=tf.float32)
            for n, shape in enumerate(shapes)
        }
        tensors = {n: tf.cast(tensor, dtype) for n, tensor in tensors.items()}
        sizes = [
            SimpleNamespace(device="", dtype=dtype, shape=tf.TensorShape(s))
            for s in shapes
        ]
        packs = plan_packs(dict(enumerate(sizes)), below_bytes=200)
        (pack,) = with_head(packs, numbers=len(WHOLE_NUMBERS), server="")
        joined = pack.join(tensors, tf.constant(WHOLE_NUMBERS, tf.int64))
        assert joined.shape == pack.shape
        head, found = pack.open(joined)
        got = session.run([tensors, found, head, pack.read_head(joined)])
    want, found, *heads = got
    for head in heads:
        np.testing.assert_array_equal(head, WHOLE_NUMBERS)
    for n, tensor in want.items():
        np.testing.assert_array_equal(found[n], tensor)


def kinds_of(server, *kinds):
    """Packs of a server, of one variable each."""
    made = {
        n: SimpleNamespace(device=server, dtype=dtype, shape=tf.TensorShape([size]))
        for n, (dtype, size) in enumerate(kinds)
    }
    return plan_packs(made, below_bytes=1024)


def test_the_first_small_pack_of_floats_takes_the_head():
    packs = kinds_of(
        SERVERS[0],
        *[(tf.float32, 1024), (tf.int32, 1), (tf.as_dtype("float8_e5m2"), 1)],
        *[(tf.float64, 1), (tf.float32, 1)],
    )
    for place, pack in enumerate(with_head(packs, numbers=5, server=SERVERS[0])):
        assert pack.numbers == (5 if place == 3 else 0)
    assert with_head(packs, numbers=5, server=SERVERS[1]) == packs
    # The fourth has 8 bytes, the fifth 4.
    heads = with_head(packs, numbers=5, server=SERVERS[0], below_bytes=8)
    assert [pack.numbers for pack in heads] == [0, 0, 0, 0, 5]


@given(st.integers(1, 30), st.integers(1, 30))
def test_slots_are_shared_out_evenly_and_are_enough(aggregate, total):
    quota = share_out(max(aggregate, total), total)
    assert len(quota) == total
    assert sum(quota) == max(aggregate, total)
    assert max(quota) == max(1, -(-aggregate // total))
    assert max(quota) - min(quota) <= 1
