"""How the bytes of blocks come and go."""
