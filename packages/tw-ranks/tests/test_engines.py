"""Tests of the choice of an engine, in plain Python."""

import pytest

from tw_ranks._engines.choice import EngineFacts, choose_engine

CPU = EngineFacts(size=2)
GPU = EngineFacts(size=2, num_gpus=1, tensorflow_has_nccl=True)
MPI = EngineFacts(size=2, mpi_launcher="mpiexec (MPICH)", has_mpi4py=True)


@pytest.mark.parametrize(
    ("said", "facts", "name", "reason"),
    [
        ("auto", CPU, "tensorflow", "no GPU, and no MPI launcher"),
        ("auto", GPU, "nccl", "this process has a GPU"),
        ("auto", EngineFacts(2, num_gpus=1), "tensorflow", "built without CUDA"),
        ("auto", MPI, "mpi", "mpiexec (MPICH) has started"),
        ("auto", EngineFacts(2, "mpiexec"), "tensorflow", "mpi4py is not installed"),
        ("auto", EngineFacts(2, "srun", True, 1, True), "nccl", "has a GPU"),
        ("auto", EngineFacts(2, "srun", True, 1), "tensorflow", "without CUDA"),
        ("auto", EngineFacts(1, "srun", True), "tensorflow", "is alone"),
        ("tensorflow", GPU, "tensorflow", "asked for"),
        ("tensorflow", MPI, "tensorflow", "asked for"),
        ("nccl", GPU, "nccl", "asked for"),
        ("mpi", MPI, "mpi", "asked for"),
    ],
)
def test_engines_are_chosen_with_a_reason(
    said: str, facts: EngineFacts, name: str, reason: str
) -> None:
    chosen = choose_engine(said, facts)
    assert chosen.name == name
    assert reason in chosen.reason
    assert chosen.falls_back == (name == "nccl" and said == "auto")


@pytest.mark.parametrize(
    ("said", "facts", "why"),
    [
        ("nccl", CPU, "NCCL is for GPUs, and this process sees none"),
        ("nccl", EngineFacts(2, num_gpus=1), "built without CUDA"),
        ("mpi", CPU, "no MPI launcher"),
        ("mpi", EngineFacts(2, "mpiexec"), "mpi4py is not installed"),
        ("gloo", CPU, "must be one of 'auto', 'nccl', 'tensorflow', 'mpi'"),
    ],
)
def test_engines_that_cannot_be_are_refused(
    said: str, facts: EngineFacts, why: str
) -> None:
    with pytest.raises(ValueError, match=r"^join: engine") as caught:
        choose_engine(said, facts)
    assert why in str(caught.value)
