"""Reducers around other reducers: they pack, copy, compress, partition or average."""
