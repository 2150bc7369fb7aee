"""The KV store's own events: a follower always knows what lies in which tier, and a router sends requests by it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from prometheus_client import CollectorRegistry
from tests.integration.router.test_router_process import router
from tests.support.servers.cluster import LocalCluster
from tests.support.servers.kvstore_service import BLOCK, KIND, connected, store
from tests.support.servers.redis_server import RedisServer, missing_redis
from tests.support.servers.store_process import store_processes
from tests.support.transport.named_blocks import names

from baton.api.v1 import events_pb2, kvstore_pb2
from baton.config import EngineConfig
from baton.config.router import RouterConfig
from baton.config.worker import WorkerConfig
from baton.types import Epoch
from baton_kvstore.server import KVStoreServer
from baton_router.indexer.events import EventApplier, IndexState
from baton_router.indexer.prefix_index import PrefixIndex
from baton_router.registry.registry import Registry

MODEL = "models/baton-tiny"
WAIT_S = 240.0


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not await condition():
            await asyncio.sleep(0.02)


class Follower:
    """What a router makes of a store's events."""

    def __init__(self, stub: Any) -> None:
        self.stub = stub
        self.index = PrefixIndex()
        self.events = EventApplier(self.index, now=lambda: 0.0)
        self.batches: list[events_pb2.KvEventBatch] = []
        self.epoch = Epoch(b"")

    async def take(self, condition: Callable[[], bool]) -> None:
        """Follow the stream until a condition holds, from where it was left."""
        request = kvstore_pb2.StreamStoreEventsRequest(
            from_sequence=self.events.resume_from(self.epoch), epoch=self.epoch, heartbeat_ms=20
        )
        call = self.stub.StreamStoreEvents(request, timeout=WAIT_S)
        try:
            async for answer in call:
                batch = answer.batch
                self.epoch = Epoch(batch.epoch)
                if batch.heartbeat:
                    self.events.heartbeat(batch, 60.0)
                elif self.events.apply(batch):
                    self.batches.append(batch)
                if condition():
                    return
        finally:
            call.cancel()
        raise AssertionError("the stream ended")

    def holds(self, hashes: Sequence[bytes], tier: str) -> int:
        slot = self.events.lower_slots.get(tier)
        return 0 if slot is None else sum(self.index.match_any([name], [1 << slot])[0] for name in hashes)  # type: ignore[list-item]

    def num_blocks(self, tier: str) -> int:
        return self.events.num_lower_blocks.get(tier, 0)


async def test_a_follower_sees_what_is_stored_evicted_and_deleted() -> None:
    async with store() as server, connected(server) as instance:
        follower = Follower(instance.stub)
        await instance.put("a", "b")
        await follower.take(lambda: follower.num_blocks("host") == 2)
        assert follower.batches[0].snapshot
        await instance.put(*"cdefghij")  # 8 blocks fit
        await follower.take(lambda: follower.num_blocks("host") == 8 and follower.holds(names(*"ab"), "host") == 0)
        assert [batch.snapshot for batch in follower.batches].count(True) == 1
        request = kvstore_pb2.DeleteRequest(
            fingerprint=instance.put_request(names("a")).fingerprint, block_hashes=names("c", "d")
        )
        await instance.stub.Delete(request, timeout=WAIT_S)
        await follower.take(lambda: follower.num_blocks("host") == 6)
        assert follower.holds(names(*"efghij"), "host") == 6
        late = Follower(instance.stub)
        await late.take(lambda: late.num_blocks("host") == 6)
        assert late.holds(names(*"efghij"), "host") == 6


async def test_a_follower_sees_each_tier_and_a_restart(tmp_path: Path) -> None:
    disk = {"disk_path": str(tmp_path / "kv"), "disk_bytes": 4 << 20, "disk_sync_s": 0.01}
    every = [chr(ord("a") + i) for i in range(20)]
    async with store(**disk) as server, connected(server) as instance:
        follower = Follower(instance.stub)
        for label in every:
            await instance.put(label)
        await follower.take(lambda: all(_anywhere(follower, name) for name in names(*every)))
        assert 0 < follower.num_blocks("host") <= 8
        assert follower.num_blocks("disk") >= len(every) - 8
        before = follower.epoch
    async with store(**disk) as server, connected(server) as instance:
        follower.stub = instance.stub
        await follower.take(lambda: follower.epoch != before)
        assert follower.num_blocks("host") == 0
        kept = follower.num_blocks("disk")
        assert kept >= len(every) - 8
        found = [label for label in every if follower.holds(names(label), "disk")]
        answer = await instance.get(found[0])
        assert len(answer.block_ids) == 1
        await follower.take(lambda: follower.holds(names(found[0]), "host") == 1)  # brought to memory, still on disk
        assert follower.num_blocks("disk") == kept


def _anywhere(follower: Follower, name: bytes) -> bool:
    return any(follower.holds([name], tier) for tier in ("host", "disk"))


async def test_under_churn_a_follower_ends_with_exactly_what_is_there() -> None:
    draw = np.random.default_rng(5)
    async with store(capacity_bytes=6 * BLOCK) as server, connected(server) as instance:
        follower = Follower(instance.stub)
        for turn in range(60):
            labels = [f"x{number}" for number in draw.choice(20, size=3, replace=False)]
            await instance.put(*labels)
            if turn % 20 == 7:  # left, and come back: replayed, or a snapshot
                await follower.take(lambda: True)
        truth = server.store.hashes(KIND.digest())
        await follower.take(lambda: _is(follower, server))
        assert follower.holds(sorted(truth), "host") == len(truth) == follower.num_blocks("host")
        assert server.store.counters.evictions > 20


def _is(follower: Follower, server: KVStoreServer) -> bool:
    server.events._flush()
    return follower.events._sequence == server.events._log.flush()


async def test_open_streams_do_not_hold_up_the_end_of_a_store() -> None:
    async with store() as server, connected(server) as instance:
        call = instance.stub.StreamStoreEvents(kvstore_pb2.StreamStoreEventsRequest(), timeout=WAIT_S)
        assert (await anext(aiter(call))).batch.snapshot
        async with asyncio.timeout(240):
            await server.stop(60)


needs_redis = pytest.mark.skipif(missing_redis() is not None, reason=str(missing_redis()))


@needs_redis
async def test_a_router_finds_nodes_that_register_and_forgets_those_that_die() -> None:
    async with contextlib.AsyncExitStack() as stack:
        redis = await stack.enter_async_context(RedisServer())
        config = RouterConfig(
            kvstore=("discover",), redis=redis.url, redis_prefix="test", replica_name="r", reconnect_max_s=0.2
        )
        registry = Registry(config, CollectorRegistry())
        stack.push_async_callback(registry.close)
        registry.start()
        one, two = [
            await stack.enter_async_context(store(instance_id=name, register_redis=redis.url, register_prefix="test"))
            for name in "ab"
        ]
        first, second = [await stack.enter_async_context(connected(server)) for server in (one, two)]
        await first.put("a", "b")
        await second.put("c")

        def held() -> dict[str, int]:
            return {each.name: each.tiers.get("store", 0) for each in registry.stores}

        async def both() -> bool:
            return held() == {"a": 2, "b": 1}

        await until(both)
        await two.stop()  # says so

        async def alone() -> bool:
            return held() == {"a": 2}

        await until(alone)


async def test_a_store_that_dies_counts_nowhere_and_comes_back() -> None:
    async with store_processes(1, "--capacity-bytes", str(1 << 20), "--instance-id", "s0") as (node,):
        registry = Registry(RouterConfig(kvstore=(node.address,), reconnect_max_s=0.2), CollectorRegistry())
        registry.start()
        try:
            (known,) = registry.stores
            for label in ("a", "b"):
                async with connected(node) as instance:
                    await instance.put(label)

                async def told() -> bool:
                    return known.events.state is IndexState.EXACT and known.tiers == {"store": 1}

                await until(told)
                await node.kill()

                async def lost() -> bool:
                    return known.events.state is IndexState.OFF and not known.tiers

                await until(lost)
                await node.start()
        finally:
            await registry.close()


PROMPT = "import os\n\n\ndef main(arguments):\n    for name in arguments:\n        print(name)\n" * 6


async def test_a_prefix_that_only_the_store_has_is_seen_by_the_router_and_loaded() -> None:
    async with contextlib.AsyncExitStack() as stack:
        (node,) = await stack.enter_async_context(
            store_processes(1, "--capacity-bytes", str(64 << 20), "--instance-id", "s0")
        )
        address = node.address
        process = await stack.enter_async_context(
            router("--kvstore", address, "--policy", "cost_ms", "--model", MODEL, "--reconnect-max-s", "0.2")
        )
        http = await stack.enter_async_context(httpx.AsyncClient(base_url=f"http://{process.http}", timeout=WAIT_S))

        async def ask() -> tuple[str, dict[str, Any]]:
            body = {"model": "baton-tiny", "prompt": PROMPT, "max_tokens": 8, "temperature": 0, "logprobs": 0}
            answer = (await http.post("/v1/completions", json=body)).raise_for_status().json()
            found = (await http.get(f"/debug/decisions/{answer['id']}")).raise_for_status().json()
            return answer["choices"][0]["text"], found

        async def index() -> dict[str, Any]:
            return dict((await http.get("/debug/index")).json())

        async def healthy(count: int) -> bool:
            rows = (await index())["instances"]
            return len(rows) == count and all(row["status"] == "ready" and row["state"] == "exact" for row in rows)

        def cluster() -> LocalCluster:
            engine = EngineConfig(model=MODEL, dtype="float32", kv_blocks=256, served_model_name="baton-tiny")
            return LocalCluster(engine, WorkerConfig(kvstore=address, routers=(process.grpc,)))

        async with cluster() as first:
            await until(lambda: healthy(2))
            text, decision = await ask()
            assert decision["path"] in ("remote", "local")  # who has learnt nothing yet may choose either
            blocks = decision["prompt_tokens"] // 16
            await first.settle()
        await until(lambda: healthy(0))
        async with cluster() as second:  # nobody remembers anything but the store
            await until(lambda: healthy(2))

            async def known() -> bool:
                (row,) = (await index())["stores"]
                return (row["store"], row["state"]) == ("s0", "exact") and row["blocks"].get("store", 0) >= blocks

            await until(known)
            again, decision = await ask()
            await second.settle()
        assert again == text
        placed = decision["placements"][0]
        prompt_tokens = decision["prompt_tokens"]
        for candidate in placed["candidates"]:
            assert candidate["tiers"] == {"store": prompt_tokens // 16 * 16}
            assert candidate["match_rate"] == pytest.approx(0.5 * (prompt_tokens // 16 * 16) / prompt_tokens)
        assert placed["path"] == "store"
        assert any("from store" in line for line in decision["why"])
        trace = decision["trace"]
        assert (trace["path"], trace["pipe"]) == ("store", "shm")
        assert trace["transferred_tokens"] == (prompt_tokens - 1) // 16 * 16
