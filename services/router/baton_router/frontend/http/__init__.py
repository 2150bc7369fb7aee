"""HTTP itself: the protocol of a connection, what surrounds every request, errors, limits."""
