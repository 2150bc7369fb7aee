"""Every instance that the router knows: who it is, how busy, whether it lives."""
