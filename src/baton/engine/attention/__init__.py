"""Attention over the paged KV pool: the backends, and how they take the place of a model's own."""
