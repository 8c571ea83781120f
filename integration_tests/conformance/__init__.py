"""Every builder with every reducer: what is trained, how, and the table of it all."""
