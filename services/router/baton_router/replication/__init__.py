"""Several routers over the same instances: what each has placed, which instances registered, who may place how much.

- ``wire``: entries of the stream, and the checks of what is read.
- ``redis_log``: the Redis side: the stream, and one script that keeps the sum of all shares below the capacity.
- ``capacity``: the other replicas, this replica's share of each instance's capacity, and how a capacity is divided.
- ``pending_sync``: blocks that requests make instances compute: what this replica publishes, what it counts of others'.
- ``replica``: the tasks that tie these to the registry.
"""
