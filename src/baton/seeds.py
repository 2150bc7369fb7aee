"""Which seed the sequences of one request have: the rule that engines and the router share."""

from __future__ import annotations

import xxhash


def sequence_seed(seed: int, index: int) -> int:
    """Return the seed (uint64) of the ``index``-th of ``n`` sequences; sequence 0 has the request's own.

    A sequence depends on its seed and its own tokens alone, so one of ``n`` sequences is moved elsewhere as a
    request of its own, with ``n = 1`` and this seed.
    """
    if index == 0:
        return seed
    return xxhash.xxh3_64_intdigest(seed.to_bytes(8, "little") + index.to_bytes(8, "little"))
