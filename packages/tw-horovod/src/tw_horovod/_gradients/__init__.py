"""Optimizers and tapes that reduce gradients over all ranks."""
