"""The protocol of a training step: state on the servers, and each task's part in it.

Built into the graph once; a step runs no Python from here.
"""
