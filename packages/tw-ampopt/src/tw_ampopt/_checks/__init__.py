"""Checks of arguments, made once, in the public methods that take them.

Each raises ``TypeError`` or ``ValueError``, whose message names every offender.
"""
