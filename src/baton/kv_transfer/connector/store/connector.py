"""Connectors to a store, whatever that is: what was computed once, by whomever, is loaded instead of computed again.

Load: ``plan_load`` cannot ask (it must not block), so it hopes: it plans every full block beyond the local ones,
except for the last token's, which has to be computed for its logits. ``start_load`` asks and fetches in the
background, and the update says how many leading tokens came, often none; the engine computes the rest.

Save: as a prompt's blocks become complete the store is told their hashes and where they lie, and pulls those it does
not hold (a Put answers at once for the ones it does, so nothing has to be asked first). Where layers are announced as
they are computed (``follow_steps``), the store is told before a step begins and copies along. A decode instance tells
of what it generated when a request ends, so that the next turn of a conversation finds it. A request that ends earlier
keeps its blocks until the pull has ended, at most ``save_timeout_s``. When that time is up the store may still be
reading: generations, which change with a block's next use, keep what it reads then from being stored.

The store is an optimization: whatever goes wrong with it costs a request bounded time and never fails it. After
failures in a row it is left alone for a while.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from baton.config.stores import StoreAddress
from baton.errors import QueueFullError
from baton.kv_cache.arena import Arena
from baton.kv_cache.connector import LoadPlan, LoadRequest, LoadUpdate, PlannedSave, TransferStats
from baton.kv_cache.fingerprint import Fingerprint
from baton.kv_transfer.blocks import BlockFetcher, BlockSource
from baton.kv_transfer.connector.background import BackgroundLoads, LoadingConnector, Outcome
from baton.kv_transfer.connector.breaker import CircuitBreaker
from baton.kv_transfer.connector.store.backend import ChainPart, LoadProgress, StoreBackend, StoreOptions, StoreUse
from baton.kv_transfer.connector.store.client import StoreClient
from baton.kv_transfer.connector.store.cluster import StoreCluster
from baton.kv_transfer.connector.store.nodes import FixedMembership, Membership, RedisMembership
from baton.kv_transfer.connector.store.saver import StoreSaver, store_answered, store_failed
from baton.kv_transfer.connector.store.values import MooncakeValues, RedisValues, Values, ValueStore
from baton.types import BlockHash, BlockId, PrefillPath, RequestId, Tenant

MISS = "store_miss"
FAILED = "store_failed"
RESTING = "store_resting"


@dataclass(eq=False)
class _Load:
    request_id: RequestId
    num_local_tokens: int
    part: ChainPart
    block_ids: tuple[BlockId, ...]
    progress: LoadProgress = field(default_factory=LoadProgress)
    began_ns: int = field(default_factory=time.perf_counter_ns)


@dataclass(frozen=True, slots=True)
class SavedPool:
    """A pool whose blocks are kept elsewhere, too.

    Attributes:
        arena: For the generations of its blocks.
        block_size: Tokens per block.
        source: Returns where its blocks can be read, asked with every save; ``None``: nothing is saved.
    """

    arena: Arena
    block_size: int
    source: Callable[[], BlockSource] | None


class BackedConnector(LoadingConnector):
    """Loads from and saves to a store, whatever that is.

    Args:
        client: The store; closed with this.
        options: How patiently it is used.
        pool: The engine's.
        use: Where counts go.
        loop: Where I/O runs; another thread's than the engine's.
        wake: Makes the engine poll; called from any thread.
        follows_all: Save the blocks of all requests, generated ones too, and not only of those prefilled for others.

    Attributes:
        use: Counts for metrics.
    """

    def __init__(
        self,
        client: StoreBackend,
        options: StoreOptions,
        *,
        pool: SavedPool,
        use: StoreUse,
        loop: asyncio.AbstractEventLoop,
        wake: Callable[[], None],
        follows_all: bool = False,
    ) -> None:
        self.use = use
        self.follows_all = follows_all and pool.source is not None
        self._client, self._options, self._loop = client, options, loop
        self._block_size = pool.block_size
        self._next_step: Callable[[], int] | None = None
        self._breaker = CircuitBreaker(options.failures, options.cooldown_s)
        self._saver: StoreSaver | None = None
        if pool.source is not None:
            self._saver = StoreSaver(
                options,
                arena=pool.arena,
                client=client,
                breaker=self._breaker,
                use=use,
                spawn=self._spawn,
                wake=wake,
                source=pool.source,
            )
        self._loads: BackgroundLoads[None] = BackgroundLoads(loop, wake)
        self._stored: dict[RequestId, int] = {}
        """Leading blocks of running requests that came from the store, and need not go back there."""
        self._closed = False

    def follow_steps(self, next_step: Callable[[], int] | None) -> None:
        """Begin to save blocks when they begin to be computed, where the store can follow that.

        Args:
            next_step: Returns the arena's progress before the first layer of the step that begins next. The connector
                that raises that progress has to be told of a step after this one. ``None``: blocks are saved when they
                are complete.
        """
        self._next_step = next_step

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
        part = ChainPart(
            request.hashes,
            num_local_tokens // self._block_size,
            self._num_wanted(request),
            request.tenant,
            request.traceparent,
        )
        load = _Load(request.request_id, num_local_tokens, part, tuple(block_ids[part.start : part.stop]))
        if not self._breaker.allows():  # the store rests, and another request was let through to see how it is
            self.use.skipped_loads += 1
            self._loads.end(self._update(load, None, reason=RESTING))
            return
        self._loads.start(
            request.request_id, lambda cancelled: self._run(load, cancelled), lambda ended: self._report(load, ended)
        )

    def poll_loads(self) -> list[LoadUpdate]:
        """Return the loads that ended."""
        updates = super().poll_loads()
        if self.follows_all:
            for update in updates:
                if update.num_valid_tokens == update.stats.transferred_tokens > 0:
                    self._stored[update.request_id] = update.num_valid_tokens // self._block_size
        return updates

    def step_begins(self, saves: Sequence[PlannedSave]) -> None:
        """Begin to save the blocks that the step will complete."""
        if self._saver is not None and self._next_step is not None:
            self._saver.begins(saves, self._next_step(), self._stored, self._block_size)

    def blocks_belong(self, request_id: RequestId, tenant: Tenant) -> None:
        """Take note of whose blocks are saved next."""
        if self._saver is not None:
            self._saver.belongs(request_id, tenant)

    def blocks_computed(
        self, request_id: RequestId, block_ids: Sequence[BlockId], hashes: Sequence[BlockHash], num_tokens: int
    ) -> None:
        """Save the blocks that became complete."""
        if self._saver is not None:
            num_stored = self._stored.get(request_id, 0)
            self._saver.computed(request_id, block_ids, hashes[: num_tokens // self._block_size], num_stored)

    def request_finished(self, request_id: RequestId) -> bool:
        """Keep the blocks while the store is about to pull them."""
        self._stored.pop(request_id, None)
        return self._saver is not None and self._saver.finished(request_id)

    def poll_releases(self) -> list[RequestId]:
        """Return ended requests whose blocks the store has."""
        return [] if self._saver is None else self._saver.releases()

    def has_pending(self) -> bool:
        """Whether loads run or blocks are kept."""
        return super().has_pending() or (self._saver is not None and self._saver.pending)

    def close(self) -> None:
        """Cancel all loads and give all blocks back. Updates of the loads still come; does not wait for them."""
        if self._closed:
            return
        self._closed = True
        super().close()
        if self._saver is not None:
            self._saver.close()

    async def aclose(self) -> None:
        """Close when no load reads or writes blocks any more. Runs in the loop."""
        self.close()
        await self._loads.wait_ended()
        if self._saver is not None:
            await self._saver.wait_closed()
        await self._client.close()

    def _spawn(self, call: Callable[[], object]) -> None:
        self._loop.call_soon_threadsafe(call)

    def _num_wanted(self, request: LoadRequest) -> int:
        """Full blocks, the one with the last token left out."""
        return min(len(request.hashes), (len(request.token_ids) - 1) // self._block_size)

    async def _run(self, load: _Load, cancelled: threading.Event) -> None:
        deadline = time.monotonic() + self._options.load_timeout_s
        await self._client.load(load.part, load.block_ids, load.progress, deadline=deadline, cancelled=cancelled)

    def _report(self, load: _Load, ended: Outcome[None]) -> LoadUpdate:
        error = ended.error
        if ended.unwanted or ended.cancelled:
            error = "cancelled"
        elif error is None:
            store_answered(self._breaker)
        else:
            self.use.load_failures += 1
            if not isinstance(ended.failure, QueueFullError):
                store_failed(self._breaker, self.use, error)
        self.use.loads += 1
        self.use.load_hits += load.progress.num_blocks > 0
        self.use.loaded_tokens += load.progress.num_blocks * self._block_size
        self.use.loaded_bytes += load.progress.num_bytes
        return self._update(load, error, reason=MISS if error is None and not load.progress.failures else FAILED)

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
            failures=(
                *progress.failures,
                *(() if error is None else (f"store {self._options.shown_address}: {error}",)),
            ),
            local_reason="" if tokens else reason,
            kind="kv_store",
            began_ns=load.began_ns,
            ended_ns=time.perf_counter_ns(),
        )
        return LoadUpdate(load.request_id, load.num_local_tokens + tokens, stats=stats, error=error)


class StoreConnector(BackedConnector):
    """Loads from and saves to one KV store.

    Args:
        options: Which store, and how patiently.
        arena: The engine's pool.
        fingerprint: What its blocks are.
        fetcher: Copies blocks into it; belongs to the caller, who closes it after this.
        loop: Where I/O runs; another thread's than the engine's.
        wake: Makes the engine poll; called from any thread.
        source: Returns where this pool's blocks can be read, asked with every save; ``None``: nothing is saved.
        follows_all: Save the blocks of all requests, generated ones too, and not only of those prefilled for others.
    """

    def __init__(
        self,
        options: StoreOptions,
        *,
        arena: Arena,
        fingerprint: Fingerprint,
        fetcher: BlockFetcher,
        loop: asyncio.AbstractEventLoop,
        wake: Callable[[], None],
        source: Callable[[], BlockSource] | None = None,
        follows_all: bool = False,
    ) -> None:
        use = StoreUse()
        super().__init__(
            open_store(options, fingerprint=fingerprint, fetcher=fetcher, use=use),
            options,
            pool=SavedPool(arena, fingerprint.block_size, source),
            use=use,
            loop=loop,
            wake=wake,
            follows_all=follows_all,
        )


def open_store(
    options: StoreOptions, *, fingerprint: Fingerprint, fetcher: BlockFetcher, use: StoreUse
) -> StoreBackend:
    """Return a client of the store; connections are made with the first call.

    Args:
        options: Which store, and how patiently.
        fingerprint: Of this instance's pool.
        fetcher: Copies blocks into that pool; belongs to the caller, who closes it after the store.
        use: Where counts go.

    Raises:
        ConfigError: A package is missing, or an option does not fit the store.
    """
    address, kept = StoreAddress.parse(options.address), fingerprint.kept_as(options.kv_dtype)

    def connect(node: str) -> StoreClient:
        return StoreClient(
            node,
            fingerprint=kept,
            fetcher=fetcher,
            token=options.token,
            tls=options.tls,
            call_timeout_s=options.call_timeout_s,
            blocks_per_call=options.blocks_per_call,
        )

    if len(address.nodes) == 1:
        return connect(address.nodes[0])
    values: Values | None = None
    if address.redis:
        values = RedisValues(address.redis, timeout_s=options.call_timeout_s, ttl_s=options.redis_ttl_s)
    elif address.mooncake:
        values = MooncakeValues(address.mooncake)
    if values is not None:
        per_call = options.blocks_per_call
        pool = fetcher.pool
        return ValueStore(values, pool=pool, fingerprint=fingerprint, blocks_per_call=per_call, kept=kept)
    membership: Membership
    if address.discover:

        def refused(count: int) -> None:
            use.refused_nodes += count

        membership = RedisMembership(*options.discovery, options.token, refused)
    else:
        membership = FixedMembership(address.nodes)
    return StoreCluster(membership, connect, options, use)
