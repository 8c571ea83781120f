"""How the towers' gradients become updates, by where the variables are."""
