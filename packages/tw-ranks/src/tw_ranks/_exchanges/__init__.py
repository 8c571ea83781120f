"""Exchanges between ranks: collectives, how each mode runs them, and what uses them."""
