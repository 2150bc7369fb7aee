"""KV memory: its layout, the arena it lies in, the block pool and the prefix cache, and the connector's contract."""
