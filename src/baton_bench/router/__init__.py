"""``baton bench router`` and ``baton bench prefixes``: traces against the real index and policies, on virtual time."""
