"""The ready instances as placement needs them, gathered once for as long as they stay the same, not per request."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from baton.types import InstanceId, Role
from baton_router.indexer.event_applier import EventApplier
from baton_router.registry.instance import Instance
from baton_router.registry.load import LoadTracker
from baton_router.scheduler.policy import Pairs, Ratings

KvCompat = list[list[bool]]
"""``compat[d][p]``: whether decode instance ``d`` takes the KV of prefill instance ``p``."""
REFUSED = {"kv_dtype": -math.inf}
"""The term of a pair whose KV dtypes do not fit."""


@dataclass(frozen=True, slots=True)
class BlockFormat:
    """Instances of one format have the same block hashes: a prompt is hashed and looked up once for all of them.

    Attributes:
        content_key: Root of the hash chains, tenant salt aside.
        block_size: Tokens per block.
        block_bytes: Bytes per block.
    """

    content_key: bytes
    block_size: int
    block_bytes: int


class RoleCandidates:
    """The instances of one role, as parallel lists.

    Attributes:
        role: Theirs.
        instances: The instances.
        ids: Their names.
        trackers: Their load.
        formats: Each one's position in ``Candidates.formats``.
        indexed: Each one's part of the index, beside its format.
    """

    __slots__ = ("formats", "ids", "indexed", "instances", "role", "trackers")

    def __init__(self, role: Role, instances: Sequence[Instance], known: dict[BlockFormat, int]) -> None:
        self.role = role
        self.instances = instances
        self.ids: list[InstanceId] = [x.instance_id for x in instances]
        self.trackers: list[LoadTracker] = [x.load for x in instances]
        self.formats = [known.setdefault(_block_format(x), len(known)) for x in instances]
        self.indexed: list[tuple[EventApplier, int]] = [
            (x.events, at) for x, at in zip(instances, self.formats, strict=True)
        ]


class Candidates:
    """The instances that a request can be placed on.

    Args:
        prefills: Ready prefill instances; those whose KV no decode instance takes are left out.
        decodes: Ready decode instances.

    Attributes:
        prefill: Prefill instances.
        decode: Decode instances.
        formats: Of all of them, prefill instances' first.
        compat: Which decode instance takes the KV of which prefill instance; ``None``: all of all.
    """

    __slots__ = ("_given", "compat", "decode", "formats", "prefill")

    def __init__(self, prefills: Sequence[Instance], decodes: Sequence[Instance]) -> None:
        self._given = prefills, decodes
        self.compat: KvCompat | None = kv_compat(prefills, decodes)
        if self.compat is not None and not any(map(any, self.compat)):
            prefills, self.compat = (), None
        known: dict[BlockFormat, int] = {}
        self.prefill = RoleCandidates(Role.PREFILL, prefills, known)
        self.decode = RoleCandidates(Role.DECODE, decodes, known)
        self.formats = list(known)

    def is_of(self, prefills: Sequence[Instance], decodes: Sequence[Instance]) -> bool:
        """Whether it was made from these very list objects."""
        return self._given[1] is decodes and self._given[0] is prefills


def kv_compat(prefills: Sequence[Instance], decodes: Sequence[Instance]) -> KvCompat | None:
    """Return which decode instance takes KV of which prefill instance; ``None``: all of all. All must be ready."""
    if len({info.kind for x in (*prefills, *decodes) if (info := x.info) is not None}) == 1:
        return None
    rows: dict[str, list[bool]] = {}
    compat = []
    for decode in decodes:
        assert decode.info is not None  # it is ready
        row = rows.get(decode.info.kind)
        if row is None:
            mine = decode.info.fingerprint
            row = rows[decode.info.kind] = [x.info is not None and mine.takes(x.info.fingerprint) for x in prefills]
        compat.append(row)
    return compat


def only_compatible(ratings: Ratings, compat: KvCompat) -> Ratings:
    """Return ratings in which pairs whose KV does not fit score ``-inf``."""
    pairs = ratings.pairs

    def explain(p: int, d: int) -> dict[str, float]:
        if not compat[d][p]:
            return REFUSED
        return {} if pairs is None else pairs.explain(p, d)

    rows = [
        [(0.0 if pairs is None else pairs.rows[d][p]) if fits else -math.inf for p, fits in enumerate(row)]
        for d, row in enumerate(compat)
    ]
    return Ratings(
        ratings.prefill, ratings.decode, Pairs(rows, explain), ratings.local, ratings.store, ratings.temperature
    )


def _block_format(instance: Instance) -> BlockFormat:
    info = instance.info
    assert info is not None  # it is ready
    return BlockFormat(info.content_key, info.fingerprint.block_size, info.fingerprint.block_bytes)
