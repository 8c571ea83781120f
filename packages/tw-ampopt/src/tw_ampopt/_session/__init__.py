"""The optimizer for session graphs, and the hook that writes its statistics."""
