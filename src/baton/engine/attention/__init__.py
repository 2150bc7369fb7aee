"""Attention over the paged KV pool: the registry of backends."""
