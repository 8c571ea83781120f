"""Synchronisation points of the towers' steps: losses, metrics and updates."""
