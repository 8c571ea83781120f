"""What the sessions api, siblings, pieces and release do, in plain Python.

From the root of the repository, with ``integration_tests`` on the path, ``python -m
interfaces api tw-core`` does what the session of that name does.
"""
