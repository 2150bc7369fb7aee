"""KV events: what happened to the blocks of a prefix cache, or of a tier behind it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import compress, groupby

from baton.types import BlockHash

DEVICE = "device"
"""The tier of an engine's own pool."""
HOST = "host"
"""Host memory beside the pool, or a KV store's memory."""
DISK = "disk"
REMOTE = "remote"


@dataclass(frozen=True, slots=True)
class BlocksStored:
    """A run of blocks, each the child of the one before; ``parent`` is ``None`` for the first block of a chain.

    In lower tiers neither is known: ``parent`` is ``None``, and the blocks are in no order.
    """

    parent: BlockHash | None
    hashes: tuple[BlockHash, ...]
    tier: str = DEVICE


@dataclass(frozen=True, slots=True)
class BlocksRemoved:
    """Blocks whose content is gone from a tier."""

    hashes: tuple[BlockHash, ...]
    tier: str = DEVICE


@dataclass(frozen=True, slots=True)
class CacheCleared:
    """Nothing is cached in a tier any more."""

    tier: str = DEVICE


KVEvent = BlocksStored | BlocksRemoved | CacheCleared


def merge_events(events: Iterable[KVEvent]) -> list[KVEvent]:
    """Join neighbours: a run and its continuation, removals that follow one another. Order is kept."""
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
    """Return the fewest events that lead to the same: what was cleared, then what is gone, then what was stored.

    Only the last that happened to a block of a tier is told.
    """
    cleared: set[str] = set()
    told: dict[str, set[BlockHash]] = {}
    removed: list[KVEvent] = []
    stored: list[KVEvent] = []
    for event in reversed(events):
        tier = event.tier
        if tier in cleared:
            continue
        if isinstance(event, CacheCleared):
            cleared.add(tier)
            continue
        later = told.setdefault(tier, set())
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
    """Cut a run where blocks are not wanted."""
    at = 0
    for want, group in groupby(wanted):
        end = at + len(list(group))
        if want:
            parent = event.parent if at == 0 or event.tier != DEVICE else event.hashes[at - 1]
            yield BlocksStored(parent, event.hashes[at:end], event.tier)
        at = end
