"""What the store in memory asks of a tier behind it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from baton.types import BlockHash
from baton_kvstore.disk.format import Kind


class BackTier(Protocol):
    """Keeps blocks that memory has no room for. ``done`` callbacks come from a thread of the tier's own."""

    def takes(self, kind: Kind) -> bool:
        """Whether blocks of this kind can be kept at all."""

    def holds(self, kind: Kind, block_hash: BlockHash) -> bool:
        """Whether a block can be read; never waits."""

    def read(self, kind: Kind, hashes: Sequence[BlockHash], into: Sequence[memoryview]) -> list[bool]:
        """Fill page-aligned buffers; blocks the calling thread. ``False``: not there, or damaged and now forgotten."""

    def write(
        self,
        kind: Kind,
        hashes: Sequence[BlockHash],
        views: Sequence[memoryview],
        done: Callable[[list[bool]], None],
    ) -> bool:
        """Queue blocks, whose bytes stay as they are until ``done``; ``False``: the queue is full."""

    def delete(self, kind: Kind, hashes: Sequence[BlockHash] | None, done: Callable[[bool], None]) -> list[BlockHash]:
        """Forget blocks (``None``: all of the kind) and return those there were; ``done``: no restart finds them."""

    def sync(self, done: Callable[[bool], None]) -> None:
        """Tell whether everything queued so far survives a crash, when it does."""

    def close(self) -> None:
        """Finish what is queued; nobody reads any more."""
