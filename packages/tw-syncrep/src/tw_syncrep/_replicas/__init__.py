"""Synchronous replicas over parameter servers: the optimizer, its protocol, sessions.

``cluster`` is shared with the other half of the package, in which processes add their
gradients without servers; neither half imports the other.
"""
