"""The process group that ``init`` joined, and what a program asks about it."""
