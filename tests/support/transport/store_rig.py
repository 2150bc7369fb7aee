"""A store of some kind, clients of it, and the chains of blocks that they keep there."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.servers.mooncake import MooncakeMaster, missing_mooncake
from tests.support.servers.redis_server import RedisServer, missing_redis, redis_cluster
from tests.support.transport.store_check import check_store

from baton.config.kvstore import KVStoreConfig
from baton.hashing import block_hashes, root_hash
from baton.kv_cache.arena import HostArena
from baton.kv_cache.fingerprint import Fingerprint
from baton.kv_cache.layout import KVLayout, LayerShape
from baton.kv_cache.shards import KVShards, shard_layout, shard_specs
from baton.kv_transfer.blocks import BlockFetcher, BlockServer
from baton.kv_transfer.connector.store.backend import (
    ChainPart,
    LoadCall,
    LoadProgress,
    SaveCall,
    StoreBackend,
    StoreOptions,
    StoreUse,
)
from baton.kv_transfer.connector.store.connector import open_store
from baton.rpc.redis import open_redis
from baton.rpc.server import free_port
from baton.types import BlockHash, BlockId, InstanceId
from baton_kvstore.server import KVStoreServer

BS = 16
LAYOUT = KVLayout((LayerShape(1, 16, 16),), BS, "float32")
KIND = Fingerprint.of(model="tiny", model_digest="d1", rope="", layout=LAYOUT)
BLOCK = KIND.block_bytes
CHAIN = 100
"""Blocks of a test's chain: more than three segments."""
POOL = 2 * CHAIN
WAIT_S = 120.0

needs_redis = pytest.mark.skipif(missing_redis() is not None, reason=str(missing_redis()))
needs_mooncake = pytest.mark.skipif(missing_mooncake() is not None, reason=str(missing_mooncake()))


def chain(seed: int = 0, length: int = CHAIN) -> list[BlockHash]:
    tokens = np.random.default_rng(seed).integers(0, 1000, length * BS).tolist()
    return block_hashes(tokens, BS, root_hash(KIND.content_key()))


def content(name: BlockHash) -> np.ndarray:
    return np.resize(np.frombuffer(name, np.uint8), BLOCK)


class Client:
    """An instance's pool and its store: what is put lies in the pool's first half, what is got goes into the second."""

    def __init__(self, options: StoreOptions, kind: Fingerprint = KIND) -> None:
        self.use = StoreUse()
        layouts = [shard_layout(kind.geometry, spec, BS) for spec in shard_specs(kind.tp_size, kind.pp_size)]
        self.shards = KVShards([HostArena(POOL, layout.block_bytes) for layout in layouts])
        self.arena = self.shards.primary
        self.server = BlockServer(self.shards, kind, InstanceId("prefill-0"))
        self.fetcher = BlockFetcher(self.shards, kind)
        self.backend: StoreBackend = open_store(options, fingerprint=kind, fetcher=self.fetcher, use=self.use)

    async def put(self, hashes: Sequence[BlockHash], start: int = 0, *, stale: Sequence[int] = ()) -> tuple[int, int]:
        """Put a chain from ``start`` on; ``stale``: blocks that are used otherwise by the time the store comes."""
        count = len(hashes) - start
        for i in range(count):
            self.arena.blocks[i] = content(hashes[start + i])
        generations = self.arena.generations[:count].tolist()
        for at in stale:
            self.arena.generations[at - start] += np.uint64(1)
            self.arena.blocks[at - start] = 99
        ids = [BlockId(i) for i in range(count)]
        part = ChainPart(hashes, start, len(hashes))
        deadline = time.monotonic() + WAIT_S
        return await self.backend.save(SaveCall(self.server.source, part, ids, generations, deadline))

    async def get(
        self,
        hashes: Sequence[BlockHash],
        start: int = 0,
        *,
        progress: LoadProgress | None = None,
        deadline_s: float = WAIT_S,
        cancelled: threading.Event | None = None,
    ) -> LoadProgress:
        """Get a chain from ``start`` on; whatever comes must be right."""
        progress = LoadProgress() if progress is None else progress
        self.arena.blocks[CHAIN:] = 0
        ids = [BlockId(CHAIN + i) for i in range(len(hashes) - start)]
        try:
            part = ChainPart(hashes, start, len(hashes))
            deadline = time.monotonic() + deadline_s
            await self.backend.load(LoadCall(part, ids, deadline, cancelled or threading.Event(), progress))
        finally:
            for i in range(progress.num_blocks):
                assert np.array_equal(self.arena.blocks[CHAIN + i], content(hashes[start + i])), i
        return progress

    async def close(self) -> None:
        await self.backend.close()
        self.server.close()
        self.fetcher.close()
        self.shards.close()


class Rig:
    """A store of some kind, and clients of it."""

    def __init__(self, kind: str, stack: AsyncExitStack) -> None:
        self.kind, self._stack = kind, stack
        self.replication = 2 if kind == "three-twice" else 1
        self.nodes: list[KVStoreServer] = []
        self.redis: list[RedisServer] = []
        self.master: MooncakeMaster | None = None
        self.address = ""

    async def start(self, folder: Path, masters: Sequence[RedisServer] = ()) -> None:
        if self.kind == "redis":
            self.redis = [await self._stack.enter_async_context(RedisServer())]
            self.address = self.redis[0].url
        elif self.kind == "redis-cluster":
            self.redis = list(masters) or await self._stack.enter_async_context(redis_cluster(folder))
            for server in self.redis:
                client = open_redis(server.url)
                await client.flushall()
                await client.aclose()
            self.address = self.redis[0].url.replace("redis://", "redis+cluster://").removesuffix("/0")
        elif self.kind == "mooncake":
            self.master = await self._stack.enter_async_context(MooncakeMaster())
            self.address = f"{self.master.url}?segment_bytes={32 << 20}"
        else:
            for _ in range(1 if self.kind == "node" else 3):
                self.nodes.append(await self.node())
            self.address = ",".join(node.address for node in self.nodes)

    async def node(self, **options: Any) -> KVStoreServer:
        """Start a node, to be stopped in the end."""
        server = KVStoreServer(KVStoreConfig(**{"capacity_bytes": 16 * CHAIN * BLOCK, "port": free_port(), **options}))
        await server.start()
        self._stack.push_async_callback(server.stop)
        return server

    async def client(self, kind: Fingerprint = KIND, **changes: Any) -> Client:
        defaults = {"replication": self.replication, "failures": 1, "cooldown_s": 0.02, "hot_loads_per_s": 0.0}
        defaults |= {"call_timeout_s": WAIT_S}  # a busy machine is no missing node
        client = Client(StoreOptions(**{"address": self.address, **defaults, **changes}), kind)
        self._stack.push_async_callback(client.close)
        return client

    async def lose(self) -> None:
        """End the node that keeps the chain's first segment, or a Redis."""
        for redis in self.redis:
            await redis.kill()
        if self.nodes:
            await self.holder().stop()

    def holder(self) -> KVStoreServer:
        """A node that holds the beginning of the usual chain."""
        digest, first = KIND.digest(), chain()[0]
        return next(node for node in self.nodes if node.store.has(digest, first))

    async def check(self) -> None:
        """Pools add up and no lease is left."""
        async with asyncio.timeout(WAIT_S):
            for node in self.nodes:
                check_store(node.store)
                while len(node.store.leases):
                    await asyncio.sleep(0.002)


@asynccontextmanager
async def rig_of(kind: str, folder: Path, masters: Sequence[RedisServer] = ()) -> AsyncIterator[Rig]:
    async with AsyncExitStack() as stack:
        rig = Rig(kind, stack)
        await rig.start(folder, masters)
        yield rig
        await rig.check()


async def eventually(holds: Any) -> None:
    async with asyncio.timeout(WAIT_S):
        while not holds():
            await asyncio.sleep(0.005)
