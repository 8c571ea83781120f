"""The command ``tw-doctor``: checks and measures a machine's devices.

Its own process never imports TensorFlow: code that can hang or crash runs in another.
"""
