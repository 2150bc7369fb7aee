"""Which prefill instances can hand KV over to which decode instances: where dtypes differ, not all to all."""

from __future__ import annotations

import math
from collections.abc import Sequence

from baton_router.registry.instance import Instance
from baton_router.scheduler.policies.base import Pairs, Ratings

Takes = list[list[bool]]
"""``takes[d][p]``: whether decode instance ``d`` takes KV of prefill instance ``p``."""
REFUSED = {"kv_dtype": -math.inf}
"""The term of a pair that cannot be had."""


def who_takes(prefills: Sequence[Instance], decodes: Sequence[Instance]) -> Takes | None:
    """Return who takes whose KV; ``None``: all do. The instances are ready ones."""
    if len({info.kind for x in (*prefills, *decodes) if (info := x.info) is not None}) == 1:
        return None
    rows: dict[str, list[bool]] = {}
    takes = []
    for decode in decodes:
        assert decode.info is not None  # a ready instance has said what it is
        row = rows.get(decode.info.kind)
        if row is None:
            mine = decode.info.fingerprint
            row = rows[decode.info.kind] = [x.info is not None and mine.takes(x.info.fingerprint) for x in prefills]
        takes.append(row)
    return takes


def only_taken(ratings: Ratings, takes: Takes) -> Ratings:
    """Return ratings without the pairs that cannot be had."""
    pairs = ratings.pairs

    def explain(p: int, d: int) -> dict[str, float]:
        if not takes[d][p]:
            return REFUSED
        return {} if pairs is None else pairs.explain(p, d)

    rows = [
        [(0.0 if pairs is None else pairs.rows[d][p]) if taken else -math.inf for p, taken in enumerate(row)]
        for d, row in enumerate(takes)
    ]
    return Ratings(
        ratings.prefill, ratings.decode, Pairs(rows, explain), ratings.local, ratings.store, ratings.temperature
    )
