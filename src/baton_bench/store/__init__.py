"""``baton bench store``: a store measured from its clients' side, and its eviction policies on a trace."""
