"""``baton tune``: the best settings of a real deployment, by measurement."""
