"""One update of all towers: clean, accumulate, reduce, test, apply."""
