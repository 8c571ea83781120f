"""Descriptions of collectives: what is the same, and which difference is told."""

import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

from tw_ranks._agreement import Exchange, TensorSpec, find_difference

SHAPES = st.none() | st.lists(st.none() | st.integers(0, 9), max_size=3).map(tuple)
SPECS = st.builds(
    TensorSpec,
    name=st.sampled_from(["", "a", "b/kernel"]),
    dtype=st.sampled_from(["float32", "int64"]),
    shape=SHAPES,
    indices=st.sampled_from(["", "int32", "int64"]),
)
EXCHANGES = st.builds(
    Exchange,
    kind=st.sampled_from(["sum", "broadcast"]),
    tensors=st.lists(SPECS, max_size=4).map(tuple),
    options=st.sampled_from([(), (("root", "1"),), (("root", "2"),)]),
    name=st.sampled_from(["", "loss"]),
)


@given(st.lists(EXCHANGES, min_size=1, max_size=4))
def test_a_difference_is_told_exactly_where_there_is_one(exchanges):
    differ = any(other != exchanges[0] for other in exchanges)
    said = find_difference(dict(enumerate(exchanges)))
    assert bool(said) == differ
    if differ:
        first = next(r for r, other in enumerate(exchanges) if other != exchanges[0])
        assert "rank 0" in said
        assert f"rank {first}" in said


def of(*names, of_variables=True, shape=(2,)):
    tensors = tuple(TensorSpec(name, "float32", shape) for name in names)
    return Exchange("a broadcast", tensors, of_variables=of_variables)


@pytest.mark.parametrize(
    ("mine", "theirs", "are_same"),
    [
        (of("dense/kernel", "b"), of("sequential/dense/kernel", "b"), True),
        (of("dense/kernel:0"), of("dense_1/kernel:0"), True),
        (of("adam/dense_kernel_momentum"), of("adam/a_dense_1_kernel_momentum"), True),
        (of("Variable_1:0"), of("Variable_3:0"), True),
        (of(""), of("a"), False),
        (of("a/kernel"), of("a/bias"), False),
        (of("a/kernel", "b/kernel"), of("b/kernel", "a/kernel"), False),
        (of("a/kernel"), of("a/kernel", "b/kernel"), False),
        (of("a/kernel"), of("b/kernel", shape=(3,)), False),
        (of("a/kernel", of_variables=False), of("b/kernel", of_variables=False), False),
        (of("a/kernel"), of("b/kernel", of_variables=False), False),
    ],
)
def test_variables_may_differ_in_path_alone(mine, theirs, are_same):
    assert (find_difference({0: mine, 1: theirs}) == "") == are_same


def test_the_first_tensor_that_differs_is_named():
    mine = Exchange(
        "sum", (TensorSpec("a", "float32", (2,)), TensorSpec("b", "float32", (3,)))
    )
    theirs = Exchange("sum", (mine.tensors[0], TensorSpec("b", "float32", None)))
    assert find_difference({0: mine, 1: mine, 2: theirs}) == (
        "tensor 1 of 'sum' is b float32 [3] on rank 0 and b float32 of unknown shape "
        "on rank 2. All ranks must run the same program."
    )


def test_options_that_differ_are_named():
    mine = Exchange("sum", (), (("root", "1"), ("wire", "None")))
    theirs = Exchange("sum", (), (("root", "1"), ("wire", "bfloat16")))
    assert "rank 0 has wire=None, rank 1 has wire=bfloat16" in find_difference(
        {0: mine, 1: theirs}
    )


def test_a_description_shows_what_tells_it_from_others():
    tensors = tuple(TensorSpec(name, "float32", (2,)) for name in "abcd")
    exchange = Exchange("sum", tensors, (("root", "1"),), "grads")
    said = "'sum' 'grads' of a float32 [2], b float32 [2] and 2 more, root=1"
    assert str(exchange) == said
    assert str(Exchange("the end", ())) == "'the end'"


@pytest.mark.parametrize(
    ("names", "scope"),
    [
        (["Dense/kernel:0, tensor 1", "b"], "by_mpi/Dense_kernel_0_tensor_1"),
        (["größe"], "by_mpi/gr_e"),
        ([""], "by_mpi"),
        ([], "by_mpi"),
    ],
)
def test_timelines_show_the_engine_and_the_first_tensor(names, scope):
    tensors = tuple(TensorSpec(name, "float32", (2,)) for name in names)
    found = Exchange("a sum", tensors).scope("mpi")
    assert found == scope
    with tf.Graph().as_default(), tf.name_scope(found):
        assert tf.constant(1.0).op.name.startswith(scope)
