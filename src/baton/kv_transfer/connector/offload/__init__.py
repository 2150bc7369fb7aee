"""KV kept outside of the pool without a service: in host memory, in files that instances share."""
