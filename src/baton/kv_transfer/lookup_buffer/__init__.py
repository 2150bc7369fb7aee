"""Where KV waits for its consumer, matched by key or by tokens."""
