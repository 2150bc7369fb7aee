"""Stores of every make-up, over a real redis-server and object stores in files."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis as redis_client
from tests.support.servers.redis_server import RedisServer, missing_redis

needs_redis = pytest.mark.skipif(missing_redis() is not None, reason=str(missing_redis()))
MAKE_UPS = [
    "memory",
    "disk",
    pytest.param("redis", marks=needs_redis),
    "object",
    pytest.param("chain", marks=needs_redis),
]
WAIT_S = 240.0


class RedisThread:
    """A redis-server for tests that have no event loop of their own."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self._stack = contextlib.AsyncExitStack()
        self.server: RedisServer = self._run(self._stack.enter_async_context(RedisServer()))

    def kill(self) -> None:
        """Kill it, with everything in it."""
        self._run(self.server.kill())

    def start(self) -> None:
        """Start it again, empty, on the same port."""
        self._run(self.server.start())

    def flush(self) -> None:
        """Empty it."""
        with redis_client.Redis(port=self.server.port, protocol=2) as client:
            client.flushall()

    def close(self) -> None:
        """End it."""
        self._run(self._stack.aclose())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(WAIT_S)
        self._loop.close()

    def _run(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(WAIT_S)


@contextlib.contextmanager
def redis_thread() -> Iterator[RedisThread | None]:
    """Run one, where there is a redis-server."""
    made = RedisThread() if missing_redis() is None else None
    try:
        yield made
    finally:
        if made is not None:
            made.close()


def options_of(make_up: str, folder: Path, redis: RedisThread | None, block_bytes: int) -> dict[str, Any]:
    """Return what makes a store keep most blocks in the tiers named: memory has room for three."""
    if make_up == "memory":
        return {}
    options: dict[str, Any] = {"capacity_bytes": 3 * block_bytes, "lookup_again_s": 0.0, "lookup_timeout_s": 2.0}
    if make_up in ("disk", "chain"):
        size = (4 << 20) if make_up == "disk" else (1 << 20)
        options |= {"disk_path": str(folder / "kv"), "disk_bytes": size, "disk_sync_s": 0.01}
    if make_up in ("redis", "chain"):
        assert redis is not None
        redis.flush()
        options |= {"redis_url": redis.server.url}
    if make_up in ("object", "chain"):
        options |= {"object_url": f"file://{folder}/objects"}
    if make_up == "chain":
        options |= {"object_write": "all"}
    return options


def write_all(make_up: str) -> dict[str, Any]:
    """Return what makes a store write every block to every tier behind memory, which then survives its end."""
    behind = {"memory": (), "chain": ("disk", "redis", "object")}.get(make_up, (make_up,))
    return {f"{tier}_write": "all" for tier in behind}


def damage(folder: Path, redis: RedisThread | None) -> int:
    """Flip a bit of every block that a store left in tiers behind; returns 0 if there was nothing."""
    paths = [path for path in folder.rglob("*") if path.is_file() and path.name not in ("index", "store", "lock")]
    for path in paths:
        data = bytearray(path.read_bytes())
        step = 4096 if path.name.startswith("segment-") else len(data)  # a segment holds many blocks
        for at in range(300, len(data), step):
            data[at] ^= 1
        path.write_bytes(data)
    if redis is None:
        return len(paths)
    with redis_client.Redis(port=redis.server.port, protocol=2) as client:
        keys = list(client.scan_iter())
        for key in keys:
            client.setrange(key, 300, bytes(byte ^ 1 for byte in client.getrange(key, 300, 300)))
    return len(paths) + len(keys)
