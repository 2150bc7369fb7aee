"""What the router counts."""
