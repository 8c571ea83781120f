"""Pairs are taken apart and put together again."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tw_core import merge_grad_list, split_grad_list

towers_of_pairs = st.lists(
    st.lists(st.tuples(st.integers(0, 9), st.sampled_from("abc")))
)


@given(towers_of_pairs)
def test_splitting_keeps_towers_and_order_and_merging_undoes_it(pairs):
    grads, variables = split_grad_list(pairs)
    assert grads == [[g for g, _ in tower] for tower in pairs]
    assert variables == [[v for _, v in tower] for tower in pairs]
    assert merge_grad_list(grads, variables) == pairs


@pytest.mark.parametrize(
    ("grads", "variables", "lengths"),
    [
        ([[1, 2]], [[1]], r"\[2\] gradients and \[1\] variables"),
        ([[1], [2]], [[1]], r"\[1, 1\] gradients and \[1\] variables"),
        ([[1], []], [[], [1]], r"\[1, 0\] gradients and \[0, 1\] variables"),
    ],
)
def test_different_lengths_are_refused(grads, variables, lengths):
    with pytest.raises(ValueError, match=f"got {lengths} per tower"):
        merge_grad_list(grads, variables)
