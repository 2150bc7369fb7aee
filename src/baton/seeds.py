"""Seeds of requests and their sequences: the rules that engines and the router share."""

from __future__ import annotations

import xxhash


def request_seed(engine_seed: int, request_id: str) -> int:
    """Return the seed of a request that brought none: the same on every instance with the same ``--seed``."""
    return xxhash.xxh3_64_intdigest(request_id.encode(), seed=engine_seed % 2**64)


def sequence_seed(seed: int, index: int) -> int:
    """Return the seed (uint64) of the ``index``-th of ``n`` sequences; sequence 0 has the request's own.

    A sequence depends on its seed and its own tokens alone, so one of ``n`` sequences is moved elsewhere as a
    request of its own, with ``n = 1`` and this seed.
    """
    if index == 0:
        return seed
    return xxhash.xxh3_64_intdigest(seed.to_bytes(8, "little") + index.to_bytes(8, "little"))
