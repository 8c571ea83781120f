"""Flat variables of session graphs: views before values, collections, savers."""
