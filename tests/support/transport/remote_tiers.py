"""Places that remote tiers keep blocks in, over real ones, and what a test does with such a tier."""

from __future__ import annotations

import asyncio
import contextlib
import queue
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import fsspec
import pytest
import redis
from fsspec.implementations.asyn_wrapper import AsyncFileSystemWrapper
from tests.support.servers.redis_server import RedisServer, missing_redis
from tests.support.transport.named_blocks import buffers, content, names

from baton.types import BlockHash
from baton_kvstore.tiers.object_backend import ObjectBackend
from baton_kvstore.tiers.redis_backend import RedisBackend, RedisOptions
from baton_kvstore.tiers.remote import RemoteOptions, RemoteTier, encode_header
from baton_kvstore.types import KvFormat

BLOCK = 5000
KIND = KvFormat(b"k" * 32, b"c" * 32, BLOCK)
OTHER = KvFormat(b"o" * 32, b"c" * 32, 300)
WAIT_S = 240.0
needs_redis = pytest.mark.skipif(missing_redis() is not None, reason=str(missing_redis()))


def value_of(name: BlockHash, kind: KvFormat = KIND) -> bytes:
    payload = content(name, kind)
    return encode_header(kind, name, memoryview(payload)) + payload


class Place:
    """Somewhere to keep blocks, and what a stranger can do to them there."""

    def __init__(self, kind: str, root: str, servers: Sequence[RedisServer]) -> None:
        self.kind, self.root, self.servers = kind, root, servers
        self.tiers: list[RemoteTier] = []

    def backend(self, **options: Any) -> RedisBackend | ObjectBackend:
        if self.servers:
            cluster = self.kind == "redis-cluster"
            return RedisBackend(RedisOptions(self.servers[0].url, "t*[", cluster=cluster, **options))
        backend = ObjectBackend(self.root, timeout_s=WAIT_S, requests=4)
        if self.kind == "async":  # fsspec's file systems for networks are coroutines in a thread of fsspec's own
            backend._fs = AsyncFileSystemWrapper(backend._fs, asynchronous=False)
        return backend

    def tier(self, backend: dict[str, Any] | None = None, **options: Any) -> RemoteTier:
        """Open a tier whose scan has ended."""
        defaults: dict[str, Any] = {"queue_bytes": 1 << 20, "index_blocks": 1000, "absent_s": 0.0}
        made = RemoteTier(
            self.backend(**(backend or {})), RemoteOptions("redis", durable=False, **{**defaults, **options})
        )
        self.tiers.append(made)
        assert made.scanned.wait(WAIT_S)
        return made

    def keys(self) -> dict[str, bytes]:
        """Return everything that is there."""
        if not self.servers:
            fs, path = fsspec.core.url_to_fs(self.root)
            return {found: fs.cat_file(found) for found in fs.find(path)} if fs.exists(path) else {}
        found = {}
        with self._client() as client:
            for key in client.scan_iter():
                found[key.decode()] = client.get(key)
        return found

    def set(self, key: str, value: bytes) -> None:
        if not self.servers:
            fs, _ = fsspec.core.url_to_fs(self.root)
            fs.pipe_file(key, value)
            return
        with self._client() as client:
            client.set(key, value)

    def _client(self) -> Any:
        made = redis.RedisCluster if self.kind == "redis-cluster" else redis.Redis
        return made.from_url(self.servers[0].url, protocol=2)


@contextlib.asynccontextmanager
async def place_of(kind: str, folder: Path, servers: Sequence[RedisServer] = ()) -> AsyncIterator[Place]:
    async with contextlib.AsyncExitStack() as stack:
        if kind == "redis" and not servers:
            servers = [await stack.enter_async_context(RedisServer())]
        place = Place(
            kind, f"memory://{folder}" if kind in ("memory", "async") else f"file://{folder}/objects", servers
        )
        try:
            yield place
        finally:
            for tier in place.tiers:
                await asyncio.to_thread(tier.close)


def write(tier: RemoteTier, *labels: object, kind: KvFormat = KIND) -> list[bool]:
    hashes, views = names(*labels), buffers(len(labels), kind)
    for view, name in zip(views, hashes, strict=True):
        view[:] = content(name, kind)
    return told(lambda done: tier.write(kind, hashes, views, done))


def told(begin: Callable[[Callable[[Any], None]], object]) -> Any:
    answers: queue.Queue[Any] = queue.Queue()
    assert begin(answers.put) is not False, "the queue is full"
    return answers.get(timeout=WAIT_S)


def delete(tier: RemoteTier, hashes: Sequence[BlockHash] | None) -> bool:
    return bool(told(lambda done: tier.delete(KIND, hashes, done)))


def read(tier: RemoteTier, *labels: object, kind: KvFormat = KIND) -> list[bool]:
    hashes, views = names(*labels), buffers(len(labels), kind)
    results = tier.read(kind, hashes, views)
    for view, name, there in zip(views, hashes, results, strict=True):
        assert not there or bytes(view) == content(name, kind)
    return results


def held(tier: RemoteTier, *labels: object, kind: KvFormat = KIND) -> list[bool]:
    return [tier.holds(kind, name) for name in names(*labels)]
