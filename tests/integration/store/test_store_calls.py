"""A client's calls of a real store: found again after a restart, given back, and ended when the client is closed."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from tests.support.servers.kvstore_service import BLOCK, KIND, WAIT_S, connected, eventually

from baton.api.v1 import kvstore_pb2
from baton.config.kvstore import KVStoreConfig
from baton.errors import BatonError, UnavailableError
from baton.kv_transfer.connector.store.client import StoreCalls
from baton.rpc.convert import fingerprint_to_pb
from baton.rpc.server import free_port
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


async def test_a_store_that_comes_back_is_found_again() -> None:
    port = free_port()
    async with client(f"127.0.0.1:{port}") as calls:
        async with store(port) as server:
            assert (await calls.begin("GetStoreInfo", INFO, WAIT_S)).epoch == server.epoch
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


async def test_a_lease_is_given_back_in_the_background() -> None:
    async with store() as server, connected(server) as instance, client(server.address) as calls:
        hashes = [NAME]
        instance.fill(hashes)
        assert list((await calls.begin("Put", instance.put_request(hashes), WAIT_S)).stored) == [True]
        request = kvstore_pb2.GetRequest(fingerprint=fingerprint_to_pb(KIND), block_hashes=hashes)
        lease = await calls.begin("Get", request, WAIT_S)
        assert len(server.store.leases) == 1
        calls.post("Release", kvstore_pb2.ReleaseRequest(lease_id=lease.lease_id), WAIT_S)
        await eventually(lambda: len(server.store.leases) == 0)


async def test_calls_that_run_when_their_client_is_closed_fail_and_are_not_cancelled() -> None:
    """A store node that leaves is hung up on in mid-call, and whoever waits asks another one."""
    async with store() as server, connected(server) as instance, client(server.address) as calls:
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
        assert not calls._posts
