"""``baton bench offline``: the engine alone, without a server."""
