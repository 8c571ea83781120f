"""Exchanges between ranks: collectives, how each mode runs them, and their users."""
