"""Holds offers until the right consumer asks for them."""
