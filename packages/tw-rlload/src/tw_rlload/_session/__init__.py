"""``LocalSyncParallelOptimizer``: loading and training through a session graph."""
