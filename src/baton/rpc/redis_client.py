"""A Redis client as Baton's services use it, and the names under which instances register there."""

from __future__ import annotations

from typing import TYPE_CHECKING

from baton.errors import ConfigError

if TYPE_CHECKING:
    from redis.asyncio import Redis

COMMAND_TIMEOUT_S = 1.0
LEASE_TTL_S = 10.0
"""Life of an instance's key; it is renewed three times as often."""
NEWS_LENGTH = 1024


def open_redis(url: str) -> Redis:
    """Open a client that neither retries nor waits long: whoever uses it has pauses of its own.

    Raises:
        ConfigError: The URL cannot be read, or the client is not installed.
    """
    try:
        from redis.asyncio import Redis
        from redis.asyncio.retry import Retry
        from redis.backoff import NoBackoff
    except ImportError as error:
        message = "this needs the Python package redis: pip install 'baton-serve[redis]'"
        raise ConfigError(message, field="redis") from error
    try:
        return Redis.from_url(
            url,
            socket_timeout=COMMAND_TIMEOUT_S,
            socket_connect_timeout=COMMAND_TIMEOUT_S,
            retry=Retry(NoBackoff(), 0),
            protocol=2,
        )
    except ValueError as error:
        raise ConfigError(f"the URL of Redis cannot be read: {error}", field="redis") from error


def redis_errors() -> tuple[type[Exception], ...]:
    """Return what a client raises when Redis is away or answers with an error."""
    from redis.exceptions import RedisError

    return (RedisError, OSError, TimeoutError)


def instance_key(prefix: str, instance_id: str) -> str:
    """Return the key of an instance's registration."""
    return f"{prefix}:instance:{instance_id}"


def news_key(prefix: str) -> str:
    """Return the stream that tells who came and who left."""
    return f"{prefix}:instances"
