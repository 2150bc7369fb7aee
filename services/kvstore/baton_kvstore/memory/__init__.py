"""The memory of a KV store: slots, leases, quotas, eviction."""
