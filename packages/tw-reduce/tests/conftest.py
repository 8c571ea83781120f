"""Hypothesis without a deadline, as tracing takes its time, and the same every run.

``--hypothesis-profile=default`` explores at random.
"""

from hypothesis import settings

settings.register_profile("towers", deadline=None, derandomize=True)
settings.load_profile("towers")
