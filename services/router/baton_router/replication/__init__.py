"""Several routers over the same instances: what each has placed and expects, who registered, who may place how much.

- ``wire``: what a replica tells the others, and the checks of what it hears.
- ``peers``: the other replicas, as far as is known.
- ``telling``: which blocks this replica's requests make instances compute, for the others.
- ``taken``: what the others tell of that, counted like this replica's own.
- ``shares``: how a capacity is divided; a pure function.
- ``units``: this replica's part of each instance's capacity.
- ``store``: the Redis side: a stream, and one script that keeps the sum of all parts below the capacity.
- ``replica``: the tasks that tie these to the registry.
- ``room``: requests that wait for an instance with room.
"""
