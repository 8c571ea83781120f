"""One update of all towers: clean, accumulate, reduce, test, clip, apply."""
