"""Checks of what callers bring, made once, in the public methods."""
