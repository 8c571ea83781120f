"""Optimizer state in shards over ranks: the plan, the exchange, and files."""
