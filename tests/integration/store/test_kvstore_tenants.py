"""Tenants of a real store: what their calls say, and quotas in memory and on disk."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.support.servers.kvstore_service import BLOCK, WAIT_S, Instance, connected, refused, store
from tests.support.transport.named_blocks import names

from baton.api.v1 import common_pb2, kvstore_pb2
from baton.cli.main import main
from baton.rpc.convert import fingerprint_to_pb
from baton_kvstore.server import KVStoreServer

A = common_pb2.Tenant(id="a", kv_bytes=3 * BLOCK, kv_disk_bytes=5 * BLOCK)
B = common_pb2.Tenant(id="b", kv_bytes=3 * BLOCK)


@contextlib.asynccontextmanager
async def served(folder: Path | None = None, **options: Any) -> AsyncIterator[tuple[KVStoreServer, Instance]]:
    disk = {} if folder is None else {"disk_path": str(folder / "kv"), "disk_bytes": 8 << 20, "disk_write": "all"}
    async with store(**{**disk, **options}) as server, connected(server) as instance:
        yield server, instance


async def put(instance: Instance, tenant: common_pb2.Tenant | None, *labels: object, **fields: Any) -> Any:
    hashes = names(*labels)
    instance.fill(hashes)
    return await instance.stub.Put(instance.put_request(hashes, tenant=tenant, **fields), timeout=WAIT_S)


async def contained(instance: Instance, labels: Sequence[object]) -> list[object]:
    found = []
    for label in labels:
        request = kvstore_pb2.ContainsRequest(fingerprint=fingerprint_to_pb(instance.kind), block_hashes=names(label))
        if (await instance.stub.Contains(request, timeout=WAIT_S)).num_blocks:
            found.append(label)
    return found


async def uses(instance: Instance) -> dict[str, kvstore_pb2.TenantUse]:
    answer = await instance.stub.ListTenants(kvstore_pb2.ListTenantsRequest(), timeout=WAIT_S)
    return {use.tenant: use for use in answer.tenants}


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not condition():
            await asyncio.sleep(0.01)


async def test_a_puts_tenant_pays_for_its_blocks() -> None:
    async with served(tenant_bytes=2 * BLOCK) as (_, instance):
        for label in range(6):
            assert list((await put(instance, A, f"a{label}")).stored) == [True]
        await put(instance, B, "b0", "b1")
        await put(instance, common_pb2.Tenant(id="c"), "c0")
        await put(instance, None, "n0")
        found = await uses(instance)
        assert (found["a"].num_blocks, found["a"].quota_bytes, found["a"].num_evictions) == (3, 3 * BLOCK, 3)
        assert (found["b"].num_blocks, found["b"].num_evictions) == (2, 0)
        assert found["c"].quota_bytes == 2 * BLOCK
        assert (found[""].num_blocks, found[""].quota_bytes) == (1, 0)
        assert await contained(instance, [f"a{label}" for label in range(6)]) == ["a3", "a4", "a5"]
        for wrong in ("", "a b", "x" * 65):
            with refused("invalid_request", "tenant.id"):
                await put(instance, common_pb2.Tenant(id=wrong, kv_bytes=1), "x")


async def test_a_tenant_is_cleared(capsys: pytest.CaptureFixture[str]) -> None:
    async with served() as (server, instance):
        await put(instance, A, "a0", "a1")
        await put(instance, B, "b0")
        assert await asyncio.to_thread(main, ["kvstore", "tenants", server.address]) == 0
        assert await asyncio.to_thread(main, ["kvstore", "clear", "--tenant", "a", server.address]) == 0
        assert "2 blocks forgotten" in capsys.readouterr().out
        assert await contained(instance, ["a0", "a1", "b0"]) == ["b0"]
        with refused("invalid_request", "all"):
            await instance.stub.Delete(kvstore_pb2.DeleteRequest(tenant="a", all=True), timeout=WAIT_S)


async def test_blocks_are_pinned_and_forgotten_by_call() -> None:
    async with served() as (server, instance):
        await put(instance, None, "keep", pin=True)
        await put(instance, None, "brief", ttl_s=3600)
        fields = {"fingerprint": fingerprint_to_pb(instance.kind)}
        answer = await instance.stub.Pin(kvstore_pb2.PinRequest(block_hashes=names("brief", "no"), **fields))
        assert list(answer.pinned) == [True, False]
        for label in range(20):
            await put(instance, None, label)
        assert await contained(instance, ["keep", "brief"]) == ["keep", "brief"]
        await instance.stub.Pin(kvstore_pb2.PinRequest(block_hashes=names("keep", "brief"), unpin=True, **fields))
        assert server.store.client_pins.pinned_bytes == 0
        for label in range(20):
            await put(instance, None, label)
        assert await contained(instance, ["keep", "brief"]) == []
        await put(instance, None, "brief", ttl_s=1)
        await until(lambda: server.store.counters.expired_blocks > 0)
        assert await contained(instance, ["brief"]) == []
        with refused("invalid_request", "ttl_s"):
            await put(instance, None, "x", ttl_s=1, durable=True)


async def test_blocks_on_disk_are_pinned_in_memory_too(tmp_path: Path) -> None:
    async with served(tmp_path) as (server, instance):
        await put(instance, None, "keep", durable=True)
        for label in range(20):
            await put(instance, None, label, durable=True)
        assert not server.store.has(instance.kind.digest(), names("keep")[0])
        assert list((await put(instance, None, "keep", pin=True)).stored) == [True]
        assert server.store.has(instance.kind.digest(), names("keep")[0])
        assert server.store.client_pins.pinned_bytes == BLOCK


async def test_a_tenant_that_waits_for_its_own_quota_holds_nobody_up(tmp_path: Path) -> None:
    async with served(tmp_path) as (server, instance):
        for label in range(6):
            await put(instance, A, f"a{label}", durable=True)
        await put(instance, B, "b0", durable=True)
        for label in range(20):
            await put(instance, None, label, durable=True)

        def get(tenant: common_pb2.Tenant, *labels: object) -> Any:
            request = kvstore_pb2.GetRequest(
                fingerprint=fingerprint_to_pb(instance.kind),
                block_hashes=names(*labels),
                tenant=tenant,
                lease_ms=60_000,
            )
            return instance.stub.Get(request, timeout=WAIT_S)

        first = await get(A, "a2", "a3", "a4")
        assert len(first.block_ids) == 3  # all that A may have, and it is leased
        waiting = asyncio.ensure_future(get(A, "a5"))
        await until(lambda: bool(server.tiers._promoter._jobs))
        assert len((await get(B, "b0")).block_ids) == 1
        assert not waiting.done()
        await instance.stub.Release(kvstore_pb2.ReleaseRequest(lease_id=first.lease_id), timeout=WAIT_S)
        assert len((await waiting).block_ids) == 1


async def test_quotas_on_disk(tmp_path: Path) -> None:
    async with served(tmp_path) as (server, instance):
        for label in range(12):
            await put(instance, A, f"a{label}", durable=True)
            await put(instance, B, f"b{label}", durable=True)

        def share(name: str) -> Any:
            return next(x for x in server.store.quotas if x.name == name)

        await until(lambda: share("a").disk_bytes <= 5 * BLOCK and share("b").disk_bytes == 12 * BLOCK)
        found = await uses(instance)
        assert found["a"].disk_quota_bytes == 5 * BLOCK
        assert share("a").disk_evictions == 7
        left = await contained(instance, [f"a{label}" for label in range(12)])
        assert left == [f"a{label}" for label in range(7, 12)]
        assert len(await contained(instance, [f"b{label}" for label in range(12)])) == 12


async def test_what_a_tenant_has_on_disk_is_cleared_too(tmp_path: Path) -> None:
    async with served(tmp_path) as (server, instance):
        for label in range(4):
            await put(instance, A, f"a{label}", durable=True)
        await until(lambda: sum(x.disk_bytes for x in server.store.quotas) == 4 * BLOCK)
        request = kvstore_pb2.DeleteRequest(tenant="a")
        assert (await instance.stub.Delete(request, timeout=WAIT_S)).num_deleted == 4
        assert await contained(instance, [f"a{label}" for label in range(4)]) == []
        assert sum(x.disk_bytes for x in server.store.quotas) == 0
    async with served(tmp_path) as (_, instance):
        assert await contained(instance, [f"a{label}" for label in range(4)]) == []


async def test_what_the_disk_gave_to_the_object_store_is_still_its_tenants(tmp_path: Path) -> None:
    objects = {"disk_bytes": 1 << 20, "object_url": f"file://{tmp_path}/objects", "raise_after": 0}
    async with served(tmp_path, **objects) as (server, instance):
        chain = server.tiers.chain
        labels = [f"c{i}" for i in range(120)]
        for label in labels:
            await put(instance, common_pb2.Tenant(id="c"), label, durable=True)
        tier = chain.tiers[1]
        await until(lambda: tier.stats().num_blocks == chain.counters.handed_over > 20)
        request = kvstore_pb2.DeleteRequest(tenant="c")
        assert (await instance.stub.Delete(request, timeout=WAIT_S)).num_deleted == 120
        assert await contained(instance, labels) == []
        assert not [path for path in (tmp_path / "objects").rglob("*") if path.is_file()]


async def test_after_a_restart_a_tenants_blocks_are_known_again_when_it_asks_for_them(tmp_path: Path) -> None:
    async with served(tmp_path) as (_, instance):
        await put(instance, A, "a0", "a1", durable=True)
    async with served(tmp_path) as (server, instance):
        assert not await uses(instance)
        request = kvstore_pb2.GetRequest(
            fingerprint=fingerprint_to_pb(instance.kind), block_hashes=names("a0", "a1"), tenant=A
        )
        answer = await instance.stub.Get(request, timeout=WAIT_S)
        assert len(answer.block_ids) == 2
        await instance.stub.Release(kvstore_pb2.ReleaseRequest(lease_id=answer.lease_id), timeout=WAIT_S)
        found = (await uses(instance))["a"]
        assert (found.num_blocks, found.disk_bytes) == (2, 2 * BLOCK)
        deleted = await instance.stub.Delete(kvstore_pb2.DeleteRequest(tenant="a"), timeout=WAIT_S)
        assert deleted.num_deleted == 2
        assert server.disk is not None
        assert server.disk.stats().num_blocks == 0
