"""The parts of training that both modes share.

The loop over steps and the rows that it picks, its order and results, and the
reduction, averaging and clipping of gradients.
"""
