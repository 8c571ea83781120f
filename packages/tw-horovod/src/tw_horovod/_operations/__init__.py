"""Collectives: on tensors, objects and variables."""
