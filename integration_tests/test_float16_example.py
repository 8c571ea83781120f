"""The float16 example learns, and shows what loss scaling is for."""

import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "docs" / "examples"


@pytest.fixture(scope="module")
def example():
    sys.path.insert(0, str(EXAMPLES))
    try:
        import float16_digits

        yield float16_digits
    finally:
        sys.path.remove(str(EXAMPLES))


@pytest.mark.parametrize("num_towers", [1, 2])
def test_it_learns_with_scaling(example, num_towers):
    result = example.train(num_towers, epochs=20)
    assert result["accuracy"] >= 0.97
    assert result["lost"] < 0.05
    assert result["loss_scaling_log2"] > 15


def test_it_loses_gradients_without_scaling(example):
    assert example.train(epochs=20, scaling=False)["lost"] > 0.2
