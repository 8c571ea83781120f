"""From a caller's columns to rows on the devices: read, planned, staged, written.

Buffers hold the loaded batches, and guard them during training.
"""
