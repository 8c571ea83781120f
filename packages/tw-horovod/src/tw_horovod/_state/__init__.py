"""The process group that ``init`` joined, and queries about it."""
