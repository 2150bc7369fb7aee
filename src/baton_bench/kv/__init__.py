"""``baton bench kv``: what a link does for KV, measured through the pipes that serve it."""
