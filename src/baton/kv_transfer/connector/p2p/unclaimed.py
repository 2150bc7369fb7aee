"""Prompts that are computed before their decode instance is chosen: they wait in the lookup buffer to be claimed.

This is the order of serving ``prefill_first``. The lease of such a prompt is no stream but an entry of the buffer: it
ends when a decode instance claims the entry (its Prefill stream is the lease from then on), when the entry's time is
over, or when the request is aborted. While it lasts the engine keeps the blocks; the buffer's bound, in bytes of KV,
limits how much of the pool can be kept so. A prompt that waits for room there keeps its blocks too, for no longer than
a lease.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt

from baton.errors import DeadlineError, InvalidRequestError, NotFoundError
from baton.kv_transfer.connector.p2p.prefill_stream import Offer
from baton.kv_transfer.connector.p2p.producer import Lease
from baton.kv_transfer.lookup_buffer.buffer import LookupBuffer
from baton.rpc.convert import sampling_to_pb
from baton.types import RequestId, SamplingParams

R = TypeVar("R")
Tokens = npt.NDArray[np.uint32]


@dataclass(frozen=True, slots=True, eq=False)
class Unclaimed(Generic[R]):
    """A computed prompt.

    Attributes:
        lease: Keeps its blocks; closed by the one who claimed it.
        offer: All of its blocks.
        result: What came of the computation beside the KV: the first token.
        cache_salt: Of the request.
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
        self._max_blocks, self._block_bytes, self._block_size = max_blocks, block_bytes, block_size
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

    async def put(
        self, lease: Lease, offers: Sequence[Offer], result: R, *, cache_salt: str, sampling: SamplingParams
    ) -> str:
        """Let a prompt wait from now on, as soon as there is room.

        Args:
            lease: Keeps its blocks. If this raises it is the caller's to close, unless it was ``claimed``.
            offers: In order, all of its blocks.
            result: See :class:`Unclaimed`.
            cache_salt: Of the request.
            sampling: Of the request: it decided the first token.

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
            key: As :meth:`put` returned it; empty: the prompt is found by all that follows.
            tokens: uint32 [tokens], all that were computed.
            cache_salt: Of the request.
            sampling: Of the request.

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
        found = self._buffer.withdraw(request_id)
        for prompt in found:
            self._close_lease(prompt.lease)
        return bool(found)

    def drop_expired(self) -> None:
        """Give back the blocks of prompts that waited too long."""
        self._buffer.drop_expired()

    def close(self) -> None:
        """Drop all."""
        self._buffer.close()


def _scoped(tokens: Tokens, cache_salt: str, sampling: SamplingParams) -> Tokens:
    """Return tokens behind a digest of what else decides their KV and the first token, so that both must match."""
    # What the first token does not depend on is left out: each instance fills it in by itself where it is unset.
    sampling = sampling.replace(n=1, max_tokens=None, seed=None if sampling.temperature == 0 else sampling.seed)
    settings = sampling_to_pb(sampling).SerializeToString(deterministic=True)
    digest = hashlib.sha256(len(settings).to_bytes(8, "little") + settings + cache_salt.encode()).digest()
    return np.concatenate((np.frombuffer(digest, dtype=np.uint32), tokens))
