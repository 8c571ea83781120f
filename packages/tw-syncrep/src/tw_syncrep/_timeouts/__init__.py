"""Bounds on waits: deadlines, the state of a run, and the errors raised."""
