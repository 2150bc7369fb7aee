"""The connector to a store of any kind: what was computed once, by any instance, is loaded instead of computed again.

Load: ``plan_load`` must not block, so it cannot ask most stores. It plans every full block beyond the local ones,
except the last token's, which has to be computed for its logits. ``start_load`` asks and fetches in the background, and
the update says how many leading tokens arrived, often none; the engine computes the rest.

Save: when a prompt's blocks become complete, the store gets their hashes and places, and pulls those it does not hold.
A request that ends earlier keeps its blocks until the pull has ended, at most ``save_timeout_s``. After that the store
may still be reading; a block's generation, which changes with its next use, keeps what it then reads from being stored.
A decode instance saves what it generated when a request ends, so that the next turn of a conversation finds it.

Early saves: if layers are announced as they are computed (``follow_steps``) and the store can follow, it gets the
blocks before a step begins and copies a layer while the next one is computed. No call is needed afterwards: the pool's
progress says that a layer is complete, and if the step fails the blocks' generations are raised before the progress
goes on, so that what was copied is not stored. What a store does not accept early is saved again after the step.

The store is an optimization: its failures cost a request bounded time and never fail it. After failures in a row it is
not used for a while.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from baton.circuit_breaker import CircuitBreaker
from baton.config.stores import StoreAddress
from baton.errors import BatonError, DeadlineError, QueueFullError
from baton.kv_cache.arena import Arena
from baton.kv_cache.connector import LoadPlan, LoadRequest, LoadUpdate, PlannedSave, TransferStats
from baton.kv_cache.fingerprint import Fingerprint
from baton.kv_transfer.blocks import BlockFetcher, BlockSource
from baton.kv_transfer.blocks.fetcher import settle
from baton.kv_transfer.connector.background import BackgroundLoads, LoadingConnector, Outcome
from baton.kv_transfer.connector.store.backend import (
    ChainPart,
    LoadCall,
    LoadProgress,
    SaveCall,
    SaveResult,
    StoreBackend,
    StoreLimits,
    StoreOptions,
    StoreUse,
)
from baton.kv_transfer.connector.store.client import StoreClient
from baton.kv_transfer.connector.store.cluster import FixedMembership, Membership, RedisMembership, StoreCluster
from baton.kv_transfer.connector.store.values import MooncakeValues, RedisValues, Values, ValueStore
from baton.types import BlockHash, BlockId, PrefillPath, RequestId, Tenant

log = logging.getLogger(__name__)

MISS = "store_miss"
FAILED = "store_failed"
RESTING = "store_resting"
_LONGEST_COOLDOWN_S = 60.0


@dataclass(frozen=True, slots=True)
class SavedPool:
    """The engine's pool, as a store connector uses it.

    Attributes:
        arena: Memory of the pool, for its blocks' generations.
        block_size: Tokens per block.
        source: Returns where the pool's blocks can be read, called for every save; ``None``: nothing is saved.
    """

    arena: Arena
    block_size: int
    source: Callable[[], BlockSource] | None


@dataclass(eq=False)
class _Load:
    request_id: RequestId
    num_local_tokens: int
    part: ChainPart
    block_ids: tuple[BlockId, ...]
    progress: LoadProgress = field(default_factory=LoadProgress)
    began_ns: int = field(default_factory=time.perf_counter_ns)


class StoreConnector(LoadingConnector):
    """Loads from and saves to a store.

    Args:
        backend: The store; closed by :meth:`aclose`.
        limits: How much goes on at once, and for how long.
        pool: The engine's pool.
        use: Counters to update.
        loop: Event loop for I/O, in another thread than the engine's.
        wake: Makes the engine poll; called from any thread.
        follows_all: Save the blocks of all requests, generated tokens included, instead of only of those that are
            prefilled for other instances.

    Attributes:
        use: Counters for metrics.
    """

    def __init__(
        self,
        backend: StoreBackend,
        limits: StoreLimits,
        *,
        pool: SavedPool,
        use: StoreUse,
        loop: asyncio.AbstractEventLoop,
        wake: Callable[[], None],
        follows_all: bool = False,
    ) -> None:
        self.use = use
        self.follows_all = follows_all and pool.source is not None
        self._backend = backend
        self._limits = limits
        self._block_size = pool.block_size
        self._next_step: Callable[[], int] | None = None
        self._breaker = CircuitBreaker(limits.failures, limits.cooldown_s, longest_s=_LONGEST_COOLDOWN_S)
        self._saver: StoreSaver | None = None
        if pool.source is not None:
            self._saver = StoreSaver(
                limits,
                arena=pool.arena,
                backend=backend,
                breaker=self._breaker,
                use=use,
                loop=loop,
                wake=wake,
                source=pool.source,
            )
        self._loads: BackgroundLoads[None] = BackgroundLoads(loop, wake)
        self._stored: dict[RequestId, int] = {}
        """Leading blocks of running requests that came from the store and need not be saved again."""
        self._closed = False

    def follow_steps(self, next_step: Callable[[], int] | None) -> None:
        """Save blocks when their computation begins, if the store can follow that.

        Args:
            next_step: Returns the arena's progress before the first layer of the next step. The connector that raises
                that progress has to get ``step_begins`` after this one. ``None``: blocks are saved when complete.
        """
        self._next_step = next_step

    def plan_load(self, request: LoadRequest, num_local_tokens: int) -> LoadPlan | None:
        """Plan every full block beyond the local ones, or those that the store is known to hold; never blocks."""
        part = self._missing_part(request, num_local_tokens)
        missing = part.stop * self._block_size - num_local_tokens
        if missing < self._limits.min_load_tokens or num_local_tokens % self._block_size:
            return None
        if request.sampling.prompt_logprobs is not None:  # they need every token computed
            return None
        if self._closed or len(self._loads) >= self._limits.max_loads or self._breaker.open:
            self.use.skipped_loads += 1
            return None
        known = self._backend.count_leading(part)
        if known == 0:
            return None
        stop = part.stop if known is None else part.start + known
        return LoadPlan(num_tokens=stop * self._block_size)

    def start_load(self, request: LoadRequest, num_local_tokens: int, block_ids: Sequence[BlockId]) -> None:
        part = self._missing_part(request, num_local_tokens)
        load = _Load(request.request_id, num_local_tokens, part, tuple(block_ids[part.start : part.stop]))
        if not self._breaker.allows():  # the cooldown's trial call is another request's
            self.use.skipped_loads += 1
            self._loads.end(self._update(load, None, reason=RESTING))
            return
        self._loads.start(
            request.request_id,
            lambda cancelled: self._run_load(load, cancelled),
            lambda outcome: self._report_load(load, outcome),
        )

    def poll_loads(self) -> list[LoadUpdate]:
        updates = super().poll_loads()
        if self.follows_all:
            for update in updates:
                if update.num_valid_tokens == update.stats.transferred_tokens > 0:
                    self._stored[update.request_id] = update.num_valid_tokens // self._block_size
        return updates

    def step_begins(self, saves: Sequence[PlannedSave]) -> None:
        if self._saver is not None and self._next_step is not None:
            self._saver.begin_step(saves, self._next_step(), self._stored, self._block_size)

    def blocks_belong(self, request_id: RequestId, tenant: Tenant) -> None:
        if self._saver is not None:
            self._saver.set_owner(request_id, tenant)

    def blocks_computed(
        self, request_id: RequestId, block_ids: Sequence[BlockId], hashes: Sequence[BlockHash], num_tokens: int
    ) -> None:
        if self._saver is not None:
            num_stored = self._stored.get(request_id, 0)
            self._saver.save_blocks(request_id, block_ids, hashes[: num_tokens // self._block_size], num_stored)

    def request_finished(self, request_id: RequestId) -> bool:
        """Keep the blocks while the store is about to pull them."""
        self._stored.pop(request_id, None)
        return self._saver is not None and self._saver.finish_request(request_id)

    def poll_releases(self) -> list[RequestId]:
        return [] if self._saver is None else self._saver.poll_releases()

    def has_pending(self) -> bool:
        return super().has_pending() or (self._saver is not None and self._saver.pending)

    def close(self) -> None:
        """Cancel all loads and release all blocks. Updates of the loads still come; does not wait for them."""
        if self._closed:
            return
        self._closed = True
        super().close()
        if self._saver is not None:
            self._saver.close()

    async def aclose(self) -> None:
        """Close, and wait until no load reads or writes blocks any more. Runs in the loop."""
        self.close()
        await self._loads.wait_ended()
        if self._saver is not None:
            await self._saver.wait_closed()
        await self._backend.close()

    def _missing_part(self, request: LoadRequest, num_local_tokens: int) -> ChainPart:
        """Return the full blocks beyond the local ones, without the one that holds the last token."""
        stop = min(len(request.hashes), (len(request.token_ids) - 1) // self._block_size)
        start = num_local_tokens // self._block_size
        return ChainPart(request.hashes, start, stop, request.tenant, request.traceparent)

    async def _run_load(self, load: _Load, cancelled: threading.Event) -> None:
        deadline = time.monotonic() + self._limits.load_timeout_s
        await self._backend.load(LoadCall(load.part, load.block_ids, deadline, cancelled, load.progress))

    def _report_load(self, load: _Load, outcome: Outcome[None]) -> LoadUpdate:
        error = outcome.error
        if outcome.unwanted or outcome.cancelled:
            error = "cancelled"
        elif error is None:
            record_success(self._breaker)
        else:
            self.use.load_failures += 1
            if not isinstance(outcome.failure, QueueFullError):
                # The next requests must not wait as long for the same.
                waited_s = (time.perf_counter_ns() - load.began_ns) / 1e9
                record_failure(self._breaker, self.use, error, at_once=waited_s >= self._limits.stall_s)
        self.use.loads += 1
        self.use.load_hits += load.progress.num_blocks > 0
        self.use.loaded_tokens += load.progress.num_blocks * self._block_size
        self.use.loaded_bytes += load.progress.num_bytes
        return self._update(load, error, reason=MISS if error is None and not load.progress.failures else FAILED)

    def _update(self, load: _Load, error: str | None, *, reason: str) -> LoadUpdate:
        progress = load.progress
        tokens = progress.num_blocks * self._block_size
        failures = tuple(progress.failures)
        if error is not None:
            failures += (f"store {self._backend.name}: {error}",)
        stats = TransferStats(
            path=PrefillPath.STORE if tokens else PrefillPath.LOCAL,
            source=progress.source,
            pipe=progress.pipe,
            kv_bytes=progress.num_bytes,
            transfer_us=round(1e6 * progress.seconds),
            exposed_us=round(1e6 * progress.seconds),
            transferred_tokens=tokens,
            failures=failures,
            local_reason="" if tokens else reason,
            kind="kv_store",
            began_ns=load.began_ns,
            ended_ns=time.perf_counter_ns(),
        )
        return LoadUpdate(load.request_id, load.num_local_tokens + tokens, stats=stats, error=error)


def open_connector(
    options: StoreOptions,
    *,
    pool: SavedPool,
    fingerprint: Fingerprint,
    fetcher: BlockFetcher,
    loop: asyncio.AbstractEventLoop,
    wake: Callable[[], None],
    follows_all: bool = False,
) -> StoreConnector:
    """Return a connector to the store at an address; see :func:`open_store` and :class:`StoreConnector`.

    Args:
        options: Address and limits of the store.
        pool: The engine's pool.
        fingerprint: Fingerprint of the pool's blocks.
        fetcher: Copies blocks into the pool; closed by the caller after the connector.
        loop: Event loop for I/O, in another thread than the engine's.
        wake: Makes the engine poll; called from any thread.
        follows_all: Save the blocks of all requests, instead of only of those prefilled for other instances.

    Raises:
        ConfigError: A package is missing, or an option does not fit the store.
    """
    use = StoreUse()
    backend = open_store(options, fingerprint=fingerprint, fetcher=fetcher, use=use)
    return StoreConnector(backend, options, pool=pool, use=use, loop=loop, wake=wake, follows_all=follows_all)


def open_store(
    options: StoreOptions, *, fingerprint: Fingerprint, fetcher: BlockFetcher, use: StoreUse
) -> StoreBackend:
    """Return a client of the store at an address; connections are made with the first call.

    Args:
        options: Address and limits of the store.
        fingerprint: Fingerprint of this instance's pool.
        fetcher: Copies blocks into that pool; closed by the caller after the store.
        use: Counters to update.

    Raises:
        ConfigError: A package is missing, or an option does not fit the store.
    """
    address = StoreAddress.parse(options.address)
    stored = fingerprint.kept_as(options.kv_dtype)

    def connect(node: str) -> StoreClient:
        return StoreClient(
            node,
            fingerprint=stored,
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
        return ValueStore(
            values,
            pool=fetcher.pool,
            fingerprint=fingerprint,
            blocks_per_call=options.blocks_per_call,
            stored=stored,
            stall_s=options.stall_s,
        )
    membership: Membership
    if address.discover:

        def count_refused(count: int) -> None:
            use.refused_nodes += count

        membership = RedisMembership(*options.discovery, options.token, count_refused)
    else:
        membership = FixedMembership(address.nodes)
    return StoreCluster(membership, connect, options, use)


# Saving


def record_failure(breaker: CircuitBreaker, use: StoreUse, why: str, *, at_once: bool = False) -> None:
    """Record a failure of the store; logs one line when the breaker opens, however many failures follow.

    Args:
        breaker: Breaker of the store.
        use: Counters to update.
        why: Description of the failure, for the log.
        at_once: Open the breaker, although it is the first failure.
    """
    if breaker.failed(at_once=at_once):
        log.warning("the KV store is left alone for a while: %s", why)
    use.times_left_alone = breaker.num_opened


def record_success(breaker: CircuitBreaker) -> None:
    """Record an answer of the store; logs one line when that closes the breaker."""
    if breaker.succeeded():
        log.warning("the KV store answers again")


@dataclass(eq=False)
class _Save:
    """One request's blocks on their way to the store; guarded by the saver's lock.

    Attributes:
        hashes: Hashes of the leading blocks that are saved or waiting.
        waiting: Ids and generations of the last of these blocks, which were not put yet.
        num_computing: How many of the last waiting blocks the running step is about to complete.
        ready: Progress of the pool before that step.
        tried: Whether the store got these blocks early.
        following: The early call, while it lasts.
        running: Whether a task works on this save.
        given_up: Whether the rest of the request's blocks is not saved.
        ends_at: Once the request has ended: latest time to release its blocks, in seconds of ``time.monotonic()``.
    """

    request_id: RequestId
    tenant: Tenant | None = None
    hashes: Sequence[BlockHash] = ()
    waiting: deque[tuple[BlockId, int]] = field(default_factory=deque)
    num_computing: int = 0
    ready: int = 0
    tried: bool = False
    following: asyncio.Task[SaveResult] | None = None
    running: bool = False
    given_up: bool = False
    ends_at: float | None = None

    def give_up(self) -> None:
        """Save nothing more of this request."""
        self.given_up = True
        self.waiting.clear()


class StoreSaver:
    """Saves blocks: one call per request at a time, ``max_puts`` in all, and as many early ones.

    The public methods but :meth:`close` and :meth:`wait_closed` are called in the engine's thread; everything else
    runs in the loop.

    Args:
        limits: How much goes on at once, and for how long.
        arena: Memory of the engine's pool, for its blocks' generations.
        backend: The store.
        breaker: Breaker of the connector's loads and saves.
        use: Counters to update.
        loop: Event loop for I/O.
        wake: Makes the engine poll; called from any thread.
        source: Returns where the pool's blocks can be read.
    """

    def __init__(
        self,
        limits: StoreLimits,
        *,
        arena: Arena,
        backend: StoreBackend,
        breaker: CircuitBreaker,
        use: StoreUse,
        loop: asyncio.AbstractEventLoop,
        wake: Callable[[], None],
        source: Callable[[], BlockSource],
    ) -> None:
        self._limits = limits
        self._arena = arena
        self._backend = backend
        self._breaker = breaker
        self._use = use
        self._loop = loop
        self._wake = wake
        self._source = source
        self._lock = threading.Lock()
        self._saves: dict[RequestId, _Save] = {}
        self._releases: deque[RequestId] = deque()
        self._turns = asyncio.Semaphore(limits.max_puts)
        self._early_turns = asyncio.Semaphore(limits.max_puts)
        self._computing: dict[RequestId, list[BlockId]] = {}  # blocks that the running step writes; engine's thread
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False
        self._owner: tuple[RequestId, Tenant] | None = None

    def set_owner(self, request_id: RequestId, tenant: Tenant) -> None:
        """Set the tenant that owns the blocks of the next :meth:`save_blocks`."""
        self._owner = request_id, tenant

    def begin_step(
        self, saves: Sequence[PlannedSave], ready: int, stored: Mapping[RequestId, int], block_size: int
    ) -> None:
        """Begin to save the blocks that the next step is going to complete, if the store can follow.

        Args:
            saves: The step's requests and the blocks that it completes.
            ready: Progress of the pool before the step's first layer.
            stored: Per request, the number of leading blocks that the store holds.
            block_size: Tokens per block.
        """
        self._invalidate_computing(list(self._computing))
        if not self._backend.follows:
            return
        for planned in saves:
            first = stored.get(planned.request_id, 0)
            with self._lock:
                save = self._saves.get(planned.request_id)
                if save is None and len(planned.hashes) > first:
                    save = self._open_save(planned.request_id, planned.tenant, planned.hashes[:first])
                if save is None or not self._add_blocks(save, planned.block_ids, planned.hashes):
                    continue
                save.num_computing = min(len(save.waiting), len(planned.hashes) - planned.num_computed // block_size)
                save.ready = ready
                save.tried = False
                blocks = planned.block_ids[planned.num_computed // block_size : len(planned.hashes)]
                self._computing[planned.request_id] = list(blocks)
                self._start_task(save)

    def save_blocks(
        self, request_id: RequestId, block_ids: Sequence[BlockId], hashes: Sequence[BlockHash], num_stored: int = 0
    ) -> None:
        """Begin to save a request's complete blocks that were not saved yet.

        Args:
            request_id: The request.
            block_ids: Blocks of the request, from its first token on.
            hashes: Hashes of the leading complete blocks.
            num_stored: Number of leading blocks that came from the store.
        """
        owner = self._owner
        self._owner = None
        tenant = owner[1] if owner is not None and owner[0] == request_id else None
        self._computing.pop(request_id, None)
        with self._lock:
            save = self._saves.get(request_id)
            if save is None:
                if len(hashes) <= num_stored:
                    return
                save = self._open_save(request_id, tenant, hashes[:num_stored])
                if save is None:
                    self._use.skipped_saves += 1
                    return
            save.num_computing = 0
            self._add_blocks(save, block_ids, hashes)
            self._start_task(save)

    def finish_request(self, request_id: RequestId) -> bool:
        """Return whether an ended request's blocks have to be kept until :meth:`poll_releases` returns it."""
        self._invalidate_computing([request_id])
        with self._lock:
            save = self._saves.get(request_id)
            if save is None:
                return False
            if not save.running:
                del self._saves[request_id]
                return False
            save.ends_at = time.monotonic() + self._limits.save_timeout_s
            return True

    def poll_releases(self) -> list[RequestId]:
        """Return ended requests whose blocks need not be kept any more."""
        with self._lock:
            released = list(self._releases)
            self._releases.clear()
        return released

    @property
    def pending(self) -> bool:
        """Whether blocks of ended requests are kept or about to be released."""
        with self._lock:
            return bool(self._releases) or any(save.ends_at is not None for save in self._saves.values())

    def close(self) -> None:
        """Stop saving and release all blocks; any thread."""
        with self._lock:
            self._closed = True
            for save in list(self._saves.values()):
                save.give_up()
                self._end_task(save)
        self._loop.call_soon_threadsafe(self._cancel_tasks)
        self._wake()

    async def wait_closed(self) -> None:
        """Wait until no task is left, after :meth:`close`."""
        while self._tasks:
            await asyncio.wait(self._tasks)

    def _open_save(self, request_id: RequestId, tenant: Tenant | None, hashes: Sequence[BlockHash]) -> _Save | None:
        """Begin to save a request whose first blocks the store holds, if limits allow it; lock held."""
        if self._closed or len(self._saves) >= self._limits.max_saves or not self._breaker.allows():
            return None
        save = self._saves[request_id] = _Save(request_id, tenant, tuple(hashes))
        return save

    def _add_blocks(self, save: _Save, block_ids: Sequence[BlockId], hashes: Sequence[BlockHash]) -> bool:
        """Add a request's blocks beyond those added before; ``False``: there are none. Lock held."""
        first = len(save.hashes)
        hashes = tuple(hashes)
        if first >= len(hashes) or save.given_up:
            return False
        if save.hashes != hashes[:first]:  # another request of the same name, whose blocks are still on their way
            self._use.skipped_saves += 1
            return False
        save.hashes = hashes
        ids = list(block_ids[first : len(hashes)])
        save.waiting.extend(zip(ids, self._arena.generations[ids].tolist(), strict=True))
        return True

    def _start_task(self, save: _Save) -> None:
        """Have a task put the waiting blocks; lock held."""
        if save.waiting and not save.running and not save.given_up:
            save.running = True
            self._loop.call_soon_threadsafe(self._create_task, save)

    def _invalidate_computing(self, request_ids: Sequence[RequestId]) -> None:
        """Raise the generations of blocks whose step was not reported as complete, so that they are not stored."""
        for request_id in request_ids:
            blocks = self._computing.pop(request_id, None)
            if blocks is None:
                continue
            self._arena.generations[blocks] += np.uint64(1)
            with self._lock:
                save = self._saves.get(request_id)
                if save is not None:
                    save.give_up()
                    self._loop.call_soon_threadsafe(functools.partial(self._unfollow, save))

    def _unfollow(self, save: _Save) -> None:
        if save.following is not None:
            save.following.cancel()

    def _cancel_tasks(self) -> None:
        for task in self._tasks:
            task.cancel()

    def _create_task(self, save: _Save) -> None:
        task = self._loop.create_task(self._run(save), name=f"save {save.request_id}")
        self._tasks.add(task)
        task.add_done_callback(lambda task: self._on_task_done(task, save))

    def _on_task_done(self, task: asyncio.Task[None], save: _Save) -> None:
        """Release the blocks of a task that failed; a done callback also runs for one that never began."""
        self._tasks.discard(task)
        if not task.cancelled():
            error = task.exception()
            if error is None:
                return  # it ended the save itself; ``running`` may be the next task's by now
            log.error(
                "saving blocks of %s failed", save.request_id, exc_info=error, extra={"request_id": save.request_id}
            )
        with self._lock:
            if not save.running:
                return
            save.give_up()
            self._end_task(save)
        self._wake()

    async def _run(self, save: _Save) -> None:
        while True:
            with self._lock:
                call = self._next_call(save)
                if call is None:
                    was_kept = save.ends_at is not None
                    self._end_task(save)
                    break
            if call.ready is not None:
                await self._save_early(save, call)
            elif not await self._save_complete(save, call):
                with self._lock:
                    save.give_up()
        if was_kept:
            self._wake()

    def _next_call(self, save: _Save) -> SaveCall | None:
        """Return the next call: complete blocks, else those that are being computed. Lock held."""
        if save.given_up:
            return None
        complete = len(save.waiting) - save.num_computing
        is_early = not complete and not save.tried
        count = min(len(save.waiting) if is_early else complete, self._limits.blocks_per_call)
        if not count:
            return None
        start = len(save.hashes) - len(save.waiting)
        if is_early:  # they keep waiting until the store holds them
            save.tried = True
            items = list(itertools.islice(save.waiting, count))
        else:
            items = [save.waiting.popleft() for _ in range(count)]
        return SaveCall(
            self._source(),
            ChainPart(save.hashes, start, start + count, save.tenant),
            [block_id for block_id, _ in items],
            [generation for _, generation in items],
            deadline=min(time.monotonic() + self._limits.save_timeout_s, save.ends_at or float("inf")),
            ready=save.ready if is_early else None,
        )

    async def _save_early(self, save: _Save, call: SaveCall) -> None:
        """Save blocks while they are computed; those that the store does not accept are saved again later."""
        if self._early_turns.locked():
            return
        async with self._early_turns:
            if save.given_up:
                return
            task = save.following = asyncio.ensure_future(self._backend.save(call))
            try:
                await asyncio.wait([task])
            finally:
                save.following = None
                task.cancel()
                await settle([task])
        if task.cancelled():
            return
        if (error := task.exception()) is not None:
            if not isinstance(error, BatonError):
                raise error
            log.debug(
                "%d blocks of %s were not saved early: %s",
                len(call.part),
                save.request_id,
                error.message,
                extra={"request_id": save.request_id},
            )
            return
        result = task.result()
        self._use.saved_bytes += result.num_bytes
        if result.num_blocks < len(call.part):
            return
        record_success(self._breaker)
        self._use.saves += 1
        self._use.saved_blocks += result.num_blocks
        self._use.followed_blocks += result.num_blocks
        with self._lock:
            if not save.given_up:
                for _ in range(len(call.part)):
                    save.waiting.popleft()
                save.num_computing = min(save.num_computing, len(save.waiting))

    async def _save_complete(self, save: _Save, call: SaveCall) -> bool:
        """Save complete blocks; ``False``: that failed."""
        try:
            async with asyncio.timeout(call.deadline - time.monotonic()):
                await self._turns.acquire()
        except TimeoutError:
            self._record_failed_save(save, call, DeadlineError("no turn in time"))
            return False
        try:
            result = await self._backend.save(call)
        except BatonError as error:
            if not isinstance(error, QueueFullError):
                record_failure(self._breaker, self._use, error.message)
            self._record_failed_save(save, call, error)
            return False
        finally:
            self._turns.release()
        record_success(self._breaker)
        self._use.saves += 1
        self._use.saved_blocks += result.num_blocks
        self._use.saved_bytes += result.num_bytes
        return True

    def _record_failed_save(self, save: _Save, call: SaveCall, error: BatonError) -> None:
        self._use.save_failures += 1
        log.debug(
            "%d blocks of %s were not saved: %s",
            len(call.part),
            save.request_id,
            error.message,
            extra={"request_id": save.request_id},
        )

    def _end_task(self, save: _Save) -> None:
        """Mark a save as not running; the blocks of an ended request are released. Lock held."""
        save.running = False
        if save.ends_at is not None and self._saves.get(save.request_id) is save:
            del self._saves[save.request_id]
            self._releases.append(save.request_id)
