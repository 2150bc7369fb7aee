"""The tiers behind memory, and the ways between them."""
