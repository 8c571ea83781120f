"""Recorded steps, and the summaries, pictures and traces made from them."""
