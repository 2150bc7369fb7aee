"""A Redis client as Baton's services use it, and the names under which instances register there."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from baton.errors import ConfigError

if TYPE_CHECKING:
    from redis.asyncio import Redis
    from redis.asyncio.cluster import RedisCluster

COMMAND_TIMEOUT_S = 1.0
LEASE_TTL_S = 10.0
"""Life of an instance's key; it is renewed three times as often."""
NEWS_LENGTH = 1024
_ASK_AGAIN_S = 0.1


def open_redis(url: str, *, timeout_s: float = COMMAND_TIMEOUT_S) -> Redis:
    """Open a client that neither retries nor waits long: whoever uses it has pauses of its own.

    Args:
        url: ``redis://`` or ``rediss://``.
        timeout_s: Seconds for a connection, and for each answer.

    Raises:
        ConfigError: The URL cannot be read, or the client is not installed.
    """
    try:
        from redis.asyncio import Redis
        from redis.asyncio.retry import Retry
        from redis.backoff import NoBackoff
    except ImportError as error:
        raise _not_installed() from error
    try:
        return Redis.from_url(
            url,
            socket_timeout=timeout_s,
            socket_connect_timeout=timeout_s,
            retry=Retry(NoBackoff(), 0),
            protocol=2,
        )
    except ValueError as error:
        raise ConfigError(f"the URL of Redis cannot be read: {error}", field="redis") from error


def open_redis_cluster(url: str, *, timeout_s: float = COMMAND_TIMEOUT_S) -> RedisCluster:
    """Open a client of a cluster, like :func:`open_redis`; the others' addresses come from the node that is named.

    Args:
        url: ``redis://`` or ``rediss://`` of any node.
        timeout_s: Seconds for a connection, and for each answer.

    Raises:
        ConfigError: The URL cannot be read, or the client is not installed.
    """
    try:
        from redis.asyncio.cluster import RedisCluster
        from redis.asyncio.retry import Retry
        from redis.backoff import NoBackoff
    except ImportError as error:
        raise _not_installed() from error
    try:
        return RedisCluster.from_url(
            url,
            socket_timeout=timeout_s,
            socket_connect_timeout=timeout_s,
            retry=Retry(NoBackoff(), 1),  # the one time is for a slot that has moved
            protocol=2,
        )
    except ValueError as error:
        raise ConfigError(f"the URL of Redis cannot be read: {error}", field="redis") from error


def shown_url(url: str) -> str:
    """Return a URL without user and password, for logs and traces."""
    parts = urlsplit(url)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()


def _not_installed() -> ConfigError:
    return ConfigError("this needs the Python package redis: pip install 'baton-serve[redis]'", field="redis")


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
