"""Ranks that train alone for some steps, and then average their weights."""
