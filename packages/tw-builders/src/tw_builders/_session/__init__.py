"""Builders for session graphs: they build a step that a session runs."""
