"""Loads from a prefill instance that does not keep to the rules: no copy outlives its load."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from baton.errors import StaleBlockError
from baton.kv_cache.arena import HostArena
from baton.kv_cache.connector import LoadRequest, LoadUpdate
from baton.kv_cache.fingerprint import Fingerprint
from baton.kv_cache.layout import KVLayout, LayerShape
from baton.kv_transfer.blocks import BlockServer, SequenceBlocks
from baton.kv_transfer.connector.p2p.consumer import OwnPool, P2PConsumer
from baton.kv_transfer.connector.p2p.prefill_stream import Accepted, Finished, Offer, PrefillEvent
from baton.kv_transfer.streams import StallLimit
from baton.kv_transfer.types import FetchResult
from baton.types import BlockId, InstanceId, RequestId, SamplingParams

BS = 16
KIND = Fingerprint.of(model="m", model_digest="d", rope="", layout=KVLayout((LayerShape(1, 16, 16),), BS, "float32"))
WAIT_S = 240.0
FIRST = Offer(0, (0, 1), (0, 0), 2 * BS)
EARLY = Offer(0, (0, 1), (0, 0), 2 * BS, ready=0)
OTHERS = Offer(0, (2, 3), (0, 0), 2 * BS)


class Fetcher:
    """Copies complete blocks at once; those that are being computed never come. The first copy is slow to hear."""

    def __init__(self) -> None:
        self.running = self.begun = 0

    def stall_limit(self, *, source_ready: bool) -> StallLimit:
        return StallLimit(WAIT_S, source_ready=source_ready)

    def admits(self, source: object) -> bool:
        return True

    def is_resting(self, source: object) -> bool:
        return False

    async def fetch_async(
        self,
        source: object,
        blocks: SequenceBlocks,
        *,
        deadline: float,
        cancelled: threading.Event,
        stall: StallLimit | None = None,
    ) -> FetchResult:
        self.running += 1
        self.begun += 1
        pause_s = 0.05 if self.begun == 1 else 0.001
        try:
            while blocks.ready is not None:
                if cancelled.is_set():
                    raise StaleBlockError("called off")
                await asyncio.sleep(pause_s)
        finally:
            self.running -= 1
        return FetchResult("memory", 1, 0.0, np.ones(len(blocks), bool))


@pytest.mark.parametrize("events", [[EARLY, None, EARLY, FIRST], [EARLY, OTHERS, None, FIRST]])
async def test_no_copy_runs_any_more_when_a_load_has_ended(events: Sequence[Offer | None]) -> None:
    arena, fetcher = HostArena(4, KIND.block_bytes), Fetcher()
    server = BlockServer(arena, KIND, InstanceId("p0"), kinds=("shm",))
    ended: list[LoadUpdate] = []

    class Dialer:
        @asynccontextmanager
        async def open(self, *_: object) -> AsyncIterator[AsyncIterator[PrefillEvent]]:
            async def stream() -> AsyncIterator[PrefillEvent]:
                yield Accepted(server.source)
                for event in events:
                    if event is None:
                        await asyncio.sleep(0.01)  # what was offered is copied meanwhile
                    else:
                        yield event

            yield stream()

    fake: Any = fetcher
    loader = P2PConsumer(
        pool=OwnPool(fake, arena, BS, lambda: server.source),
        dialer=Dialer(),  # type: ignore[arg-type]
        loop=asyncio.get_running_loop(),
        wake=lambda: None,
        threshold=1,
        stall_s=WAIT_S,
        wait_s=WAIT_S,
    )
    request = LoadRequest(RequestId("r"), list(range(2 * BS)), 0, SamplingParams(), (), candidates=("p0:1",))
    loader.start_load(request, 0, [BlockId(0), BlockId(1)])
    async with asyncio.timeout(WAIT_S):
        while not ended:
            await asyncio.sleep(0.001)
            ended += loader.poll_loads()
    assert fetcher.begun
    assert fetcher.running == 0
    server.close()
    arena.close()


async def test_a_source_whose_blocks_have_no_tokens_is_a_failed_candidate() -> None:
    """Whatever a candidate says about itself, the next one is asked, and the trace says why."""
    arena = HostArena(4, KIND.block_bytes)
    server = BlockServer(arena, KIND, InstanceId("p0"), kinds=("shm",))
    ended: list[LoadUpdate] = []

    class Dialer:
        @asynccontextmanager
        async def open(self, address: str, *_: object) -> AsyncIterator[AsyncIterator[PrefillEvent]]:
            async def stream() -> AsyncIterator[PrefillEvent]:
                source = server.source
                if address == "p0:1":
                    source = replace(source, fingerprint=replace(KIND, block_size=0))
                yield Accepted(source)
                yield FIRST
                yield Finished(None, 0)

            yield stream()

    fake: Any = Fetcher()
    loader = P2PConsumer(
        pool=OwnPool(fake, arena, BS, lambda: server.source),
        dialer=Dialer(),  # type: ignore[arg-type]
        loop=asyncio.get_running_loop(),
        wake=lambda: None,
        threshold=1,
        stall_s=WAIT_S,
        wait_s=WAIT_S,
    )
    request = LoadRequest(RequestId("r"), list(range(2 * BS)), 0, SamplingParams(), (), candidates=("p0:1", "p1:1"))
    loader.start_load(request, 0, [BlockId(0), BlockId(1)])
    async with asyncio.timeout(WAIT_S):
        while not ended:
            await asyncio.sleep(0.001)
            ended += loader.poll_loads()
    (update,) = ended
    assert update.error is None
    assert update.stats is not None
    (failure,) = update.stats.failures
    assert failure.startswith("p0:1: ")
    assert "block_size" in failure
    server.close()
    arena.close()
