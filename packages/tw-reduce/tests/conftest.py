"""Fakes eight devices, and has hypothesis try the same examples in every run."""

from hypothesis import settings

from tw_core.testing import start_logical_cpus

settings.register_profile("repeatable", deadline=None, derandomize=True)
settings.load_profile("repeatable")
start_logical_cpus()
