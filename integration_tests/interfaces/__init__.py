"""What the sessions api, compat, forward, pieces and release do, in plain Python.

Run a module from the root of the repository, as ``python -m interfaces.api
tw-core`` with ``integration_tests`` on the path; the sessions of noxfile.py do so.
"""
