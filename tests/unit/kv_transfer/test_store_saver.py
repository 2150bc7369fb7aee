"""The saving half of the store connector, where the engine's thread and the loop meet."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from typing import Any

import pytest

from baton.circuit_breaker import CircuitBreaker
from baton.errors import UnavailableError
from baton.hashing import block_hashes, root_hash
from baton.kv_cache.arena import HostArena
from baton.kv_transfer.connector.store.backend import (
    LoadCall,
    SaveCall,
    SaveResult,
    StoreBackend,
    StoreLimits,
    StoreUse,
)
from baton.kv_transfer.connector.store.connector import StoreSaver
from baton.types import BlockId, RequestId

REQUEST = RequestId("r")
HASHES = block_hashes(list(range(64)), 16, root_hash(b"kind"))
IDS = [BlockId(i) for i in range(4)]
WAIT_S = 240.0


class Backend(StoreBackend):
    """A store that takes everything."""

    def __init__(self) -> None:
        self.saved: list[bytes] = []

    async def save(self, call: SaveCall) -> SaveResult:
        self.saved += call.part.wanted
        return SaveResult(len(call.part), len(call.part))

    async def load(self, call: LoadCall) -> None:
        raise AssertionError("nothing is loaded")

    async def close(self) -> None:
        pass


class Lock:
    """A lock that lets somebody in between its release and what its holder does next."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.between: Callable[[], None] = lambda: None

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()
        self.between()


async def test_blocks_that_become_complete_while_a_task_ends_are_saved() -> None:
    """Between a task's last look and the loop's word that it has ended, the engine may begin the next one."""
    loop, backend, lock, arena = asyncio.get_running_loop(), Backend(), Lock(), HostArena(4, 4096)

    made: Any = StoreSaver(
        StoreLimits(),
        arena=arena,
        backend=backend,
        breaker=CircuitBreaker(3, 5.0),
        use=StoreUse(),
        loop=loop,
        wake=lambda: None,
        source=lambda: None,  # type: ignore[arg-type, return-value]
    )
    made._lock = lock

    def complete_more() -> None:
        save = made._saves.get(REQUEST)
        if backend.saved and save is not None and not save.running:
            lock.between = lambda: None
            made.save_blocks(REQUEST, IDS, HASHES)

    lock.between = complete_more
    made.save_blocks(REQUEST, IDS, HASHES[:2])
    async with asyncio.timeout(WAIT_S):
        while made._tasks or len(backend.saved) < len(HASHES):
            await asyncio.sleep(0.001)
            if not made._tasks and made._saves[REQUEST].given_up:
                break
    assert backend.saved == list(HASHES)
    assert not made.finish_request(REQUEST)
    assert not made.pending
    arena.close()


async def test_a_store_that_is_away_is_told_once_and_once_that_it_is_back(caplog: pytest.LogCaptureFixture) -> None:
    loop, backend, arena, now, use = asyncio.get_running_loop(), Backend(), HostArena(4, 4096), [0.0], StoreUse()
    away = True
    save = backend.save

    async def maybe(call: SaveCall) -> SaveResult:
        if away:
            raise UnavailableError("nobody is there")
        return await save(call)

    backend.save = maybe  # type: ignore[method-assign]
    saver = StoreSaver(
        StoreLimits(),
        arena=arena,
        backend=backend,
        breaker=CircuitBreaker(3, 5.0, lambda: now[0]),
        use=use,
        loop=loop,
        wake=lambda: None,
        source=lambda: None,  # type: ignore[arg-type, return-value]
    )

    async def save_all(first: int) -> None:
        for number in range(first, first + 40):
            request = RequestId(str(number))
            now[0] += 10.0
            saver.save_blocks(request, IDS, HASHES)
            saver.finish_request(request)
            async with asyncio.timeout(WAIT_S):
                while saver.pending:
                    saver.poll_releases()
                    await asyncio.sleep(0)

    await save_all(0)
    lines = [record.getMessage() for record in caplog.records if record.levelno >= logging.INFO]
    assert use.save_failures == 40
    assert lines == ["the KV store is left alone for a while: nobody is there"]
    away = False
    await save_all(100)
    assert use.saves == 40
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.INFO][1:] == [
        "the KV store answers again"
    ]
    arena.close()
