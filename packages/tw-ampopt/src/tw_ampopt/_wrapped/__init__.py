"""Wrapped optimizers: one per tower, with one interface to all families.

Anything that wraps these in turn, such as float32 masters, has the same interface.
"""
