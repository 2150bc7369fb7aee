"""What a KV store counts."""
