"""What a training step and whole epochs share in both modes.

The loop over steps and the rows that it picks, its order and results, and the
gradients' way to what is applied.
"""
