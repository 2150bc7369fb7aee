"""Connectors: what turns "this request's KV" into offers, look-ups and fetches."""
