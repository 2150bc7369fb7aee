"""The connector to KV stores, and their clients."""
