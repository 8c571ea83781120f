"""The optimizers that are wrapped: one per tower, and one interface to all families."""
