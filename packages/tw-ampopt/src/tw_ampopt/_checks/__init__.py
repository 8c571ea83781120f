"""Checks of arguments, made once, in the public methods that take them.

Each raises ``TypeError`` or ``ValueError``, whose message opens with ``caller``, the
public method that was called, and names every offender.
"""
