"""Data sent between workers and parameter servers, and the packs it travels in."""
