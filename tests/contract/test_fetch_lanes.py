"""Fetches in the background: waiting costs no thread, and what one source does is nothing to another."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
from collections.abc import AsyncIterator, Callable
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
from tests.support.transport.transport_rig import Rig, silent_source, soon, tls_of

from baton.errors import CancelledError, DeadlineError, PipeClosedError
from baton.kv_transfer.blocks import BlockFetcher, BlockServer, LinkOptions, SequenceBlocks, ServerOptions
from baton.kv_transfer.types import FetchResult
from baton.types import InstanceId

WAITING = 40
"""More than there are threads for one source, or were for all."""
LAYERS = 2
LIMIT_S = 240.0


class Background:
    """Fetches of one block each that are under way."""

    def __init__(self, rig: Rig) -> None:
        self.rig = rig
        links = LinkOptions(memory=rig.network, tls=tls_of(rig.kind))
        self.fetcher = BlockFetcher(
            rig.target, rig.print, kinds=tuple(dict.fromkeys((rig.kind, "shm", "tcp"))), max_threads=4, links=links
        )
        self.tasks: list[asyncio.Task[FetchResult]] = []
        self.flag = threading.Event()

    def start(self, source: Any, at: int, *, ready: int | None = None, deadline: float | None = None) -> Any:
        generations = self.rig.source_arena.generations[[at]]
        blocks = SequenceBlocks.of(([at], generations, [at]), list(range(at + 1)), np.arange(at + 1) == at, ready)
        call = self.fetcher.fetch_async(source, blocks, deadline=deadline or soon(LIMIT_S), cancelled=self.flag)
        self.tasks.append(asyncio.create_task(call))
        return self.tasks[-1]

    async def until(self, reached: Callable[[], bool]) -> None:
        async with asyncio.timeout(LIMIT_S):
            while not reached():
                await asyncio.sleep(0.002)

    @property
    def num_parked(self) -> int:
        return sum(lane.num_parked for lane in self.fetcher.lanes())


@pytest_asyncio.fixture(params=["memory", "shm", "tcp", "tls", "nixl", "gloo"])
async def background(request: pytest.FixtureRequest) -> AsyncIterator[Background]:
    rig = Rig(request.param)
    made = Background(rig)
    try:
        yield made
    finally:
        await asyncio.to_thread(made.fetcher.close)
        await asyncio.gather(*made.tasks, return_exceptions=True)
        assert made.fetcher.num_threads() == 0
        rig.close()


async def test_fetches_that_wait_for_a_computation_hold_no_thread(background: Background) -> None:
    rig, step = background.rig, background.rig.source_arena.progress.value
    waiting = [background.start(rig.server.source, at, ready=step) for at in range(WAITING)]
    await background.until(lambda: background.num_parked == WAITING)
    # What is complete at the same source passes them; all that is left is who waits, and who has nothing to do.
    other = await asyncio.wait_for(background.start(rig.server.source, WAITING), LIMIT_S)
    assert other.valid.all()
    assert background.num_parked == WAITING
    await background.until(lambda: [lane.num_busy for lane in background.fetcher.lanes()] == [1])
    for layer in range(LAYERS):
        rig.source_arena.progress.advance(step + layer + 1)
    results = await asyncio.wait_for(asyncio.gather(*waiting), LIMIT_S)
    assert all(result.valid.all() and result.waited_s > 0 for result in results)
    assert rig.same(np.arange(WAITING + 1), np.arange(WAITING + 1))


@pytest.mark.parametrize("hangs", ["computation", "handshake"])
async def test_a_source_that_hangs_holds_up_no_other(background: Background, hangs: str) -> None:
    rig = background.rig
    if hangs == "computation":
        hung = BlockServer(
            rig.source_arena, rig.print, InstanceId("hung"), kinds=("shm",), options=ServerOptions(memory=rig.network)
        )
        source, ready = hung.source, rig.source_arena.progress.value
    else:
        hung, source, ready = None, dataclasses.replace(silent_source(rig), instance_id=InstanceId("hung")), None
    waiting = [background.start(source, at, ready=ready) for at in range(WAITING)]
    await background.until(lambda: hangs == "handshake" or background.num_parked == WAITING)
    for at in range(WAITING, WAITING + 20):
        result = await asyncio.wait_for(background.start(rig.server.source, at), LIMIT_S)
        assert result.valid.all()
    assert not any(task.done() for task in waiting)
    await background.until(lambda: background.fetcher.lanes()[0].num_busy == 1)  # one waits, for all
    background.flag.set()
    assert {type(each) for each in await asyncio.gather(*waiting, return_exceptions=True)} == {CancelledError}
    if hung is not None:
        hung.close()


async def test_what_waits_ends_at_its_deadline_its_flag_and_its_cancellation(background: Background) -> None:
    rig, step = background.rig, background.rig.source_arena.progress.value
    late = background.start(rig.server.source, 0, ready=step, deadline=soon(0.1))
    called_off = background.start(rig.server.source, 1, ready=step)
    await background.until(lambda: background.num_parked == 2 or late.done())
    with pytest.raises(DeadlineError):
        await asyncio.wait_for(late, LIMIT_S)
    called_off.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(called_off, LIMIT_S)
    assert background.num_parked == 0
    background.flag.clear()
    flagged = background.start(rig.server.source, 2, ready=step)
    await background.until(lambda: background.num_parked == 1)
    background.flag.set()
    with pytest.raises(CancelledError):
        await asyncio.wait_for(flagged, LIMIT_S)
    # Nothing of it is left: the connection serves the next one.
    background.flag.clear()
    result = await asyncio.wait_for(background.start(rig.server.source, 3), LIMIT_S)
    assert result.valid.all()


async def test_what_waits_for_a_source_that_goes_away_hears_of_it(background: Background) -> None:
    rig, step = background.rig, background.rig.source_arena.progress.value
    waiting = [background.start(rig.server.source, at, ready=step) for at in range(WAITING)]
    await background.until(lambda: background.num_parked == WAITING)
    await asyncio.to_thread(rig.server.close)
    failed = await asyncio.wait_for(asyncio.gather(*waiting, return_exceptions=True), LIMIT_S)
    assert {type(each) for each in failed} == {PipeClosedError}


async def test_those_that_wait_longer_do_not_keep_the_others(background: Background) -> None:
    """Progress that comes first is waited for, whoever asked first."""
    rig, step = background.rig, background.rig.source_arena.progress.value
    later = background.start(rig.server.source, 0, ready=step + 100)
    await background.until(lambda: background.num_parked == 1)
    soon_there = background.start(rig.server.source, 1, ready=step)
    await background.until(lambda: background.num_parked == 2)
    rig.source_arena.progress.advance(step + LAYERS)
    result = await asyncio.wait_for(soon_there, LIMIT_S)
    assert result.valid.all()
    assert not later.done()
    rig.source_arena.progress.advance(step + 100 + LAYERS)
    result = await asyncio.wait_for(later, LIMIT_S)
    assert result.valid.all()
    assert rig.same([0, 1], [0, 1])
