"""Which way a client's calls go to a real store: as frames where they are offered, over gRPC otherwise."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from tests.integration.test_kvstore_service import BLOCK, KIND, WAIT_S, connected, eventually

from baton.api.v1 import kvstore_pb2
from baton.errors import UnavailableError
from baton.rpc.convert import fingerprint_to_pb
from baton.transport.connector import store_calls
from baton.transport.connector.store_calls import StoreCalls
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


def closed_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def none_offered(server: KVStoreServer) -> None:
    server._servicer.calls_port = 0


def none_reached(server: KVStoreServer) -> None:
    server._servicer.calls_port = closed_port()


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
    port = closed_port()
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
