"""Data sent between workers and parameter servers, and its packs."""
