"""The decode service of Baton."""
