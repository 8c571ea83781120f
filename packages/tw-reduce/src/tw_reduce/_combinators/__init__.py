"""Reducers around others: they pack, copy, compress, deal out, or take the mean."""
