"""What travels between workers and parameter servers, and in which packs."""
