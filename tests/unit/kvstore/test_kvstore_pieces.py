"""Long chains come from disk piece by piece: who asks reads the first blocks while the others are brought.

And no lease stays that nobody knows of: it would hold memory that others wait for until its time is up.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.transport.store_check import check_store

from baton.config.kvstore import KVStoreConfig
from baton.errors import DeadlineError
from baton.kv_cache.arena import HostArena
from baton.kv_cache.fingerprint import Fingerprint
from baton.kv_cache.layout import KVLayout, LayerShape
from baton.kv_transfer.blocks import BlockFetcher, BlockServer
from baton.kv_transfer.connector.store.backend import ChainPart, LoadCall, LoadProgress, SaveCall
from baton.kv_transfer.connector.store.client import StoreClient
from baton.types import BlockHash, BlockId, InstanceId
from baton_kvstore.memory.leases import Lease
from baton_kvstore.server import KVStoreServer
from baton_kvstore.tiers import promotion
from baton_kvstore.tiers.disk.tier import DiskTier
from baton_kvstore.tiers.promotion import LeaseRequest
from baton_kvstore.types import KvFormat

KIND = Fingerprint.of(model="m", model_digest="m", rope="", layout=KVLayout((LayerShape(1, 32, 32),), 16, "float32"))
BLOCK = KIND.block_bytes
LENGTH, PIECE = 8, 2
WAIT_S = 240.0


def names(start: int) -> list[BlockHash]:
    return [BlockHash(bytes([start + i]) * 32) for i in range(LENGTH)]


class Gate:
    """Lets the disk read the first block of a chain at once, and what comes after the first piece when it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, first: Sequence[BlockHash]) -> None:
        self.open, self._first, self._read = threading.Event(), set(first), DiskTier.read
        gate = self

        def read(tier: DiskTier, kind: KvFormat, hashes: Sequence[BlockHash], into: Sequence[memoryview]) -> list[bool]:
            if not gate._first.issuperset(hashes):
                assert gate.open.wait(WAIT_S)
            return gate._read(tier, kind, hashes, into)

        monkeypatch.setattr(DiskTier, "read", read)


@asynccontextmanager
async def store(tmp_path: Path, blocks: int) -> AsyncIterator[tuple[KVStoreServer, Pool]]:
    config = KVStoreConfig(
        capacity_bytes=blocks * BLOCK, disk_path=str(tmp_path / "kv"), disk_bytes=4 << 20, disk_write="all"
    )
    server = KVStoreServer(config)
    await server.start()
    pool = Pool(server.address)
    try:
        yield server, pool
        check_store(server.store)
    finally:
        await pool.close()
        await server.stop()


class Pool:
    """An instance's pool: chains are put from its first half and loaded into the second one."""

    def __init__(self, address: str) -> None:
        self.arena = HostArena(2 * LENGTH, BLOCK)
        self.server, self.fetcher = BlockServer(self.arena, KIND, InstanceId("one")), BlockFetcher(self.arena, KIND)
        self.client = StoreClient(
            address,
            fingerprint=KIND,
            fetcher=self.fetcher,
            token=None,
            call_timeout_s=WAIT_S,
            blocks_per_call=LENGTH,
        )
        self.deadline = time.monotonic() + WAIT_S

    async def save(self, chain: list[BlockHash]) -> None:
        self.arena.blocks[:LENGTH] = np.array([name[0] for name in chain], np.uint8)[:, None]
        ids = [BlockId(i) for i in range(LENGTH)]
        part = ChainPart(chain, 0, LENGTH)
        held, _ = await self.client.save(SaveCall(self.server.source, part, ids, [0] * LENGTH, self.deadline))
        assert held == LENGTH

    async def load(self, chain: list[BlockHash], progress: LoadProgress) -> None:
        ids = [BlockId(LENGTH + i) for i in range(LENGTH)]
        part = ChainPart(chain, 0, LENGTH)
        await self.client.load(LoadCall(part, ids, self.deadline, progress=progress))

    def holds(self, chain: list[BlockHash]) -> bool:
        wanted = np.array([name[0] for name in chain], np.uint8)[:, None]
        return bool((self.arena.blocks[LENGTH:] == wanted).all())

    async def close(self) -> None:
        await self.client.close()
        self.server.close()
        self.fetcher.close()
        self.arena.close()


async def until(done: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not done():
            await asyncio.sleep(0.001)


async def test_a_chain_on_disk_comes_in_pieces_and_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(promotion, "_PIECE_BYTES", PIECE * BLOCK)
    chain = names(1)
    gate = Gate(monkeypatch, chain[:PIECE])
    async with store(tmp_path, 2 * LENGTH) as (server, pool):
        try:
            await pool.save(chain)
            for start in (50, 100, 150):  # drive the chain out of memory
                await pool.save(names(start))
            assert server.store.contains(KIND, chain) == 0

            for _ in range(2):  # nothing else can be read yet, and nobody waits for it
                lease = await pool.client.lease(chain, deadline=pool.deadline)
                assert lease is not None
                assert (len(lease), lease.more) == (PIECE, True)
                pool.client.release(lease)

            progress = LoadProgress()
            load = asyncio.create_task(pool.load(chain, progress))
            await until(lambda: progress.num_blocks >= PIECE)
            assert not load.done()
            gate.open.set()
            await load
            assert progress.num_blocks == LENGTH
            assert pool.holds(chain)
        finally:
            gate.open.set()


async def test_who_wants_blocks_from_disk_waits_while_others_read_all_there_is_room_for(tmp_path: Path) -> None:
    chain, other = names(1), names(50)
    async with store(tmp_path, LENGTH) as (server, pool):
        await pool.save(chain)
        await pool.save(other)
        lease = await pool.client.lease(other, deadline=pool.deadline)
        assert lease is not None
        assert len(lease) == LENGTH  # the whole memory
        progress = LoadProgress()
        load = asyncio.create_task(pool.load(chain, progress))
        await until(lambda: bool(server.tiers._promoter._jobs))
        await pool.client.ping()
        assert not load.done()
        assert progress.num_blocks == 0
        pool.client.release(lease)
        await load
        assert progress.num_blocks == LENGTH
        assert pool.holds(chain)


@pytest.mark.parametrize("end", ["cancelled", "deadline"])
async def test_a_lease_that_comes_in_the_moment_its_get_ends_is_not_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    chain = names(1)
    async with store(tmp_path, 2 * LENGTH) as (server, pool):
        for start in (1, 50, 100, 150):
            await pool.save(names(start))
        grant, deadline = server.store.lease, time.monotonic() + (WAIT_S if end == "cancelled" else 4.0)

        def lease(fingerprint: Fingerprint, hashes: Sequence[BlockHash], ttl_s: float) -> Lease | None:
            granted = grant(fingerprint, hashes, ttl_s)
            if end == "cancelled":
                getting.cancel()
            else:
                time.sleep(max(0.0, deadline - time.monotonic()))  # the loop stands still, as on a busy machine
            return granted

        monkeypatch.setattr(server.store, "lease", lease)
        getting = asyncio.ensure_future(server.tiers.get(chain, LeaseRequest(KIND, deadline, WAIT_S)))
        await asyncio.wait([getting], timeout=WAIT_S)
        if end == "cancelled":
            assert getting.cancelled()
        elif (found := getting.result()[0]) is not None:
            server.store.release(found.lease_id)
        assert server.tiers.counters.promotions
        assert not len(server.store.leases)


async def test_a_lease_whose_answer_comes_too_late_is_given_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with store(tmp_path, 2 * LENGTH) as (server, pool):
        await pool.save(names(1))
        answering, gate, get = asyncio.Event(), asyncio.Event(), server.tiers.get

        async def late(*args: Any) -> tuple[Lease | None, bool]:
            found = await get(*args)
            answering.set()
            await gate.wait()
            return found

        monkeypatch.setattr(server.tiers, "get", late)
        monkeypatch.setattr(pool.client, "_call_timeout_s", 3.0)
        with pytest.raises(DeadlineError):
            await pool.client.lease(names(1), deadline=pool.deadline)
        await answering.wait()
        assert len(server.store.leases) == 1
        gate.set()
        await until(lambda: not len(server.store.leases))
