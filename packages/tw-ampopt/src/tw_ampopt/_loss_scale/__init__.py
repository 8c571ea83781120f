"""Loss scales: the rules by which they move, and the variables that hold them."""
