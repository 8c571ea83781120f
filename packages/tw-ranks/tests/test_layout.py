"""Tests of the layout that rank 0 warns of, in plain Python."""

import pytest

from tw_ranks._engines.choice import EngineFacts, choose_engine
from tw_ranks._joining.layout import find_layout_fault


@pytest.mark.parametrize(
    ("said", "facts", "node_ranks", "instead"),
    [
        ("auto", EngineFacts(4, num_gpus=1), [0, 0, 1, 1], "a TensorFlow with NCCL"),
        ("tensorflow", EngineFacts(3, "", False, 2, True), [0, 1, 1], 'engine="nccl"'),
        ("auto", EngineFacts(2, num_gpus=8), [0, 0], "a TensorFlow with NCCL"),
    ],
)
def test_gpus_of_one_machine_that_add_over_the_ring_are_named(
    said: str, facts: EngineFacts, node_ranks: list[int], instead: str
) -> None:
    fault = find_layout_fault(choose_engine(said, facts), facts, node_ranks)
    assert f"{facts.size} ranks with GPUs, 2 of them on one machine" in fault
    assert f"in {2 * (facts.size - 1)} messages" in fault
    assert "one process on each machine, with a tower for each of its GPUs" in fault
    assert f", or use {instead}; got the ring" in fault


@pytest.mark.parametrize(
    ("said", "facts", "node_ranks"),
    [
        ("auto", EngineFacts(2, num_gpus=8), [0, 1]),  # one process a machine
        ("auto", EngineFacts(4, "", False, 1, True), [0, 0, 1, 1]),  # NCCL
        ("auto", EngineFacts(4), [0, 0, 1, 1]),  # CPUs
        ("mpi", EngineFacts(4, "srun", True, 1), [0, 0, 1, 1]),
    ],
)
def test_other_layouts_are_not(
    said: str, facts: EngineFacts, node_ranks: list[int]
) -> None:
    assert find_layout_fault(choose_engine(said, facts), facts, node_ranks) == ""
