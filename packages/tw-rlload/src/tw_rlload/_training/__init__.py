"""What a training step and whole epochs share in both modes.

Slices of the loaded rows, the loop over steps, its order and results, and the
gradients' way to what is applied.
"""
