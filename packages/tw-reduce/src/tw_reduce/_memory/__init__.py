"""Reducers with memory: ready-made ones, their protocol, and the memory itself."""
