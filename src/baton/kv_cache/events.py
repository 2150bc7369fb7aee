"""KV events: changes of the blocks in a prefix cache, or in a tier behind it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import compress, groupby

from baton.types import BlockHash

DEVICE = "device"
"""Tier of an engine's own pool."""
HOST = "host"
"""Tier of host memory beside the pool, or of a KV store's memory."""
DISK = "disk"
REMOTE = "remote"


@dataclass(frozen=True, slots=True)
class BlocksStored:
    """A run of blocks, each the child of the one before; ``parent`` is ``None`` for the first block of a chain.

    In lower tiers the order is not known: ``parent`` is ``None``, and the blocks are in no order.
    """

    parent: BlockHash | None
    hashes: tuple[BlockHash, ...]
    tier: str = DEVICE


@dataclass(frozen=True, slots=True)
class BlocksRemoved:
    """Blocks that were removed from a tier."""

    hashes: tuple[BlockHash, ...]
    tier: str = DEVICE


@dataclass(frozen=True, slots=True)
class CacheCleared:
    """All blocks of a tier were removed."""

    tier: str = DEVICE


KVEvent = BlocksStored | BlocksRemoved | CacheCleared


def merge_events(events: Iterable[KVEvent]) -> list[KVEvent]:
    """Join neighbouring events: a run and its continuation, consecutive removals. Order is kept."""
    merged: list[KVEvent] = []
    stored: list[BlockHash] = []
    removed: list[BlockHash] = []
    parent: BlockHash | None = None
    tier = DEVICE

    def flush() -> None:
        if stored:
            merged.append(BlocksStored(parent, tuple(stored), tier))
            stored.clear()
        if removed:
            merged.append(BlocksRemoved(tuple(removed), tier))
            removed.clear()

    for event in events:
        if event.tier != tier:
            flush()
            tier = event.tier
        if isinstance(event, BlocksStored):
            # Parents are not known in lower tiers, so any two runs go together.
            if not stored or (tier == DEVICE and stored[-1] != event.parent):
                flush()
                parent = event.parent
            stored.extend(event.hashes)
        elif isinstance(event, BlocksRemoved):
            if stored:
                flush()
            removed.extend(event.hashes)
        else:
            flush()
            merged.append(event)
    flush()
    return merged


def net_events(events: Sequence[KVEvent]) -> list[KVEvent]:
    """Return the fewest events with the same effect: clears, then removals, then stored blocks.

    Only the last event of each block in a tier is kept.
    """
    cleared: set[str] = set()
    seen: dict[str, set[BlockHash]] = {}
    removed: list[KVEvent] = []
    stored: list[KVEvent] = []
    for event in reversed(events):
        tier = event.tier
        if tier in cleared:
            continue
        if isinstance(event, CacheCleared):
            cleared.add(tier)
            continue
        later = seen.setdefault(tier, set())
        fresh = [name not in later for name in event.hashes]
        later.update(event.hashes)
        if isinstance(event, BlocksRemoved):
            if any(fresh):
                removed.append(BlocksRemoved(tuple(compress(event.hashes, fresh)), tier))
        elif all(fresh):
            stored.append(event)
        else:
            stored += reversed(list(_runs(event, fresh)))
    return merge_events([*map(CacheCleared, sorted(cleared)), *reversed(removed), *reversed(stored)])


def _runs(event: BlocksStored, wanted: Sequence[bool]) -> Iterator[BlocksStored]:
    """Yield the parts of a run whose blocks are wanted."""
    start = 0
    for want, group in groupby(wanted):
        end = start + len(list(group))
        if want:
            parent = event.parent if start == 0 or event.tier != DEVICE else event.hashes[start - 1]
            yield BlocksStored(parent, event.hashes[start:end], event.tier)
        start = end
