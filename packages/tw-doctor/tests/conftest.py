"""Fakes eight devices."""

from tw_core.testing import start_logical_cpus

start_logical_cpus()
