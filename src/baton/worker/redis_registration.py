"""Making an instance or a store node known through Redis: a key with a time to live, renewed by heartbeats."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import random
from collections.abc import Mapping

from baton.rpc.redis_client import (
    LEASE_TTL_S,
    NEWS_LENGTH,
    end_task,
    instance_key,
    news_key,
    open_redis,
    redis_errors,
    store_news_key,
    store_node_key,
)
from baton.worker.registration import Identity

log = logging.getLogger(__name__)

_RETRY_S = 0.5


class RedisPresence:
    """Keeps a key until :meth:`stop`, and tells in a stream when it comes and goes.

    Args:
        url: Where Redis is.
        key: Of whoever registers.
        value: What others are told.
        news: Key of the stream.
        name: Who this is, in the stream.

    Raises:
        ConfigError: The URL cannot be read, or the client is not installed.
    """

    def __init__(self, url: str, *, key: str, value: Mapping[str, str], news: str, name: str) -> None:
        self._redis = open_redis(url)
        self._key, self._value, self._news, self._name = key, json.dumps(dict(value)), news, name
        self._task: asyncio.Task[None] | None = None
        self._known = False

    def start(self) -> None:
        """Begin in the background."""
        self._task = asyncio.get_running_loop().create_task(self._run(), name="registration redis")

    async def stop(self) -> None:
        """Take the key away and tell."""
        if self._task is not None:
            await end_task(self._task)
        with contextlib.suppress(*redis_errors()):  # the key's time ends it
            if self._known:
                await self._redis.delete(self._key)
                await self._tell("left")
        await self._redis.aclose()

    async def _run(self) -> None:
        away = False
        while True:
            try:
                before = await self._redis.set(self._key, self._value, px=int(1000 * LEASE_TTL_S), get=True)
                if before is None:
                    await self._tell("came")
                    log.info("registered with Redis")
                self._known, away, pause_s = True, False, LEASE_TTL_S / 3
            except redis_errors() as error:
                # Once per absence, not once per try.
                log.log(logging.DEBUG if away else logging.WARNING, "Redis is away: %s", error)
                away, pause_s = True, _RETRY_S
            await asyncio.sleep(pause_s * random.uniform(0.8, 1.0))

    async def _tell(self, what: str) -> None:
        await self._redis.xadd(self._news, {"instance": self._name, "what": what}, maxlen=NEWS_LENGTH, approximate=True)


class RedisRegistration(RedisPresence):
    """Makes an instance known to routers.

    Args:
        url: Where Redis is.
        prefix: Put before every key.
        identity: Who registers.

    Raises:
        ConfigError: The URL cannot be read, or the client is not installed.
    """

    def __init__(self, url: str, prefix: str, identity: Identity) -> None:
        super().__init__(
            url,
            key=instance_key(prefix, identity.instance_id),
            value={"address": identity.address, "role": identity.role.value, "epoch": identity.epoch.hex()},
            news=news_key(prefix),
            name=str(identity.instance_id),
        )


class RedisNode(RedisPresence):
    """Makes a KV store node known to its clients.

    Args:
        url: Where Redis is.
        prefix: Put before every key.
        name: Of the node.
        address: ``host:port`` under which clients reach it. It also decides what the node keeps, so a node that is
            started again should have the same.

    Raises:
        ConfigError: The URL cannot be read, or the client is not installed.
    """

    def __init__(self, url: str, prefix: str, name: str, address: str) -> None:
        key, news = store_node_key(prefix, name), store_news_key(prefix)
        super().__init__(url, key=key, value={"address": address}, news=news, name=name)
