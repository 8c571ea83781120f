"""The float16 example learns, and shows what loss scaling is for."""

import sys

import pytest
from harness import docs_blocks


@pytest.fixture(scope="module")
def example():
    with docs_blocks.example("float16_digits") as found:
        yield found


@pytest.mark.slow(by_day=["2"])
@pytest.mark.parametrize("num_towers", [1, 2])
def test_it_learns_with_scaling(example, num_towers):
    result = example.train(num_towers, epochs=20)
    assert result["accuracy"] >= 0.97
    assert result["lost"] < 0.05
    assert result["loss_scaling_log2"] > 15


@pytest.mark.slow
def test_it_loses_gradients_without_scaling(example):
    assert example.train(epochs=20, scaling=False)["lost"] > 0.2


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--towers", "0"], "--towers must be at least 1; got 0"),
        (["--epochs", "-1"], "--epochs must be at least 1; got -1"),
        (["--towers", "3"], "--towers must divide 256 images; got 3"),
    ],
)
def test_wrong_options_are_refused(example, monkeypatch, capsys, arguments, says):
    monkeypatch.setattr(sys, "argv", ["float16_digits.py", *arguments])
    monkeypatch.setattr(example, "train", None)
    with pytest.raises(SystemExit) as caught:
        example.main()
    assert caught.value.code == 2
    assert says in capsys.readouterr().err
