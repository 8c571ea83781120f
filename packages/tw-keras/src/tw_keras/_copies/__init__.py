"""The copies of a model: their variables, the state of their updates, other ranks."""
