"""Who owns which variable, and how an owner's slots are named."""

import keras
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

from tw_builders._owners import owned, plan_owners

SIZES = st.lists(st.integers(0, 10**9), min_size=1, max_size=40)
TOTALS = st.integers(1, 8)


@given(SIZES, TOTALS)
def test_each_variable_has_an_owner_and_loads_differ_by_the_largest(sizes, total):
    owners = plan_owners(sizes, total)
    loads = [0] * total
    for owner, size in zip(owners, sizes, strict=True):
        loads[owner] += size
    assert max(loads) - min(loads) <= max(sizes)
    assert owners[sizes.index(max(sizes))] == 0
    unknown = [size if size % 3 else None for size in sizes]
    assert len(plan_owners(unknown, total)) == len(sizes)


def test_owners_are_chosen_by_bytes_and_not_by_elements():
    shapes = [([6], tf.float16), ([5], tf.float64), ([5], tf.float32)]
    towers = [
        [tf.Variable(tf.zeros(shape, dtype)) for shape, dtype in shapes] for _ in "ab"
    ]
    owners = [
        next(k for k, own in enumerate(towers) if own[n] is variable)
        for n, variable in enumerate(owned(towers))
    ]
    assert owners == [1, 0, 1]  # of 12, 40 and 20 bytes


def test_copies_that_an_optimizer_was_built_for_stay_their_owners():
    sizes = [8, 6, 5, 4, 3]
    towers = [[keras.Variable(tf.zeros([n])) for n in sizes] for _ in "abc"]
    optimizer = keras.optimizers.SGD()
    optimizer.build(owned(towers))
    some = [own[2:] for own in towers]
    of_all = [*map(id, owned(towers)[2:])]
    assert [*map(id, owned(some, optimizer))] == of_all
    assert [*map(id, owned(some))] != of_all
