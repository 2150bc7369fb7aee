"""What a connector needs of a store, whatever stands behind it: one node, several of them, or Redis."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from baton.kv_transfer.blocks import BlockSource
from baton.types import BlockHash, BlockId, Tenant


@dataclass(frozen=True, slots=True)
class ChainPart:
    """A run of blocks of one chain. What stands before it may decide where it lies.

    Attributes:
        hashes: The chain from its first block on, at least to the part's end.
        start: The part's first block.
        stop: The block after its last one.
        tenant: Whose blocks these are; ``None``: nobody's.
    """

    hashes: Sequence[BlockHash]
    start: int
    stop: int
    tenant: Tenant | None = None

    def __len__(self) -> int:
        return self.stop - self.start

    @property
    def wanted(self) -> Sequence[BlockHash]:
        """The part's own hashes."""
        return self.hashes[self.start : self.stop]


@dataclass
class LoadProgress:
    """What a load has brought so far; true also when the load fails."""

    num_blocks: int = 0
    """Leading blocks that are valid."""
    num_bytes: int = 0
    seconds: float = 0.0
    """Time in fetches."""
    pipe: str = ""
    source: str = ""
    failures: list[str] = field(default_factory=list)
    """What went wrong on the way without ending the load."""


class StoreBackend(Protocol):
    """A store as its clients see it. All methods run in one event loop."""

    async def save(
        self,
        source: BlockSource,
        part: ChainPart,
        block_ids: Sequence[BlockId],
        generations: Sequence[int],
        *,
        deadline: float,
    ) -> tuple[int, int]:
        """Let the store take blocks; those it has are not moved.

        Args:
            source: This instance's pool.
            part: Which blocks, at most ``blocks_per_call``.
            block_ids: Parallel to the part.
            generations: Parallel to the part; a block that changes meanwhile is not stored.
            deadline: ``time.monotonic()`` seconds.

        Returns:
            Blocks that the store holds now, and bytes that moved.

        Raises:
            BatonError: The store refused or was not reached.
        """

    async def load(
        self,
        part: ChainPart,
        block_ids: Sequence[BlockId],
        progress: LoadProgress,
        *,
        deadline: float,
        cancelled: threading.Event,
    ) -> None:
        """Copy the longest prefix of a part that the store holds. On return nobody writes into the blocks any more.

        Args:
            part: Which blocks.
            block_ids: Blocks to fill, parallel to the part.
            progress: Filled as blocks come, also if the call then fails.
            deadline: ``time.monotonic()`` seconds.
            cancelled: Ends a fetch.

        Raises:
            BatonError: It fell short for another reason than that the store does not hold more. Where only one of
                several nodes failed, ``progress.failures`` says so instead.
        """

    async def close(self) -> None:
        """Close every connection. Nothing may be running."""


@runtime_checkable
class FollowingBackend(StoreBackend, Protocol):
    """A store that can also take blocks while they are computed."""

    async def save_computing(
        self,
        source: BlockSource,
        part: ChainPart,
        block_ids: Sequence[BlockId],
        generations: Sequence[int],
        ready: int,
        *,
        deadline: float,
    ) -> tuple[int, int]:
        """Let the store take blocks layer by layer, as a step of the source computes them; see :meth:`save`.

        It may decline, and then says that it does not hold them. If the step fails the blocks' generations have to be
        raised before the progress goes on: what was copied is not stored then.

        Args:
            source: This instance's pool.
            part: Which blocks, at most ``blocks_per_call``.
            block_ids: Parallel to the part.
            generations: Parallel to the part.
            ready: The pool's progress before the step's first layer: layer ``i`` is there at ``ready + i + 1``.
            deadline: ``time.monotonic()`` seconds.

        Returns:
            Blocks that the store holds now, everywhere where they should be, and bytes that moved.

        Raises:
            BatonError: The store refused or was not reached.
        """
