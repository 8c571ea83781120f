"""This rank's end of all exchanges: keys, progress, and reports of missing ranks."""
