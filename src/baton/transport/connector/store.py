"""The connector to a KV store: what was computed once, by whomever, is loaded instead of computed again.

Load: ``plan_load`` cannot ask (it must not block), so it hopes: it plans every full block beyond the local ones,
except for the last token's, which has to be computed for its logits. ``start_load`` asks and fetches in the
background, and the update says how many leading tokens came, often none; the engine computes the rest.

Save: as a prompt's blocks become complete the store is told their hashes and where they lie, and pulls those it does
not hold (a Put answers at once for the ones it does, so nothing has to be asked first). A request that ends earlier
keeps its blocks until the pull has ended, at most ``save_timeout_s``. When that time is up the store may still be
reading: generations, which change with a block's next use, keep what it reads then from being stored.

The store is an optimization: whatever goes wrong with it costs a request bounded time and never fails it. After
failures in a row it is left alone for a while.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from baton.errors import BatonError, QueueFullError
from baton.kv.arena import KVArena
from baton.kv.connector import KVConnector, LoadPlan, LoadRequest, LoadUpdate, TransferStats
from baton.kv.fingerprint import Fingerprint
from baton.transport.blocks import BlockFetcher, BlockSource
from baton.transport.connector.breaker import CircuitBreaker
from baton.transport.connector.store_client import LoadProgress, StoreClient
from baton.transport.connector.store_saver import StoreSaver
from baton.transport.connector.store_use import StoreOptions, StoreUse
from baton.types import BlockHash, BlockId, PrefillPath, RequestId

__all__ = ["StoreConnector", "StoreOptions", "StoreUse"]

log = logging.getLogger(__name__)

MISS = "store_miss"
FAILED = "store_failed"
RESTING = "store_resting"


@dataclass(eq=False)
class _Load:
    request_id: RequestId
    num_local_tokens: int
    hashes: tuple[BlockHash, ...]
    block_ids: tuple[BlockId, ...]
    cancelled: threading.Event = field(default_factory=threading.Event)
    progress: LoadProgress = field(default_factory=LoadProgress)
    task: asyncio.Task[None] | None = None


class StoreConnector(KVConnector):
    """Loads from and saves to one KV store.

    Args:
        options: Which store, and how patiently.
        arena: The engine's pool.
        fingerprint: What its blocks are.
        fetcher: Copies blocks into it; belongs to the caller, who closes it after this.
        loop: Where I/O runs; another thread's than the engine's.
        wake: Makes the engine poll; called from any thread.
        source: Returns where this pool's blocks can be read, asked with every save; ``None``: nothing is saved.

    Attributes:
        use: Counts for metrics.
    """

    def __init__(
        self,
        options: StoreOptions,
        *,
        arena: KVArena,
        fingerprint: Fingerprint,
        fetcher: BlockFetcher,
        loop: asyncio.AbstractEventLoop,
        wake: Callable[[], None],
        source: Callable[[], BlockSource] | None = None,
    ) -> None:
        self.use = StoreUse()
        self._options, self._loop, self._wake = options, loop, wake
        self._block_size = fingerprint.block_size
        self._breaker = CircuitBreaker(options.failures, options.cooldown_s)
        self._client = StoreClient(
            options.address,
            fingerprint=fingerprint,
            fetcher=fetcher,
            token=options.token,
            call_timeout_s=options.call_timeout_s,
            blocks_per_call=options.blocks_per_call,
        )
        self._saver: StoreSaver | None = None
        if source is not None:
            self._saver = StoreSaver(
                options,
                arena=arena,
                client=self._client,
                breaker=self._breaker,
                use=self.use,
                spawn=self._spawn,
                wake=wake,
                source=source,
            )
        self._loads: dict[RequestId, _Load] = {}
        self._done: deque[LoadUpdate] = deque()
        self._closed = False

    def plan_load(self, request: LoadRequest, num_local_tokens: int) -> LoadPlan | None:
        """Hope for every full block beyond the local ones; never asks, never blocks."""
        blocks = self._num_wanted(request)
        missing = blocks * self._block_size - num_local_tokens
        if missing < self._options.min_load_tokens or num_local_tokens % self._block_size:
            return None
        if request.sampling.prompt_logprobs is not None:  # they need every token computed
            return None
        if self._closed or len(self._loads) >= self._options.max_loads or self._breaker.open:
            self.use.skipped_loads += 1
            return None
        return LoadPlan(num_tokens=blocks * self._block_size)

    def start_load(self, request: LoadRequest, num_local_tokens: int, block_ids: Sequence[BlockId]) -> None:
        """Ask and fetch in the background."""
        wanted = slice(num_local_tokens // self._block_size, self._num_wanted(request))
        load = _Load(request.request_id, num_local_tokens, tuple(request.hashes[wanted]), tuple(block_ids[wanted]))
        self._loads[request.request_id] = load
        if not self._breaker.allows():  # the store rests, and another request was let through to see how it is
            self.use.skipped_loads += 1
            self._done.append(self._update(load, None, reason=RESTING))
            self._wake()
            return
        try:
            self._spawn(lambda: self._start(load))
        except BaseException:
            del self._loads[request.request_id]
            raise

    def cancel_load(self, request_id: RequestId) -> None:
        """Stop a load; its update still comes."""
        load = self._loads.get(request_id)
        if load is not None:
            load.cancelled.set()
            self._spawn(lambda: load.task is not None and load.task.cancel())

    def poll_loads(self) -> list[LoadUpdate]:
        """Return the loads that ended."""
        updates = []
        while self._done:
            update = self._done.popleft()
            self._loads.pop(update.request_id, None)
            updates.append(update)
        return updates

    def blocks_computed(
        self, request_id: RequestId, block_ids: Sequence[BlockId], hashes: Sequence[BlockHash], num_tokens: int
    ) -> None:
        """Save the blocks that became complete."""
        if self._saver is not None:
            self._saver.computed(request_id, block_ids, hashes[: num_tokens // self._block_size])

    def request_finished(self, request_id: RequestId) -> bool:
        """Keep the blocks while the store is about to pull them."""
        return self._saver is not None and self._saver.finished(request_id)

    def poll_releases(self) -> list[RequestId]:
        """Return ended requests whose blocks the store has."""
        return [] if self._saver is None else self._saver.releases()

    def has_pending(self) -> bool:
        """Whether loads run or blocks are kept."""
        return bool(self._loads) or (self._saver is not None and self._saver.pending)

    def close(self) -> None:
        """Cancel all loads and give all blocks back. Updates of the loads still come; does not wait for them."""
        if self._closed:
            return
        self._closed = True
        for request_id in list(self._loads):
            self.cancel_load(request_id)
        if self._saver is not None:
            self._saver.close()

    async def aclose(self) -> None:
        """Close, wait until nobody reads or writes blocks any more, and hang up. Runs in the loop."""
        self.close()
        await asyncio.sleep(0)  # what close() asked the loop to do comes first
        tasks = [load.task for load in self._loads.values() if load.task is not None]
        if tasks:
            await asyncio.wait(tasks)
        if self._saver is not None:
            await self._saver.wait_closed()
        await self._client.close()

    def _spawn(self, call: Callable[[], object]) -> None:
        self._loop.call_soon_threadsafe(call)

    def _num_wanted(self, request: LoadRequest) -> int:
        """Full blocks, the one with the last token left out."""
        return min(len(request.hashes), (len(request.token_ids) - 1) // self._block_size)

    def _start(self, load: _Load) -> None:
        load.task = self._loop.create_task(self._run(load), name=f"load {load.request_id} from the store")
        # Not at the end of the coroutine: one that is cancelled before its first step never gets there.
        load.task.add_done_callback(lambda task: self._ended(load, task))

    async def _run(self, load: _Load) -> None:
        deadline = time.monotonic() + self._options.load_timeout_s
        await self._client.load(load.hashes, load.block_ids, load.progress, deadline=deadline, cancelled=load.cancelled)

    def _ended(self, load: _Load, task: asyncio.Task[None]) -> None:
        error: str | None = None
        failure = None if task.cancelled() else task.exception()
        if task.cancelled() or load.cancelled.is_set():
            error = "cancelled"
        elif failure is None:
            self._breaker.succeeded()
        else:
            error = failure.message if isinstance(failure, BatonError) else f"{type(failure).__name__}: {failure}"
            self.use.load_failures += 1
            if not isinstance(failure, BatonError):
                log.error("load of %s from the store failed", load.request_id, exc_info=failure)
            if not isinstance(failure, QueueFullError):
                self._breaker.failed()
                self.use.times_left_alone = self._breaker.num_opened
        self.use.loads += 1
        self.use.load_hits += load.progress.num_blocks > 0
        self.use.loaded_tokens += load.progress.num_blocks * self._block_size
        self.use.loaded_bytes += load.progress.num_bytes
        self._done.append(self._update(load, error, reason=MISS if error is None else FAILED))
        self._wake()

    def _update(self, load: _Load, error: str | None, *, reason: str) -> LoadUpdate:
        progress = load.progress
        tokens = progress.num_blocks * self._block_size
        stats = TransferStats(
            path=PrefillPath.STORE if tokens else PrefillPath.LOCAL,
            source=progress.source,
            pipe=progress.pipe,
            kv_bytes=progress.num_bytes,
            transfer_us=round(1e6 * progress.seconds),
            exposed_us=round(1e6 * progress.seconds),
            transferred_tokens=tokens,
            failures=() if error is None else (f"store {self._options.address}: {error}",),
            local_reason="" if tokens else reason,
        )
        return LoadUpdate(load.request_id, load.num_local_tokens + tokens, stats=stats, error=error)
