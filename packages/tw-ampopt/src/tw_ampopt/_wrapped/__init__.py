"""The optimizers that are wrapped: one per tower, and one interface to all families.

What goes around any of them, such as float32 masters, has the same interface.
"""
