"""A real store: gRPC control, real arenas, bytes over real pipes."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import numpy as np
import pytest
from tests.support.servers.kvstore_service import (
    BLOCK,
    KIND,
    WAIT_S,
    as_baton,
    connected,
    eventually,
    refused,
    scrape,
    silent_listener,
    store,
)
from tests.support.transport.named_blocks import names

from baton.api.v1 import kvstore_pb2
from baton.config.kvstore import KVStoreConfig
from baton.errors import BatonError, ConfigError
from baton.kv_transfer.types import source_to_pb
from baton.rpc.convert import fingerprint_to_pb
from baton.rpc.server import free_port
from baton.rpc.service_token import Token
from baton_kvstore.server import KVStoreServer


@pytest.mark.parametrize("pipe", ["shm", "tcp"])
async def test_bytes_come_back_as_they_went(pipe: str) -> None:
    async with store(pipes=(pipe,)) as server, connected(server, pipes=(pipe,)) as instance:
        response = await instance.stub.Put(instance.put_request(names(*range(5))), timeout=WAIT_S)
        assert (list(response.stored), response.bytes) == ([True] * 5, 5 * BLOCK)
        instance.fill(names("other"), 0)
        await instance.put(*"abc")
        answer = await instance.get("a", "b", "c", "missing")
        assert len(answer.block_ids) == 3
        assert answer.lease_ms == 10_000
        result = await instance.fetch(answer)
        assert result.pipe_kind == pipe
        assert result.valid.all()
        assert instance.holds(names(*"abc"))
        released = await instance.stub.Release(kvstore_pb2.ReleaseRequest(lease_id=answer.lease_id), timeout=WAIT_S)
        assert released.found
        assert server.store.stats().num_leases == 0


async def test_a_store_listens_on_ipv6() -> None:
    async with store(host="::1") as server, connected(server) as instance:
        assert server.address.startswith("[::1]:")
        assert await instance.put(1) == [True]


@pytest.mark.parametrize("field", ["capacity_bytes", "pull_workers"])
def test_sizes_that_no_machine_has_are_refused(field: str) -> None:
    with pytest.raises(ConfigError, match=f"{field} must be at most") as caught:
        KVStoreConfig(**{field: 1 << 50})
    assert caught.value.field == field


async def test_a_second_put_moves_no_bytes() -> None:
    async with store() as server, connected(server) as instance:
        assert await instance.put(1, 2) == [True, True]
        again = await instance.stub.Put(instance.put_request(names(1, 2, 3)), timeout=WAIT_S)
        assert (list(again.stored), again.bytes) == ([True] * 3, BLOCK)


async def test_blocks_that_changed_at_their_source_are_not_stored() -> None:
    async with store() as server, connected(server) as instance:
        request = instance.put_request(names(1, 2, 3))
        instance.arena.generations[1] += np.uint64(1)
        response = await instance.stub.Put(request, timeout=WAIT_S)
        assert list(response.stored) == [True, False, True]
        assert server.store.used_bytes == 2 * BLOCK
        assert len((await instance.get(1, 2, 3)).block_ids) == 1


async def test_eviction_fences_late_readers() -> None:
    async with store() as server, connected(server) as instance:
        await instance.put(*range(8))
        answer = await instance.get(*range(8), lease_ms=1)
        await eventually(lambda: not server.store.expire() and not len(server.store.leases))
        await instance.put(*"abc")  # the chain's last three blocks have to go
        result = await instance.fetch(answer)
        assert result.valid.tolist() == [True] * 5 + [False] * 3
        assert server.store.stats().evictions == 3


async def test_a_store_whose_blocks_are_all_leased_says_so() -> None:
    async with store() as server, connected(server) as instance:
        await instance.put(*range(8))
        answer = await instance.get(*range(8))
        with refused("queue_full"):
            await instance.put("new")
        await instance.stub.Release(kvstore_pb2.ReleaseRequest(lease_id=answer.lease_id), timeout=WAIT_S)
        assert await instance.put("new") == [True]


async def test_leases_are_bounded() -> None:
    async with store(max_leases=2) as server, connected(server) as instance:
        await instance.put(1)
        await instance.get(1)
        await instance.get(1)
        with refused("queue_full"):
            await instance.get(1)


async def test_a_get_that_fails_keeps_no_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    async with store() as server, connected(server) as instance:
        await instance.put("a")

        def nowhere(pool: Any) -> Any:
            raise ConfigError("no pipe can listen", field="pipes")

        monkeypatch.setattr(server._pool_io, "source", nowhere)
        with refused("config", "pipes"):
            await instance.get("a")
        assert not len(server.store.leases)


async def test_leases_end_by_themselves_and_are_capped() -> None:
    async with store(default_lease_s=0.05, max_lease_s=0.1) as server, connected(server) as instance:
        await instance.put(1)
        assert (await instance.get(1)).lease_ms == 50
        assert (await instance.get(1, lease_ms=100_000)).lease_ms == 100
        await eventually(lambda: not len(server.store.leases))  # the store's own clock does it, nobody calls
        released = await instance.stub.Release(kvstore_pb2.ReleaseRequest(lease_id=7), timeout=WAIT_S)
        assert not released.found


async def test_contains_delete_and_info() -> None:
    async with store(instance_id="kv-7") as server, connected(server) as instance:
        await instance.put(1, 2, 3)
        kind = fingerprint_to_pb(KIND)
        there = await instance.stub.Contains(
            kvstore_pb2.ContainsRequest(fingerprint=kind, block_hashes=names(1, 2, 9)), timeout=WAIT_S
        )
        assert there.num_blocks == 2
        gone = await instance.stub.Delete(
            kvstore_pb2.DeleteRequest(fingerprint=kind, block_hashes=names(2, 9)), timeout=WAIT_S
        )
        assert gone.num_deleted == 1
        await instance.get(1, 2)
        info = await instance.stub.GetStoreInfo(kvstore_pb2.GetStoreInfoRequest(), timeout=WAIT_S)
        assert (info.instance_id, info.capacity_bytes, info.used_bytes) == ("kv-7", 8 * BLOCK, 2 * BLOCK)
        assert (info.num_blocks, info.num_hits, info.num_misses, info.num_leases) == (2, 1, 1, 1)
        await instance.stub.Delete(kvstore_pb2.DeleteRequest(fingerprint=kind, all=True), timeout=WAIT_S)
        assert (await instance.get(1)).lease_id == 0


@pytest.mark.parametrize("behind", ["memory", "disk", "object"])
async def test_a_deletion_may_name_a_block_twice(behind: str, tmp_path: Path) -> None:
    options = {
        "memory": {},
        "disk": {"disk_path": str(tmp_path / "kv"), "disk_write": "all"},
        "object": {"object_url": f"file://{tmp_path}/objects", "object_write": "all"},
    }[behind]
    async with store(**options) as server, connected(server) as instance:
        await instance.put(1, 2, 3)
        await eventually(lambda: all(tier.stats().num_blocks == 3 for tier in server.tiers.chain.tiers))
        request = kvstore_pb2.DeleteRequest(fingerprint=fingerprint_to_pb(KIND), block_hashes=names(1, 1, 2, 9, 9, 1))
        assert (await instance.stub.Delete(request, timeout=WAIT_S)).num_deleted == 2
        assert (await instance.get(1)).lease_id == 0
        assert len((await instance.get(3)).block_ids) == 1
        assert await instance.put(1, 2, 3) == [True] * 3


async def test_other_kinds_of_kv_are_apart_and_share_the_budget() -> None:
    other = replace(KIND, model_digest="d2")
    async with store(max_fingerprints=2) as server, connected(server) as a, connected(server, other) as b:
        await a.put(*range(6))
        assert (await b.get(0)).lease_id == 0
        assert await b.put(*range(4)) == [True] * 4
        assert len((await b.get(*range(4))).block_ids) == 4
        assert len((await a.get(*range(6))).block_ids) == 4
        third = replace(KIND, model_digest="d3")
        async with connected(server, third) as c:
            with refused("queue_full"):  # both others are leased
                await c.put(1)


async def test_an_unused_kind_makes_room_for_a_new_one() -> None:
    async with store(max_fingerprints=1) as server, connected(server) as a:
        await a.put(1)
        answer = await a.get(1)
        await a.stub.Release(kvstore_pb2.ReleaseRequest(lease_id=answer.lease_id), timeout=WAIT_S)
        async with connected(server, replace(KIND, model_digest="d2")) as b:
            assert await b.put(1) == [True]
        assert (await a.get(1)).lease_id == 0
        assert await a.put(2) == [True]


async def test_a_source_that_is_gone_costs_nothing() -> None:
    async with store() as server, connected(server) as instance:
        source = source_to_pb(instance.server.source)
        del source.endpoints[:]
        source.endpoints.add(kind="tcp", address="127.0.0.1:1")
        with refused("pipe_closed"):
            await instance.stub.Put(instance.put_request(names(1), source=source), timeout=WAIT_S)
        assert server.store.used_bytes == 0


async def test_a_put_that_is_cancelled_or_too_late_gives_its_slots_back() -> None:
    async with store() as server, connected(server) as instance:
        with silent_listener() as endpoint:
            source = source_to_pb(instance.server.source)
            del source.endpoints[:]
            source.endpoints.append(endpoint)
            request = instance.put_request(names(1, 2), source=source)
            call = instance.stub.Put(request, timeout=WAIT_S)
            await eventually(lambda: server.store.used_bytes > 0)
            assert (await instance.get(1)).lease_id == 0  # half a block is never found
            call.cancel()
            await eventually(lambda: server.store.used_bytes == 0)
            with refused("deadline_exceeded"):
                await instance.stub.Put(request, timeout=0.2)
            await eventually(lambda: server.store.used_bytes == 0)


async def test_waiting_puts_are_bounded() -> None:
    options = {"pull_workers": 1, "max_pending_puts": 2, "pull_timeout_s": 1.5}
    async with store(**options) as server, connected(server) as instance:
        with silent_listener() as endpoint:
            source = source_to_pb(instance.server.source)
            del source.endpoints[:]
            source.endpoints.append(endpoint)
            calls = [instance.stub.Put(instance.put_request(names(i), source=source), timeout=WAIT_S) for i in range(3)]
            codes = []
            for call in calls:
                with pytest.raises((grpc.aio.AioRpcError, BatonError)) as caught:
                    await call
                codes.append(as_baton(caught.value).code)
        assert sorted(codes) == ["deadline_exceeded", "deadline_exceeded", "queue_full"]
        assert await instance.put("later") == [True]


async def test_bad_requests_name_their_field() -> None:
    async with store(max_blocks_per_call=4) as server, connected(server) as instance:
        put, kind = instance.put_request, fingerprint_to_pb(KIND)
        endless = source_to_pb(instance.server.source)
        del endless.endpoints[:]
        bad_epoch = source_to_pb(instance.server.source)
        bad_epoch.epoch = b"short"
        big = fingerprint_to_pb(replace(KIND, block_bytes=9 * BLOCK))
        big_source = source_to_pb(replace(instance.server.source, fingerprint=replace(KIND, block_bytes=9 * BLOCK)))
        other = fingerprint_to_pb(replace(KIND, model_digest="d2"))
        cases: list[tuple[str, str, str, Any]] = [
            ("Put", "invalid_request", "block_hashes", put(names(*range(5)))),
            ("Put", "invalid_request", "block_hashes", put([])),
            ("Put", "invalid_request", "block_hashes[1]", put([*names(1), b"short"])),
            ("Put", "invalid_request", "block_hashes", put(names(1, 1))),
            ("Put", "invalid_request", "block_ids", put(names(1), block_ids=[1, 2])),
            ("Put", "invalid_request", "generations", put(names(1), generations=[])),
            ("Put", "invalid_request", "block_ids[0]", put(names(1), block_ids=[32])),
            ("Put", "invalid_request", "source.endpoints", put(names(1), source=endless)),
            ("Put", "invalid_request", "source.epoch", put(names(1), source=bad_epoch)),
            ("Put", "invalid_request", "fingerprint", put(names(1), fingerprint=None)),
            ("Put", "invalid_request", "fingerprint.block_bytes", put(names(1), fingerprint=big, source=big_source)),
            ("Put", "fingerprint_mismatch", "model_digest", put(names(1), fingerprint=other)),
            ("Get", "invalid_request", "fingerprint", kvstore_pb2.GetRequest(block_hashes=names(1))),
            ("Get", "invalid_request", "block_hashes", kvstore_pb2.GetRequest(fingerprint=kind)),
            ("Contains", "invalid_request", "block_hashes", kvstore_pb2.ContainsRequest(fingerprint=kind)),
            ("Delete", "invalid_request", "block_hashes", kvstore_pb2.DeleteRequest(fingerprint=kind)),
            (
                "Delete",
                "invalid_request",
                "all",
                kvstore_pb2.DeleteRequest(fingerprint=kind, block_hashes=names(1), all=True),
            ),
        ]
        for method, code, field, request in cases:
            with refused(code, field):
                await getattr(instance.stub, method)(request, timeout=WAIT_S)
        assert server.store.used_bytes == 0


async def test_the_token_guards_control_and_data(tmp_path: Path) -> None:
    secret = tmp_path / "token"
    secret.write_text("secret, of the services\n")
    async with store(token_file=str(secret)) as server:
        async with connected(server, token=Token("secret, of the services")) as instance:
            assert await instance.put(1) == [True]
            assert (await instance.fetch(await instance.get(1))).valid.all()
        async with connected(server, token=Token("wrong")) as instance:
            with refused("unauthenticated", "token"):
                await instance.put(2)


async def test_metrics_tell_what_happened() -> None:
    port = free_port()
    async with store(metrics_port=port) as server, connected(server) as instance:
        await instance.put(1, 2)
        await instance.get(1, 2, 3)
        with refused("invalid_request", "block_hashes"):
            await instance.put()
        text = await asyncio.to_thread(scrape, port)
        for line in (
            "baton_kvstore_hits_total 2.0",
            "baton_kvstore_misses_total 1.0",
            "baton_kvstore_leases 1.0",
            f"baton_kvstore_used_bytes {2.0 * BLOCK}",
            f'baton_kvstore_pulled_bytes_total{{pipe="shm"}} {2.0 * BLOCK}',
            'baton_kvstore_calls_total{code="ok",method="Put"} 1.0',
            'baton_kvstore_calls_total{code="invalid_request",method="Put"} 1.0',
            'baton_kvstore_call_seconds_count{method="Get"} 1.0',
        ):
            assert line in text, line
        with pytest.raises(ConfigError) as caught:
            await KVStoreServer(KVStoreConfig(metrics_port=port)).start()
        assert caught.value.field == "metrics_port"


async def test_kinds_of_kv_are_read_at_fixed_ports() -> None:
    first = free_port()
    async with store(kv_port=first, pipes=("tcp",)) as server, connected(server, pipes=("tcp",)) as instance:
        assert await instance.put("a") == [True]
        answer = await instance.get("a")
        assert [x.address.rpartition(":")[2] for x in answer.source.endpoints] == [str(first)]
