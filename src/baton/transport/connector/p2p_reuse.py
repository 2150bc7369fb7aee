"""The prefill side's way back: KV that the asking decode instance holds already is fetched, not computed again.

In a conversation the decode instance has the KV of what it generated, and the prefill instance has not. A Prefill call
names the blocks that its caller holds; while the call is open the caller keeps them.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from baton.errors import BatonError
from baton.kv.connector import KVConnector, LoadPlan, LoadRequest, LoadUpdate, TransferStats
from baton.transport.blocks import BlockFetcher, BlockSource, FetchResult, SequenceBlocks
from baton.types import BlockId, PrefillPath, RequestId

log = logging.getLogger(__name__)


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


@dataclass(eq=False)
class _Load:
    request_id: RequestId
    held: HeldBlocks
    num_local_tokens: int
    block_ids: tuple[BlockId, ...]
    cancelled: threading.Event = field(default_factory=threading.Event)
    task: asyncio.Task[FetchResult] | None = None


class P2PReuser(KVConnector):
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
        self._fetcher, self._loop, self._wake = fetcher, loop, wake
        self._block_size, self._threshold, self._timeout_s = block_size, threshold, timeout_s
        self._held: dict[RequestId, HeldBlocks] = {}
        self._loads: dict[RequestId, _Load] = {}
        self._done: deque[LoadUpdate] = deque()

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
        self._loads[request.request_id] = load
        self._loop.call_soon_threadsafe(self._start, load)

    def cancel_load(self, request_id: RequestId) -> None:
        """Stop a load; its update still comes."""
        load = self._loads.get(request_id)
        if load is not None:
            load.cancelled.set()

    def poll_loads(self) -> list[LoadUpdate]:
        """Return the loads that ended."""
        updates = []
        while self._done:
            update = self._done.popleft()
            self._loads.pop(update.request_id, None)
            updates.append(update)
        return updates

    def has_pending(self) -> bool:
        """Whether loads run."""
        return bool(self._loads)

    def close(self) -> None:
        """Cancel all loads."""
        for request_id in list(self._loads):
            self.cancel_load(request_id)

    def _start(self, load: _Load) -> None:
        load.task = self._loop.create_task(self._fetch(load), name=f"reuse {load.request_id}")
        load.task.add_done_callback(lambda task: self._report(load, task))

    async def _fetch(self, load: _Load) -> FetchResult:
        held, size = load.held, self._block_size
        num_blocks = held.num_tokens // size
        count = min(len(held.block_ids), -(-num_blocks * size // held.source.fingerprint.block_size))
        offered = (held.block_ids[:count], held.generations[:count], np.arange(count))
        writable = np.arange(num_blocks) >= load.num_local_tokens // size
        blocks = SequenceBlocks.of(offered, load.block_ids[:num_blocks], writable)
        deadline = time.monotonic() + self._timeout_s
        return await self._fetcher.fetch_async(held.source, blocks, deadline=deadline, cancelled=load.cancelled)

    def _report(self, load: _Load, task: asyncio.Task[FetchResult]) -> None:
        stats, valid, error = TransferStats(local_reason="reuse_failed"), load.num_local_tokens, "cancelled"
        failure = None if task.cancelled() else task.exception()
        if isinstance(failure, BatonError):
            error = failure.message
        elif failure is not None:
            log.error("fetching held KV of %s failed", load.request_id, exc_info=failure)
            error = f"{type(failure).__name__}: {failure}"
        elif not task.cancelled():
            stats, valid, error = self._update(load, task.result())
        self._done.append(LoadUpdate(load.request_id, valid, stats=stats, error=error or None))
        self._wake()

    def _update(self, load: _Load, result: FetchResult) -> tuple[TransferStats, int, str]:
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
        )
        return stats, valid, "" if good == len(result.valid) else "held blocks changed while they were fetched"
