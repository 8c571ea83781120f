"""The protocol of a training step: state on the servers, and each task's ops.

It is built into the graph once; a step runs no Python from here.
"""
