"""The decode side of point-to-point hand-over: ask a prefill instance, fetch what it offers while it computes.

One coroutine per load, one state: it tries the candidates in order, fetches each offer as it comes (block by block,
only what is missing), and reports how many leading tokens are valid. Whatever ends it (success, failure, cancel), the
report comes only after the last copy into our blocks has ended, so the engine may reuse them at once.

Fencing: a block counts only if its generation was unchanged after the copy *and* the Prefill stream, which is the
lease, was still open then.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np

from baton.background import is_cancelled
from baton.errors import BatonError, DeadlineError, NotFoundError, QueueFullError, StaleBlockError, UnavailableError
from baton.kv_cache.arena import Arena
from baton.kv_cache.connector import LoadPlan, LoadRequest, LoadUpdate, TransferStats
from baton.kv_transfer.blocks import BlockFetcher, BlockSource, FetchResult, SequenceBlocks
from baton.kv_transfer.blocks.fetcher import settle
from baton.kv_transfer.connector.background import BackgroundLoads, LoadingConnector, Outcome
from baton.kv_transfer.connector.p2p.prefill_stream import (
    Accepted,
    Acknowledged,
    HeldBlocks,
    Offer,
    PrefillDialer,
    PrefillEvent,
    Queued,
)
from baton.kv_transfer.streams import StallLimit
from baton.kv_transfer.types import Valid
from baton.types import BlockId, PrefillPath, RequestId, TokenLogprob

T = TypeVar("T")
GRACE_S = 2.0
"""Seconds that an instance has to answer here if it does not answer a router; a busy one reports every second."""
ACKNOWLEDGE_S = 1.0
"""Seconds after which a call that is not acknowledged goes to another instance: a live one acknowledges within
milliseconds, whatever its engine does."""
_MAX_SOURCES = 1024
REST_S = 5.0
"""Seconds for which an instance that did not acknowledge a call is asked last."""


class CandidateWatch:
    """Patience with prefill instances. Used in one event loop.

    A load waits for an instance for ``stall_s`` after its last word. Where a router, too, has no answer from it, that
    becomes :data:`GRACE_S`, also for loads that wait already. Neither alone is believed: a router may be cut off from
    an instance that this process hears well.

    A call that another instance could serve waits :data:`ACKNOWLEDGE_S` for its acknowledgement. If none could, the
    prompt would have to be computed here, which justifies a longer wait.

    Args:
        stall_s: Seconds without a word after which an instance is given up.
    """

    def __init__(self, stall_s: float) -> None:
        self._stall_s = stall_s
        self._said: dict[object, frozenset[str]] = {}
        self._waiting: dict[str, set[asyncio.Timeout]] = {}
        self._rests: dict[str, float] = {}

    def is_silent(self, address: str) -> bool:
        """Whether a router says that an instance does not answer."""
        return any(address in addresses for addresses in self._said.values())

    def set_silent(self, router: object, addresses: frozenset[str]) -> None:
        """Set the instances that do not answer a router now; replaces its previous set."""
        news = addresses - self._said.pop(router, frozenset())
        if addresses:
            self._said[router] = addresses
        for address in news:
            for patience in self._waiting.get(address, ()):
                _shorten(patience)

    def is_last_choice(self, address: str) -> bool:
        """Whether an instance does not answer a router, or did not acknowledge a call a moment ago."""
        return self.is_silent(address) or self._rests.get(address, 0.0) > time.monotonic()

    async def wait(self, address: str, awaitable: Awaitable[T], *, first_word: bool = False) -> T:
        """Wait for a message of an instance.

        Args:
            address: Address of the instance.
            awaitable: Resolves when the message arrives.
            first_word: Wait only as long as for the acknowledgement of a call.

        Raises:
            DeadlineError: It was silent for too long.
        """
        limit_s = min(ACKNOWLEDGE_S, self._stall_s) if first_word else self._stall_s
        try:
            async with asyncio.timeout(limit_s) as patience:
                with self._registered(address, patience):
                    word = await awaitable
        except TimeoutError:
            if first_word:
                now = time.monotonic()
                self._rests = {late: until for late, until in self._rests.items() if until > now}
                self._rests[address] = now + REST_S
                raise DeadlineError(f"it did not acknowledge the call within {limit_s:g} s") from None
            if self.is_silent(address):
                raise DeadlineError("it answers neither here nor a router") from None
            raise DeadlineError(f"no word for {limit_s:g} s") from None
        self._rests.pop(address, None)
        return word

    @contextlib.contextmanager
    def _registered(self, address: str, patience: asyncio.Timeout) -> Iterator[None]:
        if self.is_silent(address):
            _shorten(patience)
        waiting = self._waiting.setdefault(address, set())
        waiting.add(patience)
        try:
            yield
        finally:
            waiting.discard(patience)
            if not waiting:
                self._waiting.pop(address, None)


def _shorten(patience: asyncio.Timeout) -> None:
    until = asyncio.get_running_loop().time() + GRACE_S
    now = patience.when()
    if not patience.expired() and (now is None or until < now):
        patience.reschedule(until)


log = logging.getLogger(__name__)


@dataclass
class _Load:
    """What one load knows."""

    request: LoadRequest
    num_local_tokens: int
    block_ids: tuple[BlockId, ...]
    valid: np.ndarray
    groups: int = 1
    cancelled: threading.Event = field(default_factory=threading.Event)
    failures: list[str] = field(default_factory=list)
    kv_bytes: int = 0
    transfer_s: float = 0.0
    exposed_s: float = 0.0
    began_ns: int = 0
    ended_ns: int = 0
    pipe: str = ""
    pipe_fallback: str = ""
    source: str = ""
    source_cached_tokens: int = 0
    first_token: TokenLogprob | None = None
    local_reason: str = "prefill_failed"


class _Attempt:
    """One candidate's part of a load: which tokens have come, counted in what both block sizes have in common."""

    def __init__(self, load: _Load, source: BlockSource, block_size: int, state_blocks: int) -> None:
        self.source = source
        self._load = load
        self._unit = math.gcd(block_size, source.fingerprint.block_size)
        self._per_local = block_size // self._unit
        self._per_remote = source.fingerprint.block_size // self._unit
        self._units = np.repeat(load.valid, self._per_local)
        num_units = -(-len(load.request.token_ids) // self._unit)
        states = len(self._units) - state_blocks * self._per_local
        self._units[num_units:states] = True  # of the last block, what no token lies in
        self.num_blocks = -(-num_units // self._per_remote) + state_blocks
        """Blocks of the source that the request has."""

    def wanted(self, offer: Offer) -> list[int]:
        """Which of an offer's blocks bring something new."""
        first = offer.first_block
        size = self._per_remote
        starts = [(first + i) * size for i in range(len(offer.block_ids))]
        return [i for i, start in enumerate(starts) if not self._units[start : start + size].all()]

    def blocks(self, offer: Offer, wanted: list[int]) -> SequenceBlocks:
        """What to fetch of an offer."""
        offered = (
            [offer.block_ids[i] for i in wanted],
            [offer.generations[i] for i in wanted],
            [offer.first_block + i for i in wanted],
        )
        load = self._load
        local_ids = np.array(load.block_ids).reshape(load.groups, -1)[:, : len(load.valid)]
        return SequenceBlocks.of(offered, local_ids, ~load.valid, offer.ready)

    def mark_valid(self, offer: Offer, wanted: list[int], valid: Valid) -> None:
        """Record which blocks a fetch brought."""
        for i in np.asarray(wanted)[valid]:
            start = (offer.first_block + int(i)) * self._per_remote
            self._units[start : start + self._per_remote] = True
        self._load.valid[:] = self._units.reshape(-1, self._per_local).all(axis=1)


@dataclass
class _Events:
    """The fetches that one candidate's stream led to."""

    fetches: list[asyncio.Task[None]] = field(default_factory=list)
    early: dict[object, tuple[asyncio.Task[FetchResult], StallLimit]] = field(default_factory=dict)
    """Fetches of blocks that are being computed, by their offer's key, until it is repeated, and their limits."""
    copies: list[asyncio.Task[FetchResult]] = field(default_factory=list)
    """All of these since the stream began."""
    num_ready_tokens: int = 0
    ready_at: float = 0.0


@dataclass(frozen=True, slots=True)
class OwnPool:
    """An instance's pool, as its loader uses it.

    Attributes:
        fetcher: Copies blocks into it.
        groups: Layer groups that have blocks of their own.
        arena: For the generations of the blocks that are there.
        block_size: Tokens per block.
        source: Returns where its blocks can be read.
        state_blocks: Blocks behind those of a prompt's KV that get its recurrent states.
    """

    fetcher: BlockFetcher
    arena: Arena
    block_size: int
    source: Callable[[], BlockSource]
    groups: int = 1
    state_blocks: int = 0


class P2PConsumer(LoadingConnector):
    """Connector of a decode instance.

    Args:
        pool: This instance's own.
        dialer: Opens Prefill streams.
        loop: Where loads run.
        wake: Makes the engine poll.
        threshold: Missing prompt tokens from which a remote prefill is used.
        stall_s: Seconds without a word after which a candidate is given up.
        wait_s: Seconds that a prompt may have to wait in a candidate's queue, as the candidate expects it.

    Attributes:
        watch: Knows which candidates are silent.
    """

    def __init__(
        self,
        *,
        pool: OwnPool,
        dialer: PrefillDialer,
        loop: asyncio.AbstractEventLoop,
        wake: Callable[[], None],
        threshold: int,
        stall_s: float,
        wait_s: float,
    ) -> None:
        self._pool = pool
        self._dialer = dialer
        self._loop = loop
        self._fetcher = pool.fetcher
        self._block_size = pool.block_size
        self._state_blocks = pool.state_blocks
        self._threshold = threshold
        self._stall_s = stall_s
        self._wait_s = wait_s
        self.watch = CandidateWatch(stall_s)
        self._loads: BackgroundLoads[str | None] = BackgroundLoads(loop, wake)
        self._local_reasons: dict[RequestId, str] = {}
        self._sources: dict[str, BlockSource] = {}

    def plan_load(self, request: LoadRequest, num_local_tokens: int) -> LoadPlan | None:
        """Plan a remote prefill of everything that is missing, if that is enough to pay."""
        if request.prefilled is not None:
            return LoadPlan(num_tokens=len(request.token_ids), with_first_token=True)
        missing = len(request.token_ids) - num_local_tokens
        threshold = self._threshold if request.threshold is None else request.threshold
        if not request.candidates:
            self._local_reasons.setdefault(request.request_id, "no_candidates")
            return None
        if request.adapter is not None:  # the call to prefill does not name one
            self._local_reasons.setdefault(request.request_id, "adapter")
            return None
        if missing < threshold:
            self._local_reasons.setdefault(request.request_id, "short" if num_local_tokens == 0 else "cached")
            return None
        if all(map(self._is_unreadable, request.candidates)):
            self._local_reasons.setdefault(request.request_id, "unreadable")
            return None
        return LoadPlan(num_tokens=len(request.token_ids), with_first_token=True)

    def local_reason(self, request_id: RequestId) -> str:
        """Return why a request was not loaded from outside; empty: it was, or that was not asked for."""
        return self._local_reasons.get(request_id, "")

    def forget(self, request_id: RequestId) -> None:
        """Drop what is kept for a request that ended."""
        self._local_reasons.pop(request_id, None)

    def start_load(self, request: LoadRequest, num_local_tokens: int, block_ids: Sequence[BlockId]) -> None:
        num_held = num_local_tokens // self._block_size
        valid = np.zeros(-(-len(request.token_ids) // self._block_size) + self._state_blocks, dtype=bool)
        valid[:num_held] = True
        load = _Load(request, num_held * self._block_size, tuple(block_ids), valid, self._pool.groups)
        self._loads.start(
            request.request_id, lambda cancelled: self._run(load, cancelled), lambda ended: self._report(load, ended)
        )

    async def _run(self, load: _Load, cancelled: threading.Event) -> str | None:
        """Claim what waits, or try the candidates; returns why none of them did it."""
        load.cancelled = cancelled
        prefilled = load.request.prefilled
        candidates = load.request.candidates
        if prefilled is not None:
            failure = await self._failure(load, prefilled.address, others=(), claim=prefilled.key)
            if failure is None:
                return None
            if isinstance(failure, NotFoundError):
                load.local_reason = "lease_over"
                return "; ".join(load.failures)
            candidates = tuple(address for address in candidates if address != prefilled.address)
        left = list(candidates)
        while left:
            address = min(left, key=self._is_last_choice)  # of equals the first
            left.remove(address)
            if await self._failure(load, address, others=left) is None:
                return None
        return "; ".join(load.failures)

    async def _failure(
        self, load: _Load, address: str, *, others: Sequence[str], claim: str | None = None
    ) -> BatonError | None:
        """Try a candidate, with less patience where there are others; ``None``: it did it."""
        try:
            if self.watch.is_silent(address):
                raise UnavailableError("it does not answer a router")
            source = self._sources.get(address)
            if claim is None and source is not None and not self._fetcher.admits(source):
                raise UnavailableError("nothing came over its pipes: they are left alone for a while")
            hurried = not all(map(self._is_last_choice, others))
            await self._try(load, address, claim, hurried=hurried)
            return None
        except BatonError as failure:
            load.failures.append(f"{address}: {failure.message}")
            load.local_reason = "prefill_busy" if isinstance(failure, QueueFullError) else "prefill_failed"
            log.warning(
                "prefill of %s at %s failed: %s",
                load.request.request_id,
                address,
                failure.message,
                extra={"request_id": load.request.request_id},
            )
            return failure

    def _is_last_choice(self, address: str) -> bool:
        return self.watch.is_last_choice(address) or self._is_unreadable(address)

    def _report(self, load: _Load, ended: Outcome[str | None]) -> LoadUpdate:
        return self._update(load, ended.value if ended.error is None else ended.error)

    async def _try(self, load: _Load, address: str, claim: str | None, *, hurried: bool) -> None:
        """Run one candidate to its end; on return everything is valid.

        Args:
            load: The load.
            address: Address of the candidate.
            claim: Key of the prompt that waits there, if one does.
            hurried: Give up the candidate if it does not acknowledge the call.
        """
        held = self._leading_tokens(load)
        state = _Events(num_ready_tokens=held)
        try:
            async with self._dialer.open(address, load.request, self._held_blocks(load, held), claim) as events:
                attempt: _Attempt | None = None
                while True:
                    event = await self._next(address, events, state.fetches, first_word=hurried)
                    hurried = False
                    if isinstance(event, Acknowledged):
                        continue
                    if isinstance(event, Queued):
                        self._require_soon(event, state)
                    elif isinstance(event, Accepted):
                        if event.source.fingerprint.block_size < 1:
                            raise StaleBlockError("its block_size is 0", field="block_size")
                        attempt = _Attempt(load, event.source, self._block_size, self._state_blocks)
                        self._record_source(address, event.source)
                    elif isinstance(event, Offer):
                        if attempt is None:
                            raise StaleBlockError("an offer came before its source")
                        _check(attempt, event)
                        self._begin_fetch(load, attempt, event, state)
                    else:
                        # Every fetch has to end while the stream, the lease, is open.
                        await self.watch.wait(address, asyncio.gather(*state.fetches))
                        break
            if not load.valid.all() or state.num_ready_tokens != len(load.request.token_ids):
                raise StaleBlockError("the prefill instance did not offer every block")
            load.exposed_s += time.perf_counter() - state.ready_at
            load.first_token = event.first_token
            load.source_cached_tokens = event.prefix_hit_tokens
        finally:
            # No copy may write into our blocks after the report: stop the copies, then wait for them. A task that is
            # to wait for a copy may not have begun yet, and would end without: copies are waited for by themselves.
            tasks: list[asyncio.Task[Any]] = [*state.fetches, *state.copies]
            if any(not task.done() for task in tasks):
                load.cancelled.set()
                for task in tasks:
                    task.cancel()  # what no thread is at ends at once
                await settle(tasks)
                if not is_cancelled():
                    load.cancelled.clear()

    def _begin_fetch(self, load: _Load, attempt: _Attempt, offer: Offer, state: _Events) -> None:
        """Begin to fetch what an offer names; one that only confirms an earlier one waits for that one's fetch."""
        wanted = attempt.wanted(offer)
        if offer.ready is not None:
            if offer.key in state.early:
                raise StaleBlockError("blocks were offered early twice")
            if wanted:
                blocks = attempt.blocks(offer, wanted)
                stall = self._fetcher.stall_limit(source_ready=False)
                copy = self._loop.create_task(self._fetch(load, attempt.source, blocks, stall))
                state.early[offer.key] = copy, stall
                state.copies.append(copy)
            return
        if offer.num_tokens > state.num_ready_tokens:
            state.num_ready_tokens = offer.num_tokens
            state.ready_at = time.perf_counter()
        if wanted:
            early: asyncio.Task[FetchResult] | None = None
            if offer.key in state.early:
                early, stall = state.early.pop(offer.key)
                stall.expect()  # from now on the source can send all of it
            state.fetches.append(self._loop.create_task(self._complete(load, attempt, offer, wanted, early)))

    def unreadable(self) -> list[str]:
        """Return the addresses of prefill instances whose KV cannot be read now: nothing came over their pipes."""
        return [address for address, source in list(self._sources.items()) if self._fetcher.is_resting(source)]

    def _record_source(self, address: str, source: BlockSource) -> None:
        self._sources.pop(address, None)
        self._sources[address] = source
        if len(self._sources) > _MAX_SOURCES:
            del self._sources[next(iter(self._sources))]

    def _is_unreadable(self, address: str) -> bool:
        source = self._sources.get(address)
        return source is not None and self._fetcher.is_resting(source)

    def _require_soon(self, queued: Queued, state: _Events) -> None:
        """Leave a candidate that will take too long, unless it has begun.

        Raises:
            QueueFullError: It will.
        """
        begun = queued.running or state.early or state.fetches
        if not begun and queued.expected_s > self._wait_s:
            raise QueueFullError(f"its queue takes {queued.expected_s:.0f} s, longer than {self._wait_s:g} s")

    async def _next(
        self,
        address: str,
        events: AsyncIterator[PrefillEvent],
        fetches: list[asyncio.Task[None]],
        *,
        first_word: bool,
    ) -> PrefillEvent:
        for task in fetches:
            if task.done():
                task.result()
        try:
            return await self.watch.wait(address, anext(events), first_word=first_word)
        except StopAsyncIteration:
            raise StaleBlockError("the stream ended before the prompt was computed") from None

    async def _complete(
        self,
        load: _Load,
        attempt: _Attempt,
        offer: Offer,
        wanted: list[int],
        early: asyncio.Task[FetchResult] | None,
    ) -> None:
        """Fetch complete blocks, or wait for the fetch that began while they were computed, and note what came."""
        result = await (early or self._fetch(load, attempt.source, attempt.blocks(offer, wanted)))
        load.ended_ns = time.perf_counter_ns()
        load.kv_bytes += result.num_bytes
        load.transfer_s += result.seconds - result.waited_s
        load.pipe = result.pipe_kind
        load.pipe_fallback = result.fallback_reason
        load.source = attempt.source.instance_id
        attempt.mark_valid(offer, wanted, result.valid)
        if not result.valid.all():
            raise StaleBlockError(result.failure)

    async def _fetch(
        self, load: _Load, source: BlockSource, blocks: SequenceBlocks, stall: StallLimit | None = None
    ) -> FetchResult:
        load.began_ns = load.began_ns or time.perf_counter_ns()
        return await self._fetcher.fetch_async(
            source, blocks, deadline=time.monotonic() + self._stall_s, cancelled=load.cancelled, stall=stall
        )

    def _held_blocks(self, load: _Load, num_tokens: int) -> HeldBlocks:
        # Blocks of layer groups are not read by others.
        ids = load.block_ids[: num_tokens // self._block_size] if load.groups == 1 else ()
        return HeldBlocks(self._pool.source(), ids, tuple(int(g) for g in self._pool.arena.generations[list(ids)]))

    def _leading_tokens(self, load: _Load) -> int:
        """Leading tokens in full valid blocks."""
        blocks = len(load.valid) if load.valid.all() else int(load.valid.argmin())
        return min(blocks * self._block_size, len(load.request.token_ids) // self._block_size * self._block_size)

    def _update(self, load: _Load, error: str | None) -> LoadUpdate:
        complete = error is None
        num_valid = len(load.request.token_ids) if complete else max(load.num_local_tokens, self._leading_tokens(load))
        moved = num_valid - load.num_local_tokens
        stats = TransferStats(
            path=PrefillPath.REMOTE if complete else PrefillPath.LOCAL,
            source=load.source,
            pipe=load.pipe,
            pipe_fallback=load.pipe_fallback,
            kv_bytes=load.kv_bytes,
            transfer_us=round(1e6 * load.transfer_s),
            exposed_us=round(1e6 * load.exposed_s),
            transferred_tokens=moved,
            source_cached_tokens=load.source_cached_tokens,
            failures=tuple(load.failures),
            local_reason="" if complete else load.local_reason,
            kind="kv_transfer" if load.began_ns else "",
            began_ns=load.began_ns,
            ended_ns=max(load.began_ns, load.ended_ns),
        )
        first = load.first_token if complete else None
        return LoadUpdate(load.request.request_id, num_valid, first_token=first, stats=stats, error=error)


def _check(attempt: _Attempt, offer: Offer) -> None:
    end = offer.first_block + len(offer.block_ids)
    if len(offer.generations) != len(offer.block_ids) or end > attempt.num_blocks:
        raise StaleBlockError(f"an offer of blocks {offer.first_block} to {end} does not fit the request")
