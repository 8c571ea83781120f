"""Updates from the towers' gradients, by where the variables are."""
