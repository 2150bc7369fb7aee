"""What the chain of tiers asks of each tier behind memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from baton.types import BlockHash
from baton_kvstore.types import KvFormat, TierListener


class Offer(Protocol):
    """Takes blocks that a tier is about to drop, for the tiers behind it."""

    def wanted(self, hashes: Sequence[BlockHash]) -> set[BlockHash]:
        """Return which of them a slower tier could take and does not have."""

    def take(self, hashes: Sequence[BlockHash], views: Sequence[memoryview]) -> None:
        """Queue blocks, whose bytes do not change any more, for a slower tier; waits for room, but not for long."""


Leaving = Callable[[KvFormat], AbstractContextManager[Offer]]
"""Opened by a tier before it looks up what it is going to drop, so that deletions from then on are heard."""


@dataclass(frozen=True, slots=True)
class BackStats:
    """A moment's view of a tier; counts since start, of blocks unless a name says otherwise.

    Attributes:
        resting: Left alone after failures in a row.
    """

    num_blocks: int = 0
    used_bytes: int = 0
    queued_bytes: int = 0
    read_bytes: int = 0
    written_bytes: int = 0
    errors: int = 0
    damaged: int = 0
    evictions: int = 0
    resting: bool = False


class LowerTier(Protocol):
    """Keeps blocks that memory has no room for. ``done`` callbacks come from a thread of the tier's own.

    Attributes:
        name: As in metrics and events.
        exact: The index is the truth: what it holds can be read, and no other node writes here.
        durable: What was synced survives a crash of the host.
        shared: Other nodes write here too, so :meth:`find` may know more than :meth:`holds`.
        leaving: Where blocks go that the tier drops to make room; set before the first write.
    """

    name: str
    exact: bool
    durable: bool
    shared: bool
    leaving: Leaving | None

    @property
    def resting(self) -> bool:
        """Whether the tier is left alone for a while, because it failed."""

    def listen(self, listener: TierListener) -> None:
        """Tell a listener what is there, and then every change; see there."""

    def takes(self, kind: KvFormat) -> bool:
        """Whether blocks of this kind can be kept at all."""

    def holds(self, kind: KvFormat, block_hash: BlockHash) -> bool:
        """Whether a block can be read, as far as the tier knows; never waits."""

    def find(self, kind: KvFormat, hashes: Sequence[BlockHash], again: bool = False) -> set[BlockHash]:
        """Look for blocks that others may have written or deleted; blocks the calling thread, but not for long.

        Args:
            kind: What they are.
            hashes: Their names, in their chain's order.
            again: Look also for those that are known, or were looked for in vain a moment ago.

        Returns:
            Those that are there.
        """

    def read(self, kind: KvFormat, hashes: Sequence[BlockHash], into: Sequence[memoryview]) -> list[bool]:
        """Fill page-aligned buffers; blocks the calling thread. ``False``: not there, or damaged and now forgotten."""

    def room(self, num_bytes: int, share: float = 1.0) -> bool:
        """Whether a write would be taken if only a share of the queue might be used."""

    def wait_room(self, num_bytes: int, timeout_s: float, share: float = 1.0) -> bool:
        """Wait for that in the calling thread."""

    def write(
        self,
        kind: KvFormat,
        hashes: Sequence[BlockHash],
        views: Sequence[memoryview],
        done: Callable[[list[bool]], None],
    ) -> bool:
        """Queue blocks, whose bytes stay as they are until ``done``; ``False``: the queue is full."""

    def delete(
        self, kind: KvFormat, hashes: Sequence[BlockHash] | None, done: Callable[[bool], None]
    ) -> list[BlockHash]:
        """Forget blocks (``None``: all of the kind) and return those known; ``done``: they cannot be found again."""

    def sync(self, done: Callable[[bool], None]) -> None:
        """Tell whether everything queued so far survives a crash, when it does."""

    def back_stats(self) -> BackStats:
        """Return what metrics show of every tier."""

    def close(self) -> None:
        """Finish what is queued; no reads may be running."""
