"""Reducers that remember: what they keep, and those that are ready to use."""
