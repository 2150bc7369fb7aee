"""The router service of Baton."""
