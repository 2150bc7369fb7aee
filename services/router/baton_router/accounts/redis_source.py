"""API keys that stand in Redis, for several routers at once: one value, the same JSON as in a file."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from baton.errors import ConfigError
from baton.rpc.redis_client import open_redis, redis_errors
from baton_router.accounts.accounts import Accounts, required_secret
from baton_router.accounts.file_source import FIELD, MAX_FILE_BYTES, entries_of_json

if TYPE_CHECKING:
    from redis.asyncio import Redis

log = logging.getLogger(__name__)

IN_REDIS = "redis"
"""What ``--api-keys`` is then."""


def accounts_key(prefix: str) -> str:
    """Return the key whose value says whose API keys there are."""
    return f"{prefix}:api-keys"


class RedisAccounts:
    """Keeps accounts as Redis has them. While it is away they stay as they were.

    Args:
        url: Of Redis.
        prefix: Put before the key.
        secret_file: Has the secret of the salts.

    Raises:
        ConfigError: There is no secret, or the client is not installed.
    """

    def __init__(self, url: str, prefix: str, secret_file: str) -> None:
        self.accounts = Accounts({}, required_secret(secret_file))
        self._redis: Redis = open_redis(url)
        self._key = accounts_key(prefix)
        self._seen: bytes | None = None
        self._away = False

    async def start(self) -> None:
        """Read them for the first time.

        Raises:
            ConfigError: Redis does not answer, or has none that make sense.
        """
        try:
            data = await self._read()
        except redis_errors() as error:
            raise ConfigError(f"API keys cannot be read from Redis: {error}", field=FIELD) from error
        if data is None:
            raise ConfigError(f"Redis has no API keys: {self._key} is not there", field=FIELD)
        self._take(data)

    async def renew(self) -> None:
        """Read them again; what is missing or wrong is reported and changes nothing."""
        try:
            data = await self._read()
            if data is None:
                raise ConfigError(f"{self._key} is not there", field=FIELD)
            if data != self._seen:
                self._take(data)
                log.info("API keys were read again: %d tenants", len(self.accounts))
        except ConfigError as error:
            self._complain(error.message)
        except redis_errors() as error:
            self._complain(str(error))
        else:
            self._away = False

    async def close(self) -> None:
        """Close the connection."""
        await self._redis.aclose()

    async def _read(self) -> bytes | None:
        if await self._redis.strlen(self._key) > MAX_FILE_BYTES:
            raise ConfigError(f"{self._key} is longer than {MAX_FILE_BYTES} bytes", field=FIELD)
        value = await self._redis.get(self._key)
        return value.encode() if isinstance(value, str) else value

    def _take(self, data: bytes) -> None:
        self.accounts.replace(entries_of_json(data))
        self._seen = data

    def _complain(self, why: str) -> None:
        if not self._away:  # once, not every time
            log.error("API keys stay as they were: %s", why)
        self._away = True
