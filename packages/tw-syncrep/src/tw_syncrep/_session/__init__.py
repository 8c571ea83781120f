"""What runs the graph: the hook of a session, and a session with bounded calls."""
