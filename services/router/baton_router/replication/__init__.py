"""Several routers over the same instances: what each has placed, which instances registered, who may place how much.

- ``wire``: entries of the stream, and the checks of what is read.
- ``redis_log``: the Redis side: the stream, and one script that keeps the sum of all shares below the capacity.
- ``peers``: the other replicas, as far as is known.
- ``publish``: which blocks this replica's requests make instances compute, for the others.
- ``remote_state``: the same of the others, counted like this replica's own.
- ``capacity``: this replica's share of each instance's capacity, and how a capacity is divided.
- ``replica``: the tasks that tie these to the registry.
"""
