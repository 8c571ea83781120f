"""The reducers that add: on one device or several, in groups, or by collectives."""
