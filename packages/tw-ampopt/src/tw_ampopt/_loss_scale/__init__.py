"""Loss scales: the rules by which they move. Their variables are shared state."""
