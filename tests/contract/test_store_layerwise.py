"""Blocks that are saved while they are computed: a real store copies a layer of them while the test computes the next.

The test is the engine: it tells the connector of a step, writes layers and raises the pool's progress.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest
from tests.support.servers.store_process import StoreProcess
from tests.support.transport.kv_shapes import pool_of, whole_kv
from tests.support.transport.store_check import check_store

from baton.config.kvstore import KVStoreConfig
from baton.hashing import block_hashes, root_hash
from baton.kv_cache.arena import HostArena
from baton.kv_cache.connector import PlannedSave
from baton.kv_cache.fingerprint import Fingerprint
from baton.kv_cache.layout import KVLayout, LayerShape
from baton.kv_cache.shards import KVGeometry, KVShards, ShardSpec, shard_layout, shard_specs
from baton.kv_transfer.blocks import BlockFetcher, BlockServer
from baton.kv_transfer.connector.store.backend import ChainPart, LoadCall, StoreOptions, StoreUse
from baton.kv_transfer.connector.store.connector import SavedPool, open_connector, open_store
from baton.types import BlockHash, BlockId, InstanceId, RequestId
from baton_kvstore.server import KVStoreServer

BS, LAYERS, COUNT = 16, 4, 6
GEOMETRY = KVGeometry((LayerShape(2, 16, 16),) * LAYERS, "float32", frozenset())
KIND = Fingerprint.of(model="tiny", model_digest="d", rope="", layout=KVLayout(GEOMETRY.layers, BS, "float32"))
WHOLE = whole_kv(GEOMETRY, COUNT * BS)
TOKENS = list(range(COUNT * BS))
HASHES = block_hashes(TOKENS, BS, root_hash(KIND.content_key()))
REQUEST = RequestId("r")
WAIT_S = 240.0


class Prefill:
    """A prefill instance's pool and connector. The pool's first blocks are the request's."""

    def __init__(self, address: str, *, tp: int = 1, kinds: str = "shm") -> None:
        self.kind = dataclasses.replace(KIND, tp_size=tp)
        self.specs = shard_specs(tp, 1)
        self.shards = KVShards(
            [HostArena(2 * COUNT, shard_layout(GEOMETRY, spec, BS).block_bytes) for spec in self.specs]
        )
        self.arena = self.shards.primary
        self.server = BlockServer(self.shards, self.kind, InstanceId("prefill-0"), kinds=(kinds,))
        self.fetcher = BlockFetcher(self.shards, self.kind)
        self.base = 0  # progress before the step that begins next
        self.ids = [BlockId(i) for i in range(COUNT)]
        self.connector = open_connector(
            StoreOptions(address, call_timeout_s=WAIT_S, save_timeout_s=10 * WAIT_S),
            pool=SavedPool(self.arena, BS, lambda: self.server.source),
            fingerprint=self.kind,
            fetcher=self.fetcher,
            loop=asyncio.get_running_loop(),
            wake=lambda: None,
        )
        self.connector.follow_steps(lambda: self.base)

    def begin(self, stop: int = COUNT, start: int = 0, request: RequestId = REQUEST) -> None:
        """Begin a step that computes some blocks."""
        planned = PlannedSave(request, self.ids, stop * BS, num_computed=start * BS, hashes=tuple(HASHES[:stop]))
        self.connector.step_begins([planned])
        self.arena.progress.advance(self.base)  # as whoever offers blocks to decode does, when it is told
        self.base += LAYERS

    def layer(self, layer: int, stop: int = COUNT, start: int = 0) -> None:
        """Compute a layer of the step's blocks."""
        for spec, arena in zip(self.specs, self.shards.arenas, strict=True):
            step = arena.block_bytes // LAYERS
            part = slice(layer * step, (layer + 1) * step)
            arena.blocks[start:stop, part] = pool_of(GEOMETRY, spec, BS, WHOLE)[start:stop, part]
        self.arena.progress.advance(self.base - LAYERS + layer + 1)

    def computed(self, stop: int = COUNT) -> None:
        """Say that blocks are complete."""
        self.connector.blocks_computed(REQUEST, self.ids, HASHES[:stop], stop * BS)

    async def ended(self) -> None:
        """End the request and wait until its blocks may be reused."""
        if self.connector.request_finished(REQUEST):
            await until(lambda: REQUEST in self.connector.poll_releases())
        assert not self.connector.has_pending()

    async def close(self) -> None:
        await self.connector.aclose()
        self.server.close()
        self.fetcher.close()
        self.shards.close()


async def until(holds: Callable[[], object]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not holds():
            await asyncio.sleep(0.002)


@asynccontextmanager
async def store(**options: Any) -> AsyncIterator[KVStoreServer]:
    server = KVStoreServer(KVStoreConfig(**{"capacity_bytes": 8 * COUNT * KIND.block_bytes, **options}))
    await server.start()
    try:
        yield server
        check_store(server.store)
        assert not server.store._pinned
    finally:
        await server.stop()


@asynccontextmanager
async def prefill(address: str, **options: Any) -> AsyncIterator[Prefill]:
    made = Prefill(address, **options)
    try:
        yield made
    finally:
        await made.close()


async def held(server: KVStoreServer) -> int:
    """Load what a store has of the request, check every byte and return how many blocks that are."""
    arena = HostArena(COUNT, KIND.block_bytes)
    fetcher = BlockFetcher(arena, KIND)
    backend = open_store(
        StoreOptions(server.address, call_timeout_s=WAIT_S), fingerprint=KIND, fetcher=fetcher, use=StoreUse()
    )
    ids = [BlockId(i) for i in range(COUNT)]
    call = LoadCall(ChainPart(HASHES, 0, COUNT), ids, time.monotonic() + WAIT_S)
    await backend.load(call)
    count = call.progress.num_blocks
    assert np.array_equal(arena.blocks[:count], pool_of(GEOMETRY, ShardSpec(), BS, WHOLE)[:count])
    await until(lambda: not len(server.store.leases))
    await backend.close()
    fetcher.close()
    arena.close()
    return count


def names(server: KVStoreServer) -> set[BlockHash]:
    """What can be found in memory."""
    return {name for name in server.store.hashes(KIND.digest()) if server.store.has(KIND.digest(), name)}


@pytest.mark.parametrize(("tp", "kinds"), [(1, "shm"), (1, "tcp"), (2, "tcp")])
async def test_blocks_are_in_the_store_with_their_last_layer_and_not_before(tp: int, kinds: str) -> None:
    async with store() as server, prefill(server.address, tp=tp, kinds=kinds) as one:
        one.begin(4)
        for layer in range(LAYERS - 1):
            one.layer(layer, 4)
        await until(lambda: server.store.used_bytes)  # the store has slots for them, and nobody finds them
        assert not names(server)
        one.layer(LAYERS - 1, 4)
        await until(lambda: names(server) == set(HASHES[:4]))  # nobody has said yet that the step has ended
        one.computed(4)
        one.begin(COUNT, 4)  # the prompt's next chunk
        for layer in range(LAYERS):
            one.layer(layer, COUNT, 4)
        await until(lambda: len(names(server)) == COUNT)
        one.computed()
        await one.ended()
        assert await held(server) == COUNT
        assert (one.connector.use.followed_blocks, one.connector.use.saved_blocks) == (COUNT, COUNT)
        assert one.connector.use.saved_bytes == COUNT * KIND.block_bytes


@pytest.mark.parametrize("heard", [True, False])
async def test_a_step_that_failed_is_not_stored(heard: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether the store hears of it, or copies what lies in the blocks when the next step raises the progress."""
    async with store() as server, prefill(server.address) as one:
        if not heard:
            monkeypatch.setattr(one.connector._saver, "_unfollow", lambda save: None)
        one.begin()
        one.layer(0)
        await until(lambda: server.store.used_bytes)
        if heard:
            await one.ended()
        else:
            one.begin(0, request=RequestId("another"))
            for layer in range(LAYERS):
                one.layer(layer, 0)
        await until(lambda: not server.store.used_bytes)
        assert not names(server)
        await one.ended()
        assert one.connector.use.saved_blocks == 0


async def test_what_the_store_declines_is_saved_when_it_is_complete() -> None:
    async with store(capacity_bytes=2 * COUNT * KIND.block_bytes) as server, prefill(server.address) as one:
        one.begin()  # half of the memory, for as long as a step takes: too much
        assert one.connector._saver is not None
        save = one.connector._saver._saves[REQUEST]
        await until(lambda: not save.running)  # although the step goes on
        for layer in range(LAYERS):
            one.layer(layer)
        one.computed()
        await one.ended()
        assert (one.connector.use.followed_blocks, one.connector.use.saved_blocks) == (0, COUNT)
        assert await held(server) == COUNT


async def test_a_prefill_instance_that_goes_in_mid_save_leaves_nothing() -> None:
    async with store() as server:
        async with prefill(server.address, kinds="tcp") as one:
            one.begin()
            one.layer(0)
            await until(lambda: server.store.used_bytes)
        await until(lambda: not server.store.used_bytes)
        assert not names(server)


async def test_a_store_that_dies_in_mid_save_costs_the_save_and_nothing_else() -> None:
    node = StoreProcess("--capacity-bytes", str(64 * COUNT * KIND.block_bytes))
    await node.start()
    async with prefill(node.address) as one:
        one.begin()
        one.layer(0)
        assert one.connector._saver is not None
        save = one.connector._saver._saves[REQUEST]
        await until(lambda: save.following is not None)
        await node.kill()
        for layer in range(1, LAYERS):
            one.layer(layer)
        one.computed()
        await one.ended()
        assert (one.connector.use.saved_blocks, one.connector.use.save_failures) == (0, 1)
        assert not one.connector._saver._saves
