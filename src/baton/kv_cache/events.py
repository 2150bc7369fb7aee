"""KV events: what happened to the blocks of a prefix cache, or of a tier behind it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

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
