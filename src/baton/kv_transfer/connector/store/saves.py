"""What a saver knows of each request's blocks on their way to a store."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from baton.kv_transfer.connector.store.backend import ChainPart
from baton.types import BlockHash, BlockId, RequestId, Tenant

Item = tuple[BlockId, int]
"""Block id, generation."""


@dataclass(eq=False)
class Save:
    """One request's blocks on their way to the store; guarded by the saver's lock.

    Attributes:
        hashes: Of the leading blocks that were taken note of.
        todo: The last of these, not put yet.
        num_computing: The last of those again, which a step is about to complete.
        ready: The pool's progress before that step.
        tried: Whether the store was told of them early.
        following: The call that told it, while it lasts.
        running: Whether a task works on it.
        given_up: Nothing more of this request is saved.
        ends_at: Once the request has ended: ``time.monotonic()`` when its blocks are given back at the latest.
    """

    request_id: RequestId
    tenant: Tenant | None = None
    hashes: Sequence[BlockHash] = ()
    todo: deque[Item] = field(default_factory=deque)
    num_computing: int = 0
    ready: int = 0
    tried: bool = False
    following: asyncio.Task[tuple[int, int]] | None = None
    running: bool = False
    given_up: bool = False
    ends_at: float | None = None


@dataclass(frozen=True, slots=True)
class Batch:
    """What one call puts.

    Attributes:
        items: Parallel to the part.
        ready: As ``Save.ready`` where a step still computes them; ``None``: they are complete.
        deadline: ``time.monotonic()`` seconds.
    """

    part: ChainPart
    items: list[Item]
    ready: int | None
    deadline: float

    @property
    def ids(self) -> list[BlockId]:
        """The blocks."""
        return [block_id for block_id, _ in self.items]

    @property
    def generations(self) -> list[int]:
        """Parallel to :attr:`ids`."""
        return [generation for _, generation in self.items]
