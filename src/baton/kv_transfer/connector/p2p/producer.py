"""The prefill side of point-to-point hand-over: offers go into the lookup buffer, streams take them out.

A *lease* is an open Prefill stream, or the time that a prompt waits to be claimed by one. While it lasts the engine
keeps the request's blocks; when it ends, for whatever reason, the blocks go back. An offer names blocks and their
generations, never bytes: the reader copies from the pool itself.

In the order of serving ``prefill_first`` prompts are computed before their decode instance is chosen
(:class:`UnclaimedPrompts`). The lease of such a prompt is no stream but an entry of another buffer: it ends when a
decode instance claims the entry (its Prefill stream is the lease from then on), when the entry's time is over, or when
the request is aborted. The buffer's bound, in bytes of KV, limits how much of the pool can be kept so. A prompt that
waits for room there keeps its blocks too, for no longer than a lease.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt

from baton.errors import BatonError, DeadlineError, InvalidRequestError, NotFoundError, QueueFullError
from baton.kv_cache.arena import Arena
from baton.kv_cache.connector import KVConnector, LoadPlan, LoadRequest, LoadUpdate, PlannedSave, TransferStats
from baton.kv_transfer.blocks import BlockFetcher, FetchResult, SequenceBlocks
from baton.kv_transfer.connector.background import BackgroundLoads, LoadingConnector, Outcome
from baton.kv_transfer.connector.p2p.prefill_stream import HeldBlocks, Offer
from baton.kv_transfer.lookup_buffer import LookupBuffer
from baton.rpc.convert import sampling_to_pb
from baton.types import BlockHash, BlockId, PrefillPath, RequestId, SamplingParams

log = logging.getLogger(__name__)
R = TypeVar("R")
Tokens = npt.NDArray[np.uint32]

OFFER_BYTES = 200
"""Approximate memory of an offer in a Python process."""
BLOCK_BYTES = 100
"""Approximate memory of a block in an offer."""


@dataclass(eq=False, slots=True)
class Lease:
    """Keeps one request's blocks.

    Attributes:
        lease_id: Unique in this process.
        num_offered_blocks: Leading blocks that the reader has, or was offered.
        layerwise: Whether its blocks are offered while they are computed, too.
        claimed: Another call than the one that opened it reads its blocks, and closes it.
    """

    lease_id: int
    request_id: RequestId
    token_ids: np.ndarray
    num_offered_blocks: int
    layerwise: bool
    claimed: bool = False

    @property
    def key(self) -> RequestId:
        """Key of its offers in the lookup buffer."""
        return RequestId(f"{self.request_id}/{self.lease_id}")


class P2PProducer(KVConnector):
    """Connector of a prefill instance.

    Args:
        arena: The pool's memory, for the generations.
        buffer: Holds offers until their stream takes them.
        wake: Makes the engine poll.
        block_size: Tokens per block.
        lease_s: How long an offer waits for its stream.
        max_leases: Leases that may be open at once.
        layers: Layers of the model, to offer blocks while they are computed; 0: only when they are complete.
        state_blocks: Blocks behind those of a prompt's KV that hold its recurrent states.
    """

    def __init__(
        self,
        *,
        arena: Arena,
        buffer: LookupBuffer[Offer],
        wake: Callable[[], None],
        block_size: int,
        lease_s: float,
        max_leases: int,
        layers: int = 0,
        state_blocks: int = 0,
    ) -> None:
        self._state_blocks = state_blocks
        self._arena = arena
        self._buffer = buffer
        self._wake = wake
        self._block_size = block_size
        self._lease_s = lease_s
        self._max_leases = max_leases
        # The step that runs now, or ran last, and its layers: layer i is there when the progress is _step + i + 1.
        self._layerwise = layers > 0
        self._num_layers = layers
        self._step = arena.progress.value
        self._lock = threading.Lock()
        self._leases: dict[RequestId, Lease] = {}
        self._finished: set[RequestId] = set()
        self._releases: deque[RequestId] = deque()
        self._ids = itertools.count(1)
        self.on_poll: Callable[[], None] = lambda: None
        """Called, in the engine's thread, whenever it asks for leases that ended."""

    def open_lease(
        self, request_id: RequestId, token_ids: np.ndarray, num_held_tokens: int, *, layerwise: bool = True
    ) -> Lease:
        """Open a lease before its request is submitted.

        Args:
            request_id: The request.
            token_ids: uint32 [tokens], everything that will be computed.
            num_held_tokens: Leading tokens the reader has; rounded down to blocks.
            layerwise: Whether to offer blocks while they are computed, if this instance does; ``False``: only complete
                ones, as the reader comes later.

        Raises:
            QueueFullError: Too many leases are open.
            InvalidRequestError: The request id is in use.
        """
        with self._lock:
            if len(self._leases) >= self._max_leases:
                raise QueueFullError(f"{self._max_leases} leases are open", retry_after_s=1.0)
            if request_id in self._leases:
                raise InvalidRequestError(f"request id {request_id!r} is in use", field="request_id")
            num_held_blocks = num_held_tokens // self._block_size
            lease = self._leases[request_id] = Lease(next(self._ids), request_id, token_ids, num_held_blocks, layerwise)
        return lease

    async def offers(self, lease: Lease) -> AsyncGenerator[Offer]:
        """Yield the lease's offers in order until the whole prompt has been offered.

        Raises:
            DeadlineError: The engine computed nothing for ``lease_s`` seconds.
        """
        total = len(lease.token_ids)
        while True:
            deadline = time.monotonic() + self._lease_s
            offer = await self._buffer.drop_select(lease.key, deadline=deadline)
            yield offer
            if offer.num_tokens >= total and offer.ready is None:
                return

    def close_lease(self, lease: Lease) -> None:
        """Give the lease back: the engine may reuse the blocks. Safe to call twice."""
        with self._lock:
            if self._leases.get(lease.request_id) is not lease:
                return
            del self._leases[lease.request_id]
            if lease.request_id in self._finished:
                self._finished.remove(lease.request_id)
                self._releases.append(lease.request_id)
        self._buffer.withdraw(lease.key)
        self._wake()

    def num_leases(self) -> int:
        """Return the number of open leases."""
        return len(self._leases)

    @property
    def next_step(self) -> int:
        """The arena's progress before the first layer of the next step, if ``step_begins`` is called for it."""
        return self._step + self._num_layers

    def step_begins(self, saves: Sequence[PlannedSave]) -> None:
        """Offer the blocks that the step will complete, to be read layer by layer as they are computed."""
        if not self._layerwise:
            return
        # Whatever became of the step before, it computes no more.
        self._finish_step()
        for save in saves:
            lease = self._lease_of(save.request_id)
            if lease is None or not lease.layerwise:
                continue
            if (offer := self._next_offer(lease, save.block_ids, save.num_tokens)) is not None:
                self._insert(lease, replace(offer, ready=self._step))

    def layer_computed(self, layer: int) -> None:
        """Let readers have the layer."""
        if self._layerwise:
            self._arena.progress.advance(self._step + layer + 1)

    def blocks_computed(
        self, request_id: RequestId, block_ids: Sequence[BlockId], hashes: Sequence[BlockHash], num_tokens: int
    ) -> None:
        """Offer the blocks that became complete; the last one may be partly filled."""
        self._arena.progress.advance(self._step + self._num_layers)
        lease = self._lease_of(request_id)
        if lease is not None and (offer := self._next_offer(lease, block_ids, num_tokens)) is not None:
            lease.num_offered_blocks = offer.first_block + len(offer.block_ids)
            self._insert(lease, offer)

    def _finish_step(self) -> None:
        self._step += self._num_layers
        self._arena.progress.advance(self._step)

    def _lease_of(self, request_id: RequestId) -> Lease | None:
        with self._lock:
            return self._leases.get(request_id)

    def _next_offer(self, lease: Lease, block_ids: Sequence[BlockId], num_tokens: int) -> Offer | None:
        """What there is to offer beyond what was, once ``num_tokens`` tokens are complete."""
        first = lease.num_offered_blocks
        total = len(lease.token_ids)
        end = num_tokens // self._block_size
        if num_tokens >= total:
            end = -(-num_tokens // self._block_size) + self._state_blocks
        if end <= first and num_tokens < total:
            return None
        ids = tuple(int(b) for b in block_ids[first:end])
        generations = tuple(int(g) for g in self._arena.generations[list(ids)]) if ids else ()
        return Offer(first, ids, generations, num_tokens)

    def _insert(self, lease: Lease, offer: Offer) -> None:
        try:
            # Without a deadline, as the engine must not wait: the buffer is sized for every lease's offers.
            nbytes = OFFER_BYTES + BLOCK_BYTES * len(offer.block_ids)
            self._buffer.insert(lease.key, None, None, offer, nbytes, lease_s=self._lease_s)
        except BatonError as error:
            log.error(
                "the offer of %s is lost (%s): its stream ends",
                lease.request_id,
                error.message,
                extra={"request_id": lease.request_id},
            )
            self._buffer.withdraw(lease.key)

    def request_finished(self, request_id: RequestId) -> bool:
        """Keep the blocks as long as the lease is open."""
        with self._lock:
            if request_id not in self._leases:
                return False
            self._finished.add(request_id)
            return True

    def poll_releases(self) -> list[RequestId]:
        """Return finished requests whose lease has closed."""
        self.on_poll()
        released = []
        while self._releases:
            released.append(self._releases.popleft())
        return released

    def has_pending(self) -> bool:
        return bool(self._finished or self._releases)

    def close(self) -> None:
        for lease in list(self._leases.values()):
            self.close_lease(lease)


@dataclass(frozen=True, slots=True, eq=False)
class Unclaimed(Generic[R]):
    """A computed prompt.

    Attributes:
        lease: Keeps the prompt's blocks; closed by the caller that claimed it.
        offer: Offer of all blocks.
        result: Result of the computation beside the KV: the first token.
        cache_salt: Cache salt of the request.
    """

    lease: Lease
    offer: Offer
    result: R
    cache_salt: str

    def offer_from(self, first_block: int) -> Offer:
        """Return the offer without the blocks that the reader has."""
        offer = self.offer
        return Offer(first_block, offer.block_ids[first_block:], offer.generations[first_block:], offer.num_tokens)


class UnclaimedPrompts(Generic[R]):
    """The prompts that wait.

    Args:
        max_blocks: Blocks that they may hold together.
        block_bytes: KV bytes of a block.
        block_size: Tokens per block.
        lease_s: How long each waits.
        close_lease: Gives blocks back.
    """

    def __init__(
        self,
        *,
        max_blocks: int,
        block_bytes: int,
        block_size: int,
        lease_s: float,
        close_lease: Callable[[Lease], None],
    ) -> None:
        self._max_blocks = max_blocks
        self._block_bytes = block_bytes
        self._block_size = block_size
        self._close_lease = close_lease
        self.lease_s = lease_s
        self._buffer: LookupBuffer[Unclaimed[R]] = LookupBuffer(
            max(1, max_blocks) * block_bytes, on_drop=lambda key, prompt: close_lease(prompt.lease)
        )

    def __len__(self) -> int:
        return len(self._buffer)

    def require_room(self, num_tokens: int) -> None:
        """Refuse a prompt that could never wait here, before it is computed.

        Raises:
            InvalidRequestError: It has too many tokens.
        """
        blocks = -(-num_tokens // self._block_size)
        if blocks > self._max_blocks:
            message = (
                f"a prompt of {blocks} blocks can never wait here: unclaimed prompts hold up to {self._max_blocks}"
            )
            raise InvalidRequestError(message, field="prompt_token_ids")

    async def add_prompt(
        self, lease: Lease, offers: Sequence[Offer], result: R, *, cache_salt: str, sampling: SamplingParams
    ) -> str:
        """Let a prompt wait from now on, as soon as there is room.

        Args:
            lease: Keeps its blocks. If this raises it is the caller's to close, unless it was ``claimed``.
            offers: In order, all of its blocks.
            result: See :class:`Unclaimed`.
            cache_salt: Cache salt of the request.
            sampling: Sampling parameters of the request, which decided the first token.

        Returns:
            The key by which it can be claimed.

        Raises:
            DeadlineError: There was no room for as long as it might have waited.
        """
        ids = tuple(block for offer in offers for block in offer.block_ids)
        generations = tuple(generation for offer in offers for generation in offer.generations)
        prompt = Unclaimed(lease, Offer(0, ids, generations, len(lease.token_ids)), result, cache_salt)
        await self._buffer.insert_when_room(
            lease.request_id,
            _scoped(lease.token_ids, cache_salt, sampling),
            None,
            prompt,
            len(ids) * self._block_bytes,
            lease_s=self.lease_s,
            deadline=time.monotonic() + self.lease_s,
        )
        return lease.request_id

    async def claim(self, key: str, tokens: Tokens, *, cache_salt: str, sampling: SamplingParams) -> Unclaimed[R]:
        """Take a prompt out; its lease is the caller's to close.

        Args:
            key: As :meth:`add_prompt` returned it; empty: the prompt is found by all that follows.
            tokens: uint32 [tokens], all that were computed.
            cache_salt: Cache salt of the request.
            sampling: Sampling parameters of the request.

        Raises:
            NotFoundError: It does not wait here (any more).
            InvalidRequestError: The key names a prompt of other tokens, or of another tenant, which stays there.
        """
        try:
            if key:
                prompt = await self._buffer.select(RequestId(key), deadline=time.monotonic())
                if prompt.cache_salt != cache_salt or not np.array_equal(prompt.lease.token_ids, tokens):
                    # It stays for the reader who knows it: a guessed key must not cost another its prompt.
                    raise InvalidRequestError(f"{key!r} names another prompt", field="claim.key")
                prompt = await self._buffer.drop_select(RequestId(key), deadline=time.monotonic())
            else:
                wanted = _scoped(tokens, cache_salt, sampling)
                # The entry that holds the last token: those of shorter prompts match, and are not meant.
                last = slice(len(wanted) - 1, None)
                prompt = await self._buffer.drop_select(wanted, last, deadline=time.monotonic())
        except DeadlineError:
            raise NotFoundError("the prompt does not wait here: it was claimed, or its lease has ended") from None
        prompt.lease.claimed = True
        return prompt

    def withdraw(self, request_id: RequestId) -> bool:
        """Drop a prompt that is not wanted any more; ``False``: it does not wait here."""
        prompts = self._buffer.withdraw(request_id)
        for prompt in prompts:
            self._close_lease(prompt.lease)
        return bool(prompts)

    def drop_expired(self) -> None:
        """Give back the blocks of prompts that waited too long."""
        self._buffer.drop_expired()

    def close(self) -> None:
        """Drop all prompts that wait."""
        self._buffer.close()


def _scoped(tokens: Tokens, cache_salt: str, sampling: SamplingParams) -> Tokens:
    """Return tokens behind a digest of what else decides their KV and the first token, so that both must match."""
    # What the first token does not depend on is left out: each instance fills it in by itself where it is unset.
    sampling = sampling.replace(n=1, max_tokens=None, seed=None if sampling.temperature == 0 else sampling.seed)
    settings = sampling_to_pb(sampling).SerializeToString(deterministic=True)
    digest = hashlib.sha256(len(settings).to_bytes(8, "little") + settings + cache_salt.encode()).digest()
    return np.concatenate((np.frombuffer(digest, dtype=np.uint32), tokens))


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
        self._block_size = block_size
        self._threshold = threshold
        self._timeout_s = timeout_s
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
        held = self._held[request.request_id]
        load = _Load(request.request_id, held, num_local_tokens, tuple(block_ids))
        self._loads.start(
            request.request_id,
            lambda cancelled: self._fetch(load, cancelled),
            lambda outcome: self._report(load, outcome),
        )

    async def _fetch(self, load: _Load, cancelled: threading.Event) -> FetchResult:
        held = load.held
        size = self._block_size
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
