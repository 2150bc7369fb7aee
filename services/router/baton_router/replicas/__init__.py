"""Several routers over the same instances: what each has placed, who registered, and who may place how much.

- ``wire``: what a replica tells the others, and the checks of what it hears.
- ``peers``: the other replicas, as far as is known.
- ``shares``: how a capacity is divided; a pure function.
- ``units``: this replica's part of each instance's capacity.
- ``store``: the Redis side: a stream, and one script that keeps the sum of all parts below the capacity.
- ``replica``: the tasks that tie these to the registry.
- ``room``: requests that wait for an instance with room.
"""
