"""Which way a client's calls go to a real store: as frames where they are offered, over gRPC otherwise."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from tests.integration.store.test_kvstore_service import BLOCK, KIND, WAIT_S, connected, eventually

from baton.api.v1 import kvstore_pb2
from baton.errors import BatonError, UnavailableError
from baton.kv_transfer.connector.store import calls as store_calls
from baton.kv_transfer.connector.store.calls import StoreCalls
from baton.rpc.convert import fingerprint_to_pb
from baton.rpc.ports import free_port
from baton_kvstore.config import KVStoreConfig
from baton_kvstore.server import KVStoreServer

NAME = hashlib.sha256(b"a").digest()
INFO = kvstore_pb2.GetStoreInfoRequest()


@asynccontextmanager
async def store(port: int = 0) -> AsyncIterator[KVStoreServer]:
    server = KVStoreServer(KVStoreConfig(capacity_bytes=8 * BLOCK, port=port))
    await server.start()
    try:
        yield server
    finally:
        await server.stop()


@asynccontextmanager
async def client(address: str) -> AsyncIterator[StoreCalls]:
    calls = StoreCalls(address, token=None, tls=None)
    try:
        yield calls
    finally:
        await calls.close()


async def framed(calls: StoreCalls) -> None:
    await calls.begin("GetStoreInfo", INFO, WAIT_S)
    await eventually(lambda: calls.over_frames)


def none_offered(server: KVStoreServer) -> None:
    server._servicer.calls_port = 0


def none_reached(server: KVStoreServer) -> None:
    server._servicer.calls_port = free_port()


@pytest.mark.parametrize(("change", "says"), [(none_offered, "offers no frames"), (none_reached, "gRPC goes on")])
async def test_without_frames_calls_go_over_grpc(
    change: Callable[[KVStoreServer], None], says: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, store_calls.__name__)
    async with store() as server, client(server.address) as calls:
        change(server)
        await calls.begin("GetStoreInfo", INFO, WAIT_S)
        await eventually(lambda: says in caplog.text)
        assert (await calls.begin("GetStoreInfo", INFO, WAIT_S)).capacity_bytes == 8 * BLOCK
        assert not calls.over_frames
        assert len(caplog.records) == 1  # nobody tries again and again


async def test_a_store_that_comes_back_is_found_again(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, store_calls.__name__)
    port = free_port()
    async with client(f"127.0.0.1:{port}") as calls:
        async with store(port) as server:
            await framed(calls)
            answer = await calls.begin("GetStoreInfo", INFO, WAIT_S)
            assert (answer.epoch, answer.calls_port) == (server.epoch, server._servicer.calls_port)
            assert "go over frames" in caplog.text
        await eventually(lambda: not calls.over_frames)
        with pytest.raises(UnavailableError):
            await calls.begin("GetStoreInfo", INFO, WAIT_S)
        async with store(port) as server:

            async def back() -> Any:
                while True:
                    try:
                        return await calls.begin("GetStoreInfo", INFO, WAIT_S)
                    except UnavailableError:
                        await asyncio.sleep(0.02)  # gRPC connects again

            async with asyncio.timeout(WAIT_S):
                assert (await back()).epoch == server.epoch


@pytest.mark.parametrize("frames", [True, False])
async def test_a_lease_is_given_back_though_nobody_waits(frames: bool) -> None:
    async with store() as server, connected(server) as instance, client(server.address) as calls:
        if frames:
            await framed(calls)
        hashes = [NAME]
        instance.fill(hashes)
        assert list((await calls.begin("Put", instance.put_request(hashes), WAIT_S)).stored) == [True]
        request = kvstore_pb2.GetRequest(fingerprint=fingerprint_to_pb(KIND), block_hashes=hashes)
        lease = await calls.begin("Get", request, WAIT_S)
        assert len(server.store.leases) == 1
        calls.post("Release", kvstore_pb2.ReleaseRequest(lease_id=lease.lease_id), WAIT_S)
        await eventually(lambda: len(server.store.leases) == 0)


async def test_another_instance_at_the_same_address_is_not_taken_for_it(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, store_calls.__name__)
    async with store() as server, store() as other, client(server.address) as calls:
        server._servicer.calls_port = other._servicer.calls_port
        await calls.begin("GetStoreInfo", INFO, WAIT_S)
        await eventually(lambda: "epoch" in caplog.text)
        assert not calls.over_frames


@pytest.mark.parametrize("frames", [True, False])
async def test_calls_that_run_when_their_client_is_closed_fail_and_are_not_cancelled(frames: bool) -> None:
    """A store node that leaves is hung up on in mid-call, and whoever waits asks another one."""
    async with store() as server, connected(server) as instance, client(server.address) as calls:
        if frames:
            await framed(calls)
        else:
            server._servicer.calls_port = 0
            await calls.begin("GetStoreInfo", INFO, WAIT_S)
        hashes = [NAME]
        instance.fill(hashes)
        put = instance.put_request(hashes)
        put.ready = 1000  # nobody computes that far: the store waits
        call = calls.begin("Put", put, WAIT_S)
        await eventually(lambda: server.store.used_bytes > 0)
        await calls.close()
        with pytest.raises(BatonError):
            await asyncio.wait_for(call, WAIT_S)


async def test_a_closed_client_does_not_connect_again() -> None:
    async with store() as server, client(server.address) as calls:
        late = calls.begin("GetStoreInfo", INFO, WAIT_S)  # has not begun when the client is closed
        await calls.close()
        calls.post("Release", kvstore_pb2.ReleaseRequest(lease_id=1), WAIT_S)
        for call in (late, calls.begin("GetStoreInfo", INFO, WAIT_S)):
            with pytest.raises(BatonError, match="closed"):
                await call
        assert calls._channel is None
        assert calls._dialling is None or calls._dialling.cancelled()
        assert not calls._posts
