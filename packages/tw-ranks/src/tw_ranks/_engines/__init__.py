"""Engines, which carry exchanges: how one is chosen, NCCL's test, and MPI."""
