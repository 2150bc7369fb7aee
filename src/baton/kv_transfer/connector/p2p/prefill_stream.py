"""What a Prefill stream says, and how one is opened: the words between the two sides of point-to-point hand-over."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Protocol

from baton.kv_cache.connector import LoadRequest
from baton.kv_transfer.blocks import BlockSource
from baton.types import TokenLogprob


@dataclass(frozen=True, slots=True)
class HeldBlocks:
    """The leading blocks of a request as its caller holds them, all full.

    Attributes:
        block_ids: In the caller's pool, from the first token on.
        generations: Parallel to ``block_ids``.
    """

    source: BlockSource
    block_ids: tuple[int, ...]
    generations: tuple[int, ...]

    @property
    def num_tokens(self) -> int:
        """Tokens whose KV they hold."""
        return len(self.block_ids) * self.source.fingerprint.block_size


@dataclass(frozen=True, slots=True)
class Acknowledged:
    """The call has come to the prefill instance, which says so at once, whatever its engine is at."""


@dataclass(frozen=True, slots=True)
class Accepted:
    """The prefill instance took the request; its blocks lie in ``source``."""

    source: BlockSource


@dataclass(frozen=True, slots=True)
class Offer:
    """Blocks that may be fetched now.

    Attributes:
        first_block: Index of the first of them in the prompt.
        block_ids: Where they lie in the source's pool.
        generations: Parallel to ``block_ids``.
        num_tokens: Leading tokens whose KV is complete.
        ready: The blocks are being computed: a layer i is there when the source's progress has come to
            ``ready + i + 1``. The offer must be repeated without this when they are complete, else they don't count.
            ``None``: they are complete.
    """

    first_block: int
    block_ids: tuple[int, ...]
    generations: tuple[int, ...]
    num_tokens: int
    ready: int | None = None

    @property
    def key(self) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
        """What an offer and its repetition have in common."""
        return self.first_block, self.block_ids, self.generations


@dataclass(frozen=True, slots=True)
class Finished:
    """The prompt is computed; without a first token that can be gone on from, it is chosen here."""

    first_token: TokenLogprob | None
    prefix_hit_tokens: int


@dataclass(frozen=True, slots=True)
class Queued:
    """The prefill instance gets on, and the prompt is not computed yet.

    Attributes:
        tokens_ahead: Tokens to compute until it is, its own included.
        tokens_per_s: How fast the instance computes now; 0: unknown.
        running: The prompt waits no more.
    """

    tokens_ahead: int
    tokens_per_s: float
    running: bool

    @property
    def expected_s(self) -> float:
        """Seconds until the prompt is computed; 0: unknown."""
        return self.tokens_ahead / self.tokens_per_s if self.tokens_per_s > 0 else 0.0


PrefillEvent = Acknowledged | Accepted | Queued | Offer | Finished


class PrefillDialer(Protocol):
    """Opens Prefill streams; the transport does not know the wire."""

    def open(
        self, address: str, request: LoadRequest, held: HeldBlocks, claim: str | None = None
    ) -> AbstractAsyncContextManager[AsyncIterator[PrefillEvent]]:
        """Ask the instance at ``address``; leaving the context closes the stream and with it the lease.

        Args:
            address: ``host:port`` of the prefill instance.
            request: The request to prefill.
            held: Leading blocks that this instance holds, and keeps while the context is open.
            claim: Key of the prompt that waits there; empty: find it by its tokens; ``None``: compute it.
        """
