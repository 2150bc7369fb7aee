"""The store connector, and the stores behind it: nodes of the KV store, Redis, Mooncake, files and host memory."""
