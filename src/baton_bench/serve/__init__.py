"""``baton bench serve``: load on a running service, and what its users saw of it."""
