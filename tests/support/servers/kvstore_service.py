"""A KV store that serves in this process, and an instance's pool with a stub of it."""

from __future__ import annotations

import asyncio
import socket
import time
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import grpc
import grpc.aio
import numpy as np
import pytest
from tests.support.transport.named_blocks import names
from tests.support.transport.store_check import check_store

from baton.api.v1 import common_pb2, kvstore_pb2, kvstore_pb2_grpc
from baton.config.kvstore import KVStoreConfig
from baton.errors import BatonError
from baton.kv_cache.arena import HostArena
from baton.kv_cache.fingerprint import Fingerprint
from baton.kv_cache.layout import KVLayout, LayerShape
from baton.kv_transfer.blocks import BlockFetcher, BlockServer, LinkOptions, SequenceBlocks
from baton.kv_transfer.types import source_from_pb, source_to_pb
from baton.rpc.channel import check_health, open_channel
from baton.rpc.convert import fingerprint_to_pb
from baton.rpc.errors import from_rpc_error
from baton.types import InstanceId
from baton_kvstore.server import KVStoreServer

LAYOUT = KVLayout((LayerShape(2, 32, 32), LayerShape(2, 32, 32)), 16, "float32")
KIND = Fingerprint.of(model="tiny", model_digest="d1", rope="", layout=LAYOUT)
BLOCK = KIND.block_bytes
WAIT_S = 240.0


class Instance:
    """An instance's pool with a stub of the store."""

    def __init__(
        self, address: str, kind: Fingerprint = KIND, *, pipes: Sequence[str] = ("shm", "tcp"), token: Any = None
    ):
        self.kind = kind
        self.arena = HostArena(32, kind.block_bytes)
        self.server = BlockServer(self.arena, kind, InstanceId("prefill-0"), kinds=pipes, token=token)
        self.fetcher = BlockFetcher(self.arena, kind, kinds=pipes, links=LinkOptions(token=token))
        self.channel = open_channel(address, token=token)
        self.stub: Any = kvstore_pb2_grpc.KvStoreServiceStub(self.channel)

    def fill(self, hashes: Sequence[bytes], first: int = 0) -> None:
        for i, name in enumerate(hashes):
            self.arena.blocks[first + i] = np.resize(np.frombuffer(name, np.uint8), BLOCK)

    def put_request(self, hashes: Sequence[bytes], first: int = 0, **changes: Any) -> kvstore_pb2.PutRequest:
        ids = list(range(first, first + len(hashes)))
        values: dict[str, Any] = {
            "fingerprint": fingerprint_to_pb(self.kind),
            "block_hashes": hashes,
            "source": source_to_pb(self.server.source),
            "block_ids": ids,
            "generations": self.arena.generations[ids].tolist(),
        }
        return kvstore_pb2.PutRequest(**{**values, **changes})

    async def put(self, *labels: object, first: int = 0) -> list[bool]:
        hashes = names(*labels)
        self.fill(hashes, first)
        return list((await self.stub.Put(self.put_request(hashes, first), timeout=WAIT_S)).stored)

    async def get(self, *labels: object, lease_ms: int = 0) -> kvstore_pb2.GetResponse:
        request = kvstore_pb2.GetRequest(
            fingerprint=fingerprint_to_pb(self.kind), block_hashes=names(*labels), lease_ms=lease_ms
        )
        response: kvstore_pb2.GetResponse = await self.stub.Get(request, timeout=WAIT_S)
        return response

    async def fetch(self, answer: kvstore_pb2.GetResponse, first: int = 16) -> Any:
        ids = list(range(first, first + len(answer.block_ids)))
        source = source_from_pb(answer.source)
        return await self.fetcher.fetch_async(
            source,
            SequenceBlocks.pairs(list(answer.block_ids), list(answer.generations), ids),
            deadline=time.monotonic() + WAIT_S,
        )

    def holds(self, hashes: Sequence[bytes], first: int = 16) -> bool:
        blocks = self.arena.blocks[first : first + len(hashes), :32]
        return [bytes(block) for block in blocks] == list(hashes)

    async def close(self) -> None:
        await self.channel.close(None)
        self.server.close()
        self.fetcher.close()
        self.arena.close()


@asynccontextmanager
async def store(**options: Any) -> AsyncIterator[KVStoreServer]:
    server = KVStoreServer(KVStoreConfig(**{"capacity_bytes": 8 * BLOCK, **options}))
    await server.start()
    try:
        yield server
        check_store(server.store)
    finally:
        await server.stop()
        assert server.store.used_bytes == 0


@asynccontextmanager
async def connected(server: KVStoreServer, kind: Fingerprint = KIND, **options: Any) -> AsyncIterator[Instance]:
    instance = Instance(server.address, kind, **options)
    try:
        yield instance
    finally:
        await instance.close()


@contextmanager
def refused(code: str, field: str | None = None) -> Iterator[None]:
    with pytest.raises((grpc.aio.AioRpcError, BatonError)) as caught:
        yield
    error = as_baton(caught.value)
    assert (error.code, error.field) == (code, field), error


def as_baton(error: BaseException) -> BatonError:
    return error if isinstance(error, BatonError) else from_rpc_error(error)  # type: ignore[arg-type]


async def eventually(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not holds():
            await asyncio.sleep(0.002)


@contextmanager
def silent_listener() -> Iterator[common_pb2.KvEndpoint]:
    """A pipe that takes connections and never says a word."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield common_pb2.KvEndpoint(kind="tcp", address=f"127.0.0.1:{listener.getsockname()[1]}")


def scrape(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=WAIT_S) as response:
        return str(response.read().decode())


async def serving(address: str) -> bool:
    async with asyncio.timeout(WAIT_S):
        while not await check_health(address):
            await asyncio.sleep(0.05)
    return True
