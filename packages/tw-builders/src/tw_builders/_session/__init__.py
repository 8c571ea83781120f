"""Builders, for session graphs alone: they build a step that a session runs."""
