"""A Redis client as Baton's services use it."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, cast

from baton.config.secrets import shown_url
from baton.errors import ConfigError

if TYPE_CHECKING:
    from redis.asyncio import Redis
    from redis.asyncio.cluster import RedisCluster

COMMAND_TIMEOUT_S = 1.0
UNREADABLE_URL = "a URL of Redis must be redis://user:password@host:port/0, with %2F for / and %40 for @ in a password"
_ASK_AGAIN_S = 0.1


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


async def redis_ms(redis: Redis) -> int:
    """Return Redis' own time, the one clock that all who use it share, in milliseconds."""
    seconds, micros = await redis.time()
    return int(seconds) * 1000 + int(micros) // 1000
