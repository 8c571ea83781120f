"""Checks of arguments, made once, in the public methods that take them.

Each raises ``TypeError`` or ``ValueError`` with a message that names every offender.
"""
