"""Redis, alone or a cluster, as a whole store.

Values end by their time to live, renewed with each use; what else goes is Redis' ``maxmemory-policy``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from baton.errors import TransferError
from baton.rpc.redis_client import open_redis, open_redis_cluster, redis_errors, shown_url

_MAX_VALUE_BYTES = 512 << 20  # what Redis takes
_OUT_OF_MEMORY = "OOM "


class RedisValues:
    """Values in a Redis; see :class:`Values`. Connections are made with the first call.

    Args:
        url: ``redis://`` or ``rediss://``, with ``+cluster`` before the colon where it is a cluster.
        timeout_s: Seconds that Redis has for one value.
        ttl_s: Seconds for which a value is kept after its last use; 0: for ever.

    Raises:
        ConfigError: The client is not installed, or the URL cannot be read.
    """

    kind = "redis"
    max_bytes = _MAX_VALUE_BYTES

    def __init__(self, url: str, *, timeout_s: float, ttl_s: float) -> None:
        self.name = shown_url(url)
        self._ttl_ms = round(1000 * ttl_s)
        scheme, _, rest = url.partition("://")
        if scheme.endswith("+cluster"):
            address = f"{scheme.removesuffix('+cluster')}://{rest}"
            self._redis: Any = open_redis_cluster(address, timeout_s=timeout_s)
        else:
            self._redis = open_redis(url, timeout_s=timeout_s)

    async def renew(self, keys: Sequence[bytes]) -> list[bool]:
        """Return which keys are there, and give those their whole time again."""
        if self._ttl_ms:
            answers = await self._run([("PEXPIRE", key, self._ttl_ms) for key in keys])
        else:
            answers = await self._run([("EXISTS", key) for key in keys])
        return [answer == 1 for answer in answers]

    async def get(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """Return values, and give them their whole time again."""
        if self._ttl_ms:
            answers = await self._run([("GETEX", key, "PX", self._ttl_ms) for key in keys])
        else:
            answers = await self._run([("GET", key) for key in keys])
        for answer in answers:
            if isinstance(answer, Exception):
                raise TransferError(f"Redis did not answer with a block: {answer}") from answer
        return answers

    async def put(self, items: Sequence[tuple[bytes, bytes]]) -> list[bool]:
        """Keep values."""
        expiry = ("PX", self._ttl_ms) if self._ttl_ms else ()
        answers = await self._run([("SET", key, value, *expiry) for key, value in items])
        for answer in answers:
            if isinstance(answer, Exception) and not str(answer).startswith(_OUT_OF_MEMORY):
                raise TransferError(f"Redis refused a block: {answer}") from answer
        return [not isinstance(answer, Exception) for answer in answers]

    async def close(self) -> None:
        """Close every connection."""
        await self._redis.aclose()

    async def _run(self, commands: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Send commands in one go; an answer may be an error."""
        pipeline = self._redis.pipeline(transaction=False)
        for command in commands:
            pipeline.execute_command(*command)
        try:
            answers: list[Any] = await pipeline.execute(raise_on_error=False)
        except redis_errors() as error:
            raise TransferError(f"Redis is away: {error}") from error
        return answers
