"""Ranks that train alone for some steps, and then average what they have become."""
