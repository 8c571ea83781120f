"""Steps as they were recorded, and what can be read out of them."""
