"""Store nodes that registered in Redis.

Each keeps a key with a time to live. A look at all keys follows every piece of news, and every few seconds. A node is
forgotten when it says that it leaves, or when its key was missing for a whole lease during which Redis was there: so a
Redis that is away, or comes back empty, takes nothing away.
"""

from __future__ import annotations

import asyncio
import json
import logging
import random
import time
from collections.abc import Callable, Iterable
from typing import Any, Protocol

from baton.config.stores import StoreAddress
from baton.errors import ConfigError, UnavailableError
from baton.rpc.redis_client import LEASE_TTL_S, end_task, open_redis, redis_errors, store_news_key, store_node_key

log = logging.getLogger(__name__)

_NEWS_MS = 500
_LOOK_S = LEASE_TTL_S / 3
_RETRY_S = 0.5
_PER_SCAN = 256


class NodeList(Protocol):
    """Who is told; :class:`~baton.kv_transfer.connector.store.nodes.Nodes` is one."""

    def set(self, names: Iterable[str]) -> None:
        """Take note of the addresses of all nodes there are."""


class RedisMembership:
    """Watches the keys of nodes; see :class:`Membership`.

    Args:
        url: Where Redis is.
        prefix: Put before every key.
        now: Monotonic clock.

    Raises:
        ConfigError: The URL cannot be read, or the client is not installed.
    """

    def __init__(self, url: str, prefix: str, now: Callable[[], float] = time.monotonic) -> None:
        self._redis = open_redis(url)
        self._prefix, self._now = prefix, now
        self._seen: dict[str, tuple[str, float]] = {}
        self._since = self._next_look = now()
        self._position: bytes | str = "0-0"
        self._looked = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def start(self, nodes: NodeList, *, deadline: float) -> None:
        """Begin to watch; waits for the first look.

        Raises:
            UnavailableError: Redis was not reached in time.
        """
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run(nodes), name="discovery of store nodes")
        if not self._looked.is_set():
            try:
                async with asyncio.timeout(max(0.0, deadline - time.monotonic())):
                    await self._looked.wait()
            except TimeoutError:
                raise UnavailableError("no node of the KV store is known: Redis is away") from None

    async def close(self) -> None:
        """Stop."""
        if self._task is not None:
            await end_task(self._task)
        await self._redis.aclose()

    async def _run(self, nodes: NodeList) -> None:
        away = False
        while True:
            try:
                latest: Any = await self._redis.xrevrange(store_news_key(self._prefix), count=1)
                self._position = latest[0][0] if latest else "0-0"
                self._since = self._now()  # before the look: while Redis was away no key counts as missing
                await self._look(nodes)
                away = False
                while True:
                    if await self._news() or self._now() >= self._next_look:
                        await self._look(nodes)
            except redis_errors() as error:
                # Once per absence, not once per try.
                log.log(logging.DEBUG if away else logging.WARNING, "Redis is away, store nodes are kept: %s", error)
                away = True
            await asyncio.sleep(_RETRY_S * random.uniform(0.8, 1.2))

    async def _news(self) -> bool:
        """Wait for news; ``False``: there was none for a while."""
        stream = store_news_key(self._prefix)
        answer: Any = await self._redis.xread({stream: self._position}, count=256, block=_NEWS_MS)
        found = False
        for _, entries in list(answer.items()) if isinstance(answer, dict) else answer or ():
            found, self._position = True, entries[-1][0]
            for _, news in entries:
                if news.get(b"what") == b"left":
                    self._seen.pop(news.get(b"instance", b"").decode(errors="replace"), None)
        return found

    async def _look(self, nodes: NodeList) -> None:
        """Read all keys, and tell who there is."""
        start, now = len(store_node_key(self._prefix, "")), self._now()
        self._next_look = now + _LOOK_S
        keys = [key async for key in self._redis.scan_iter(store_node_key(self._prefix, "*"), count=_PER_SCAN)]
        for key, value in zip(keys, await self._redis.mget(keys) if keys else (), strict=True):
            name = key[start:].decode(errors="replace")
            if value is None:  # its time ended in between
                continue
            try:
                address = StoreAddress.parse(json.loads(value)["address"]).nodes
                if len(address) != 1:
                    raise ConfigError("that is not one node", field="address")
            except (ConfigError, ValueError, KeyError, TypeError, AttributeError) as error:
                log.warning("the registration of store node %s in Redis cannot be read: %s", name, error)
                continue
            self._seen[name] = address[0], now
        before = now - LEASE_TTL_S
        if self._since <= before:
            self._seen = {name: item for name, item in self._seen.items() if item[1] > before}
        nodes.set(address for address, _ in self._seen.values())
        self._looked.set()
