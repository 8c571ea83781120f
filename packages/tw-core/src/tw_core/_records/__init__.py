"""What a graph remembers of its towers: their variables and their collections."""
