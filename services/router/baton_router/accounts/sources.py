"""Where API keys come from, a file or Redis; and what takes over keys and certificates that change meanwhile."""

from __future__ import annotations

import asyncio
import logging
import secrets
import ssl
from pathlib import Path
from typing import TYPE_CHECKING

from baton.config.secrets import read_secret_file
from baton.errors import ConfigError
from baton.logs import Absence
from baton.rpc.audit import audit
from baton.rpc.redis import open_redis, redis_errors
from baton.rpc.tls import Tls
from baton_router.accounts.accounts import FIELD, MAX_FILE_BYTES, Accounts, entries_of_json, read_entries

if TYPE_CHECKING:
    from redis.asyncio import Redis

log = logging.getLogger(__name__)

IN_REDIS = "redis"
"""What ``--api-keys`` is then."""
INTERVAL_S = 2.0
MIN_SECRET_BYTES = 16


class FileAccounts:
    """Keeps accounts as a file has them.

    Args:
        path: The file.
        secret_file: Has the secret of the salts; empty: a random one.
        shared: Whether other routers serve the same tenants, and so need the same secret.

    Raises:
        ConfigError: A file cannot be read or makes no sense.
    """

    def __init__(self, path: str, secret_file: str, *, shared: bool) -> None:
        self._path = Path(path)
        self._seen = self._stamp()
        entries = read_entries(self._path)
        secret = required_secret(secret_file) if shared else read_secret(secret_file)
        if secret is None:
            if len({entry.tenant.id for entry in entries.values()}) > 1:
                log.warning("no --tenant-secret-file: what tenants have cached is not found again after a restart")
            secret = secrets.token_bytes(32)
        self.accounts = Accounts(entries, secret)

    async def start(self) -> None:
        """Do nothing: the file was read when this was made."""

    async def close(self) -> None:
        """Do nothing: no connection is open."""

    async def renew(self) -> bool:
        """Read the file again if it changed; a broken one is reported and changes nothing. Blocks for a moment."""
        stamp = self._stamp()
        if stamp == self._seen:
            return False
        self._seen = stamp
        try:
            self.accounts.replace(read_entries(self._path))
        except ConfigError as error:
            log.error("API keys stay as they were: %s", error.message)
            audit("keys_changed", source=str(self._path), taken="no")
            return False
        log.info("API keys were read again: %d tenants", len(self.accounts))
        audit("keys_changed", source=str(self._path), taken="yes", tenants=len(self.accounts))
        return True

    def _stamp(self) -> tuple[int, int, int] | None:
        try:
            info = self._path.stat()
        except OSError:
            return None
        return info.st_mtime_ns, info.st_size, info.st_ino


def read_secret(path: str) -> bytes | None:
    """Read the secret that decides the tenants' salts; an empty path means none.

    Raises:
        ConfigError: It cannot be read, is open to others, or is too short.
    """
    if not path:
        return None
    secret = read_secret_file(path, "the tenants' secret", "tenant_secret_file").strip()
    if len(secret) < MIN_SECRET_BYTES:
        raise ConfigError(
            f"the tenants' secret in {path} has {len(secret)} bytes; {MIN_SECRET_BYTES} are the least",
            field="tenant_secret_file",
        )
    return secret


def required_secret(path: str) -> bytes:
    """Read the secret of routers that serve the same tenants.

    Raises:
        ConfigError: There is none, or it cannot be read, or is too short.
    """
    secret = read_secret(path)
    if secret is None:
        message = "several routers must agree on the salts of tenants: give all of them --tenant-secret-file"
        raise ConfigError(message, field="tenant_secret_file")
    return secret


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
        self._absence = Absence(log, "API keys are read again from Redis")

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
                audit("keys_changed", source="redis", taken="yes", tenants=len(self.accounts))
        except ConfigError as error:
            self._complain(error.message)
        except redis_errors() as error:
            self._complain(str(error))
        else:
            self._absence.ended()

    async def close(self) -> None:
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
        self._absence.failed("API keys stay as they were: %s", why, level=logging.ERROR)


class CredentialReload:
    """Looks at the files every :data:`INTERVAL_S` seconds.

    Args:
        accounts: API keys, if there are any.
        tls: Certificates, if there are any.
        https: Context of the HTTP server, if it speaks TLS.
    """

    def __init__(
        self, accounts: FileAccounts | RedisAccounts | None, tls: Tls | None, https: ssl.SSLContext | None
    ) -> None:
        self._accounts = accounts
        self._tls = tls
        self._https = https
        self._shown = tls.generation if tls is not None else 0
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Begin, in the running loop.

        Raises:
            ConfigError: API keys cannot be read.
        """
        if self._accounts is not None:
            await self._accounts.start()
        if self._accounts is not None or self._https is not None:
            self._task = asyncio.create_task(self._run(), name="renewal")

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if self._accounts is not None:
            await self._accounts.close()

    async def look(self) -> None:
        """Take over what has changed. What cannot be is reported, and tried again by the next look."""
        for renew in (self._renew_accounts, self._renew_certificates):
            try:
                await renew()
            except Exception:  # a file in the middle of being replaced, say: it must not be the last look
                log.exception("API keys or certificates could not be taken over")

    async def _renew_accounts(self) -> None:
        if self._accounts is not None:
            await self._accounts.renew()

    async def _renew_certificates(self) -> None:
        if self._tls is not None and self._https is not None:
            self._tls.refresh()
            generation = self._tls.generation
            if self._shown != generation:
                self._tls.renew(self._https)
                self._shown = generation

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(INTERVAL_S)
            await self.look()
