"""The prefill side's way back: KV that the asking decode instance holds already is fetched, not computed again.

In a conversation the decode instance has the KV of what it generated, and the prefill instance has not. A Prefill call
names the blocks that its caller holds; while the call is open the caller keeps them.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from baton.kv_cache.connector import LoadPlan, LoadRequest, LoadUpdate, TransferStats
from baton.kv_transfer.blocks import BlockFetcher, BlockSource, FetchResult, SequenceBlocks
from baton.kv_transfer.connector.background import BackgroundLoads, LoadingConnector, Outcome
from baton.types import BlockId, PrefillPath, RequestId


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
class _Load:
    request_id: RequestId
    held: HeldBlocks
    num_local_tokens: int
    block_ids: tuple[BlockId, ...]


class P2PReuser(LoadingConnector):
    """Loads what the callers of Prefill hold.

    Args:
        fetcher: Copies blocks into this instance's pool.
        loop: Where loads run.
        wake: Makes the engine poll.
        block_size: Tokens per block.
        threshold: Missing tokens from which a fetch pays.
        timeout_s: Longest time for one load.
    """

    def __init__(
        self,
        *,
        fetcher: BlockFetcher,
        loop: asyncio.AbstractEventLoop,
        wake: Callable[[], None],
        block_size: int,
        threshold: int,
        timeout_s: float,
    ) -> None:
        self._fetcher = fetcher
        self._block_size, self._threshold, self._timeout_s = block_size, threshold, timeout_s
        self._held: dict[RequestId, HeldBlocks] = {}
        self._loads: BackgroundLoads[FetchResult] = BackgroundLoads(loop, wake)

    def expect(self, request_id: RequestId, held: HeldBlocks) -> None:
        """Note what the caller of a request holds, before the request is submitted."""
        self._held[request_id] = held

    def forget(self, request_id: RequestId) -> None:
        """The call has ended: its caller may drop the blocks."""
        self._held.pop(request_id, None)
        self.cancel_load(request_id)

    def plan_load(self, request: LoadRequest, num_local_tokens: int) -> LoadPlan | None:
        """Plan what the caller holds beyond what is here, in full blocks."""
        held = self._held.get(request.request_id)
        if held is None:
            return None
        whole = min(held.num_tokens, len(request.token_ids) - 1) // self._block_size * self._block_size
        if whole - num_local_tokens < self._threshold:
            return None
        return LoadPlan(whole)

    def start_load(self, request: LoadRequest, num_local_tokens: int, block_ids: Sequence[BlockId]) -> None:
        """Start the fetch."""
        held = self._held[request.request_id]
        load = _Load(request.request_id, held, num_local_tokens, tuple(block_ids))
        self._loads.start(
            request.request_id,
            lambda cancelled: self._fetch(load, cancelled),
            lambda outcome: self._report(load, outcome),
        )

    async def _fetch(self, load: _Load, cancelled: threading.Event) -> FetchResult:
        held, size = load.held, self._block_size
        num_blocks = held.num_tokens // size
        count = min(len(held.block_ids), -(-num_blocks * size // held.source.fingerprint.block_size))
        offered = (held.block_ids[:count], held.generations[:count], np.arange(count))
        writable = np.arange(num_blocks) >= load.num_local_tokens // size
        blocks = SequenceBlocks.of(offered, load.block_ids[:num_blocks], writable)
        deadline = time.monotonic() + self._timeout_s
        return await self._fetcher.fetch_async(held.source, blocks, deadline=deadline, cancelled=cancelled)

    def _report(self, load: _Load, outcome: Outcome[FetchResult]) -> LoadUpdate:
        if outcome.value is None:
            stats = TransferStats(local_reason="reuse_failed")
            return LoadUpdate(load.request_id, load.num_local_tokens, stats=stats, error=outcome.error)
        return self._update(load, outcome.value)

    def _update(self, load: _Load, result: FetchResult) -> LoadUpdate:
        good = len(result.valid) if result.valid.all() else int(result.valid.argmin())
        tokens = good * load.held.source.fingerprint.block_size // self._block_size * self._block_size
        valid = max(load.num_local_tokens, tokens)
        stats = TransferStats(
            path=PrefillPath.REMOTE,
            source=load.held.source.instance_id,
            pipe=result.pipe_kind,
            pipe_fallback=result.fallback_reason,
            kv_bytes=result.num_bytes,
            transfer_us=round(1e6 * result.seconds),
            transferred_tokens=valid - load.num_local_tokens,
            kind="kv_transfer",
            began_ns=(ended_ns := time.perf_counter_ns()) - round(1e9 * result.seconds),
            ended_ns=ended_ns,
        )
        return LoadUpdate(load.request_id, valid, stats=stats, error=result.failure or None)
