"""Placement of parameters in a cluster, and how workers pull them in packs."""
