"""The prefill side of point-to-point hand-over: offers go into the lookup buffer, streams take them out.

A *lease* is an open Prefill stream, or the time that a prompt waits to be claimed by one
(:mod:`baton.kv_transfer.connector.p2p.unclaimed`). While it lasts the engine keeps the request's blocks; when it ends,
for whatever reason, the blocks go back. An offer names blocks and their generations, never bytes: the reader copies
from the pool itself.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import replace

import numpy as np

from baton.errors import BatonError, InvalidRequestError, QueueFullError
from baton.kv_cache.arena import Arena
from baton.kv_cache.connector import KVConnector, PlannedSave
from baton.kv_transfer.connector.p2p.prefill_stream import Offer
from baton.kv_transfer.lookup_buffer.buffer import LookupBuffer
from baton.types import BlockHash, BlockId, RequestId

log = logging.getLogger(__name__)

OFFER_BYTES, BLOCK_BYTES = 200, 100
"""What an offer and a block in it take, roughly, in a Python process."""


class Lease:
    """Keeps one request's blocks.

    Attributes:
        lease_id: Unique in this process.
        num_held_tokens: Leading tokens the reader has: not offered.
        layerwise: Whether its blocks are offered while they are computed, too.
        key: Under which its offers lie in the lookup buffer.
        claimed: Another call than the one that opened it reads its blocks, and closes it.
    """

    def __init__(
        self, lease_id: int, request_id: RequestId, token_ids: np.ndarray, num_held_tokens: int, layerwise: bool
    ) -> None:
        self.lease_id, self.request_id, self.layerwise = lease_id, request_id, layerwise
        self.token_ids, self.num_held_tokens = token_ids, num_held_tokens
        self.num_offered_blocks, self.claimed = 0, False
        self.key = RequestId(f"{request_id}/{lease_id}")


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
    ) -> None:
        self._arena, self._buffer, self._wake = arena, buffer, wake
        self._block_size, self._lease_s, self._max_leases = block_size, lease_s, max_leases
        # The step that runs now, or ran last, and its layers: layer i is there when the progress is _step + i + 1.
        self._layerwise, self._num_layers = layers > 0, layers
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
            lease = Lease(next(self._ids), request_id, token_ids, num_held_tokens, layerwise)
            lease.num_offered_blocks = num_held_tokens // self._block_size
            self._leases[request_id] = lease
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
        """Open leases."""
        return len(self._leases)

    @property
    def next_step(self) -> int:
        """The arena's progress before the first layer of the step that begins next, if it is told of that step."""
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
        first, total = lease.num_offered_blocks, len(lease.token_ids)
        end = -(-num_tokens // self._block_size) if num_tokens >= total else num_tokens // self._block_size
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
            log.error("the offer of %s is lost (%s): its stream ends", lease.request_id, error.message)
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
        """Whether blocks are kept or about to be given back."""
        return bool(self._finished or self._releases)

    def close(self) -> None:
        """Close all leases."""
        for lease in list(self._leases.values()):
            self.close_lease(lease)
