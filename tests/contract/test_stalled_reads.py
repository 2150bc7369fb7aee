"""A connection that swallows what it carries: the read ends soon, the pipe rests, and another one is used."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from tests.support.transport.transport_faults import Proxy
from tests.support.transport.transport_rig import Rig, lets_go, open_fds, silent_source, soon, tls_of

from baton.errors import PipeClosedError
from baton.kv_transfer.blocks import BlockFetcher, BlockServer, BlockSource, Endpoint, LinkOptions, SequenceBlocks
from baton.kv_transfer.blocks.rests import FIRST_REST_S, LONGEST_REST_S, PipeRests

STALL_S = 0.5
PATIENT_S = 2.0
"""Where something has to come in time, on a machine that does much else."""
HANDSHAKE_BYTES = 4000
"""More than a handshake has, over TLS as well, and less than the blocks."""
IDS = np.arange(150)
LIMIT_S = 240.0


def swallow(at: int, data: bytes) -> bytes:
    """Pass on the handshake and nothing behind it."""
    return data[: max(0, HANDSHAKE_BYTES - at)]


class Hole:
    """A source behind a proxy, and a fetcher with little patience."""

    def __init__(self, kind: str, change: Callable[[int, bytes], bytes], stall_s: float) -> None:
        self.stall_s = stall_s
        self.rig = Rig(kind)
        self.proxy = Proxy(self.rig.server.endpoints[0].address, change)
        self.fetcher = self.open_fetcher((kind,))
        known = self.rig.server.source
        ends = (Endpoint(kind, self.proxy.address),)
        self.source = dataclasses.replace(known, endpoints=ends)

    def open_fetcher(self, kinds: tuple[str, ...]) -> BlockFetcher:
        links = LinkOptions(tls=tls_of(self.rig.kind), stall_s=self.stall_s)
        return BlockFetcher(self.rig.target, self.rig.print, kinds=kinds, links=links)

    def fetch(self, source: BlockSource, fetcher: BlockFetcher | None = None) -> object:
        generations = self.rig.source_arena.generations[IDS]
        return (fetcher or self.fetcher).fetch(source, IDS, generations, IDS, deadline=soon(LIMIT_S))

    def close(self) -> None:
        self.fetcher.close()
        self.proxy.close()
        self.rig.close()


@pytest.fixture
def holes() -> Iterator[Callable[..., Hole]]:
    fds = open_fds()
    made: list[Hole] = []

    def make(kind: str, change: Callable[[int, bytes], bytes] = swallow, stall_s: float = STALL_S) -> Hole:
        made.append(Hole(kind, change, stall_s))
        return made[-1]

    yield make
    for hole in made:
        hole.close()
    assert lets_go(fds + 2), "descriptors leak"


@pytest.mark.parametrize("kind", ["tcp", "tls"])
def test_a_read_over_which_nothing_comes_ends_and_the_next_one_does_not_begin(
    holes: Callable[..., Hole], kind: str
) -> None:
    hole = holes(kind)
    with pytest.raises(PipeClosedError, match="left alone"):
        hole.fetch(hole.source)
    assert hole.fetcher.is_resting(hole.source)
    assert not hole.fetcher.admits(hole.source)
    connections = len(hole.proxy._sockets)
    with pytest.raises(PipeClosedError, match="left alone"):
        hole.fetch(hole.source)
    assert len(hole.proxy._sockets) == connections
    assert hole.fetcher.rests.num_stalls() == {kind: 1}


def test_the_same_read_goes_on_over_another_kind(holes: Callable[..., Hole]) -> None:
    hole = holes("tcp", stall_s=PATIENT_S)
    rig = hole.rig
    shm = BlockServer(rig.source_arena, rig.print, rig.server.source.instance_id, kinds=("shm",))
    fetcher = hole.open_fetcher(("tcp", "shm"))
    try:
        ends = (*silent_source(rig).endpoints, *shm.endpoints)
        silent = dataclasses.replace(shm.source, endpoints=ends)
        generations = rig.source_arena.generations[IDS]
        result = fetcher.fetch(silent, IDS, generations, IDS, deadline=soon(LIMIT_S))
        assert result.valid.all()
        assert rig.same(IDS, IDS)
        assert result.pipe_kind == "shm"
        assert "tcp" in result.fallback_reason
        assert not fetcher.is_resting(silent), "there is a pipe that works"
        assert fetcher.admits(silent)
    finally:
        fetcher.close()
        shm.close()


def test_a_slow_read_over_which_something_comes_goes_on(holes: Callable[..., Hole]) -> None:
    pause = threading.Event()

    def trickle(at: int, data: bytes) -> bytes:
        if at > HANDSHAKE_BYTES:
            pause.wait(PATIENT_S / 5)
        return data

    hole = holes("tcp", trickle, PATIENT_S)
    began = time.monotonic()
    result = hole.fetch(hole.source)
    took_s = time.monotonic() - began
    assert result.valid.all()  # type: ignore[attr-defined]
    assert took_s > PATIENT_S, "it is longer than the limit"
    assert not hole.fetcher.is_resting(hole.source)


async def test_silence_counts_from_when_the_source_could_send(holes: Callable[..., Hole]) -> None:
    """A prompt may wait in its queue for long: until the source says that it is computed, silence is no stall."""
    hole = holes("tcp")
    arena = hole.rig.source_arena
    blocks = SequenceBlocks.of(
        (IDS.tolist(), arena.generations[IDS], IDS.tolist()),
        IDS.tolist(),
        np.ones(len(IDS), bool),
        arena.progress.value,
    )
    stall = hole.fetcher.stall_limit(source_ready=False)
    fetch = asyncio.create_task(hole.fetcher.fetch_async(hole.source, blocks, deadline=soon(LIMIT_S), stall=stall))
    done, _ = await asyncio.wait([fetch], timeout=3 * STALL_S)
    assert not done
    stall.expect()
    async with asyncio.timeout(LIMIT_S):
        with pytest.raises(PipeClosedError):
            await fetch
    assert hole.fetcher.is_resting(hole.source)


class Clock:
    """A clock that moves when it is told to."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_a_rest_doubles_up_to_a_bound_and_one_caller_tries_the_pipe_after_it() -> None:
    clock = Clock()
    rests = PipeRests(clock)
    assert rests.admits("p0", "tcp")
    lengths = []
    for _ in range(7):
        rests.record_stall("p0", "tcp")
        rests.record_stall("p0", "tcp")  # of another read at the same time
        assert not rests.admits("p0", "tcp")
        assert rests.is_resting("p0", "tcp")
        assert rests.admits("p0", "shm")
        assert rests.admits("p1", "tcp")
        began = clock.now
        while rests.is_resting("p0", "tcp"):
            clock.now += 0.5
        lengths.append(clock.now - began)
        assert rests.admits("p0", "tcp"), "the first may try it"
        assert not rests.admits("p0", "tcp"), "the others wait for what comes of that"
        assert not rests.is_resting("p0", "tcp"), "it may be connected for the trial"
    assert lengths == [5.0, 10.0, 20.0, 40.0, 60.0, 60.0, 60.0]
    rests.record_success("p0", "tcp")
    assert all(rests.admits("p0", "tcp") for _ in range(3))
    assert rests.num_stalls() == {"tcp": 14}


def test_a_pipe_that_worked_for_a_while_begins_with_a_short_rest() -> None:
    clock = Clock()
    rests = PipeRests(clock)
    for pause_s in (FIRST_REST_S, 2 * FIRST_REST_S):
        rests.record_stall("p0", "tcp")
        clock.now += pause_s
        assert rests.admits("p0", "tcp")
        rests.record_success("p0", "tcp")
    clock.now += LONGEST_REST_S
    rests.record_stall("p0", "tcp")
    clock.now += FIRST_REST_S
    assert not rests.is_resting("p0", "tcp")


def test_a_trial_of_which_nothing_came_is_followed_by_another() -> None:
    clock = Clock()
    rests = PipeRests(clock)
    rests.record_stall("p0", "tcp")
    clock.now += FIRST_REST_S
    assert rests.admits("p0", "tcp")
    clock.now += FIRST_REST_S
    assert rests.admits("p0", "tcp")
