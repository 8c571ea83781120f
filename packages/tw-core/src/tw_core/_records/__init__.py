"""A graph's record of its towers: their variables and their collections."""
