"""Running the graph: a session with bounded calls, and the hook in it.

The hook makes a replica join a run, bounds the waits of its steps, and makes it leave.
"""
