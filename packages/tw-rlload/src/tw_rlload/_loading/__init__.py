"""From a caller's columns to rows on the devices: read, planned, staged, written.

Buffers keep what is loaded, and guard it while it is trained on.
"""
