"""A long run of asynchronous towers and of a cluster whose tasks are killed."""
