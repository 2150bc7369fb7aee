"""A Redis client as Baton's services use it, and how instances and KV store nodes register there."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import random
from collections.abc import Mapping
from typing import TYPE_CHECKING, cast

from baton.config.secrets import shown_url
from baton.errors import ConfigError

if TYPE_CHECKING:
    from redis.asyncio import Redis
    from redis.asyncio.cluster import RedisCluster

log = logging.getLogger(__name__)

COMMAND_TIMEOUT_S = 1.0
LEASE_TTL_S = 10.0
"""Life of an instance's key; it is renewed three times as often."""
NEWS_LENGTH = 1024
UNREADABLE_URL = "a URL of Redis must be redis://user:password@host:port/0, with %2F for / and %40 for @ in a password"
_ASK_AGAIN_S = 0.1
_RETRY_S = 0.5


def open_redis(url: str, *, timeout_s: float = COMMAND_TIMEOUT_S) -> Redis:
    """Open a client that neither retries nor waits long: whoever uses it has pauses of its own.

    Args:
        url: ``redis://`` or ``rediss://``.
        timeout_s: Seconds for a connection, and for each answer.

    Raises:
        ConfigError: The URL cannot be read, or the client is not installed.
    """
    return cast("Redis", _open("Redis", url, timeout_s, retries=0))


def open_redis_cluster(url: str, *, timeout_s: float = COMMAND_TIMEOUT_S) -> RedisCluster:
    """Open a client of a cluster, like :func:`open_redis`; the others' addresses come from the node that is named.

    Args:
        url: ``redis://`` or ``rediss://`` of any node.
        timeout_s: Seconds for a connection, and for each answer.

    Raises:
        ConfigError: The URL cannot be read, or the client is not installed.
    """
    # One retry is for a slot that has moved.
    return cast("RedisCluster", _open("RedisCluster", url, timeout_s, retries=1))


def _open(kind: str, url: str, timeout_s: float, *, retries: int) -> object:
    try:
        import redis.asyncio
        from redis.asyncio.retry import Retry
        from redis.backoff import NoBackoff
    except ImportError as error:
        message = "this needs the Python package redis: pip install 'baton-serve[redis]'"
        raise ConfigError(message, field="redis") from error
    try:
        opened: object = getattr(redis.asyncio, kind).from_url(
            url,
            socket_timeout=timeout_s,
            socket_connect_timeout=timeout_s,
            retry=Retry(NoBackoff(), retries),
            protocol=2,
        )
    except ValueError as error:
        # What the library says may have a part of the password in it.
        raise ConfigError(f"{UNREADABLE_URL}, got {shown_url(url)}", field="redis") from error
    return opened


def redis_errors() -> tuple[type[Exception], ...]:
    """Return what a client raises when Redis is away or answers with an error."""
    from redis.exceptions import RedisClusterException, RedisError

    return (RedisError, RedisClusterException, OSError, TimeoutError)


async def end_task(task: asyncio.Task[None]) -> None:
    """Cancel a task that uses a client, and wait for its end.

    It is asked again until it ends: in Python 3.11 ``asyncio.wait_for``, which the client uses, may swallow it.
    """
    while not task.done():
        task.cancel()
        await asyncio.wait([task], timeout=_ASK_AGAIN_S)
    if not task.cancelled():
        task.exception()  # looked at: nobody else will


def instance_key(prefix: str, instance_id: str) -> str:
    """Return the key of an instance's registration."""
    return f"{prefix}:instance:{instance_id}"


def news_key(prefix: str) -> str:
    """Return the stream that tells who came and who left."""
    return f"{prefix}:instances"


def store_node_key(prefix: str, name: str) -> str:
    """Return the key of a KV store node's registration."""
    return f"{prefix}:kvstore:{name}"


def store_news_key(prefix: str) -> str:
    """Return the stream that tells which nodes came and left."""
    return f"{prefix}:kvstores"


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


def redis_store_node(url: str, prefix: str, name: str, address: str) -> RedisPresence:
    """Return what makes a KV store node known to its clients.

    Args:
        url: Where Redis is.
        prefix: Put before every key.
        name: Of the node.
        address: ``host:port`` under which clients reach it. It also decides what the node keeps, so a node that is
            started again should have the same.

    Raises:
        ConfigError: The URL cannot be read, or the client is not installed.
    """
    key, news = store_node_key(prefix, name), store_news_key(prefix)
    return RedisPresence(url, key=key, value={"address": address}, news=news, name=name)
