"""What runs the graph: a session with bounded calls, and the hook in it.

The hook has a replica join a run, bounds the waits of its steps, and has it leave.
"""
