"""The prefix index, and the KV events that feed it."""
