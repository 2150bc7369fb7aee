"""KV memory: layout of blocks, arenas, the block pool with its prefix cache, and the interface of KV connectors."""
