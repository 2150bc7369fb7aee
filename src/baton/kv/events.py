"""KV events: what happened to the blocks of a prefix cache."""

from __future__ import annotations

from dataclasses import dataclass

from baton.types import BlockHash


@dataclass(frozen=True, slots=True)
class BlocksStored:
    """A run of blocks, each the child of the one before; ``parent`` is ``None`` for the first block of a chain."""

    parent: BlockHash | None
    hashes: tuple[BlockHash, ...]


@dataclass(frozen=True, slots=True)
class BlocksRemoved:
    """Blocks whose content is gone."""

    hashes: tuple[BlockHash, ...]


@dataclass(frozen=True, slots=True)
class CacheCleared:
    """Nothing is cached any more."""


KVEvent = BlocksStored | BlocksRemoved | CacheCleared
