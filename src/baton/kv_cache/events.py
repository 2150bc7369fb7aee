"""KV events: what happened to the blocks of a prefix cache, or of a tier behind it."""

from __future__ import annotations

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
