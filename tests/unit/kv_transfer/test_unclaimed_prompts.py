"""Prompts that wait to be claimed: wrong claims take nothing, and a claimed lease is its reader's."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from baton.errors import InvalidRequestError, NotFoundError
from baton.kv_transfer.connector.p2p.prefill_stream import Offer
from baton.kv_transfer.connector.p2p.producer import Lease, UnclaimedPrompts
from baton.types import RequestId, SamplingParams

GREEDY = SamplingParams(temperature=0.0)
TOKENS = np.arange(32, dtype=np.uint32)


class Rig:
    def __init__(self, *, max_blocks: int = 8) -> None:
        self.closed: list[RequestId] = []
        self.prompts: UnclaimedPrompts[str] = UnclaimedPrompts(
            max_blocks=max_blocks,
            block_bytes=100,
            block_size=16,
            lease_s=60.0,
            close_lease=lambda lease: self.closed.append(lease.request_id),
        )

    async def put(self, name: str, tokens: np.ndarray = TOKENS) -> Lease:
        lease = Lease(1, RequestId(name), tokens, 0, False)
        offer = Offer(0, (4, 7), (1, 1), len(tokens))
        await self.prompts.add_prompt(lease, [offer], "first token", cache_salt="mine", sampling=GREEDY)
        return lease


async def test_a_wrong_claim_leaves_the_prompt_to_its_reader() -> None:
    rig = Rig()
    await rig.put("it")
    for tokens, salt in ((TOKENS[:-1], "mine"), (TOKENS, "another tenant's")):
        with pytest.raises(InvalidRequestError, match="names another prompt"):
            await rig.prompts.claim("it", tokens, cache_salt=salt, sampling=GREEDY)
    assert (len(rig.prompts), rig.closed) == (1, [])
    prompt = await rig.prompts.claim("it", TOKENS, cache_salt="mine", sampling=GREEDY)
    assert (prompt.result, len(rig.prompts), rig.closed) == ("first token", 0, [])
    with pytest.raises(NotFoundError):
        await rig.prompts.claim("it", TOKENS, cache_salt="mine", sampling=GREEDY)


async def test_a_lease_that_was_claimed_says_so_to_a_put_that_is_cancelled_then() -> None:
    rig = Rig(max_blocks=2)
    await rig.put("first")
    lease = Lease(2, RequestId("second"), TOKENS + 1, 0, False)
    offer = Offer(0, (1, 2), (1, 1), len(TOKENS))
    putting = asyncio.create_task(rig.prompts.add_prompt(lease, [offer], "", cache_salt="", sampling=GREEDY))
    await asyncio.sleep(0)
    assert not lease.claimed
    await rig.prompts.claim("", TOKENS + 1, cache_salt="", sampling=GREEDY)  # before there was room
    putting.cancel()
    await asyncio.gather(putting, return_exceptions=True)
    assert lease.claimed  # so the call that opened it must not close it
    assert not rig.prompts.withdraw(lease.request_id)
