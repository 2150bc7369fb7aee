"""Instances that registered in Redis.

Each keeps a key with a time to live. A look at all keys follows every piece of news, and every second. An instance is
forgotten when it says that it leaves, or when its key was missing for a whole lease during which Redis was there: so a
Redis that is away, or comes back empty, takes nothing away.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from baton.rpc.channel import Backoff
from baton.rpc.redis_client import end_task, open_redis, redis_errors
from baton.rpc.registrations import LEASE_TTL_S, Registrations, instance_key, news_key
from baton.rpc.service_token import Token
from baton.types import Role
from baton_router.config import RouterConfig, check_address
from baton_router.registry.registry import Registry

log = logging.getLogger(__name__)

SOURCE = "redis"
_LOOK_MS = 800


class RedisDiscovery:
    """Watches the keys of instances.

    Args:
        config: Where Redis is.
        registry: Is told.
        token: The services'; with one, registrations that it has not signed are passed over.
        now: Monotonic clock.

    Raises:
        ConfigError: The URL cannot be read, or the client is not installed.
    """

    def __init__(
        self,
        config: RouterConfig,
        registry: Registry,
        token: Token | None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._redis = open_redis(config.redis)
        key = instance_key(config.redis_prefix, "")
        self._registrations = Registrations(self._redis, key, token, partial(registry.refused_in_redis, "instance"))
        self._prefix, self._registry, self._now = config.redis_prefix, registry, now
        self._seen: dict[str, tuple[str, Role, float]] = {}
        self._since = now()
        self._position: bytes | str = "0-0"
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to watch; needs a running loop."""
        self._task = asyncio.create_task(self._run(), name="discovery redis")

    async def close(self) -> None:
        """Stop."""
        if self._task is not None:
            await end_task(self._task)
        await self._redis.aclose()

    async def _run(self) -> None:
        backoff, away = Backoff(1.0, random.Random()), False
        while True:
            try:
                latest: Any = await self._redis.xrevrange(news_key(self._prefix), count=1)
                self._position = latest[0][0] if latest else "0-0"
                self._since = self._now()  # before the look: while Redis was away no key counts as missing
                await self._look()
                away = False
                backoff.reset()
                while True:
                    await self._wait_for_news()
                    await self._look()
            except redis_errors() as error:
                if not away:
                    log.warning("Redis is away, the instances found so far are kept: %s", error)
                away = True
            await asyncio.sleep(backoff.next_s())

    async def _wait_for_news(self) -> None:
        stream = news_key(self._prefix)
        answer: Any = await self._redis.xread({stream: self._position}, count=256, block=_LOOK_MS)
        for _, entries in list(answer.items()) if isinstance(answer, dict) else answer or ():
            self._position = entries[-1][0]
            for _, news in entries:
                if news.get(b"what") == b"left":
                    self._seen.pop(news.get(b"instance", b"").decode(errors="replace"), None)

    async def _look(self) -> None:
        """Read all keys, and tell the registry."""
        now = self._now()
        for name, (address, role) in (await self._registrations.read(_parse)).items():
            self._seen[name] = address, role, now
        before = now - LEASE_TTL_S
        if self._since <= before:
            self._seen = {name: item for name, item in self._seen.items() if item[2] > before}
        self._registry.found(SOURCE, {address: role for address, role, _ in self._seen.values()})


def _parse(fields: Mapping[str, Any]) -> tuple[str, Role]:
    check_address(fields["address"], field="address")
    return fields["address"], Role(fields["role"])
