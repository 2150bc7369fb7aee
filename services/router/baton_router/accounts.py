"""Whose API key a request shows, and what that means: a tenant with a salt of its own, a share and limits.

Prefix caches of tenants are apart because their block hashes are: each tenant's chains begin with a salt that is an
HMAC of its id under a secret of the routers. A client's own ``cache_salt`` is mixed in and so divides a tenant's cache
further; it cannot lead into another's.

Keys and tenants are written as TOML or JSON, or just one key per line; where they come from: ``sources.py``.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import hmac
import json
import logging
import re
import secrets
import ssl
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from baton.background import keep_running
from baton.config.secrets import file_stamp, read_secret_file, require_unguessable
from baton.errors import ConfigError, InvalidRequestError
from baton.logs import Absence
from baton.rpc.audit import audit
from baton.rpc.convert import tenant_to_pb
from baton.rpc.redis import open_redis, redis_errors
from baton.rpc.tls import Tls
from baton.types import Tenant
from baton_router.types import Account, salt_of

FIELD = "api_keys"
MAX_FILE_BYTES = 16 << 20
MAX_WEIGHT = 1000.0
_NO_FLOOR = -(2**31)
_DIGEST = re.compile(r"[0-9a-f]{64}")
_PURPOSE = b"baton tenant salt 1\0"
_REMEMBERED = 1024
"""So many salts and users, of at most 512 characters each, have names that are not worked out again."""


@dataclass(frozen=True, slots=True)
class AccountEntry:
    """A tenant as the file has it; see :class:`~baton_router.types.Account`. ``None``: it says nothing."""

    tenant: Tenant
    weight: float = 1.0
    max_in_flight: int = 0
    requests_per_minute: int = 0
    tokens_per_minute: int = 0
    priority_floor: int | None = None
    admin: bool | None = None


_NUMBERS = ("max_in_flight", "requests_per_minute", "tokens_per_minute")
_QUOTAS = ("kv_bytes", "kv_disk_bytes")
_NAMES = frozenset({"keys", "key_sha256", *_QUOTAS, *(f.name for f in fields(AccountEntry))} - {"tenant"})


class Accounts:
    """The holders of all API keys.

    Args:
        entries: Tenants by the SHA-256 of their keys.
        secret: Secret of the routers, from which the salts are derived.
    """

    def __init__(self, entries: Mapping[bytes, AccountEntry], secret: bytes) -> None:
        self._secret = secret
        self._known: dict[bytes, Account] = {}
        self._named: dict[str, Account] = {}
        self._several = False
        self.replace(entries)

    @classmethod
    def of_keys(cls, *keys: str) -> Accounts:
        """Return accounts for keys, each of a tenant of its own, with a random secret."""
        return cls(entries_of_lines("\n".join(keys)), secrets.token_bytes(32))

    def __len__(self) -> int:
        return len(self._named)

    def replace(self, entries: Mapping[bytes, AccountEntry]) -> None:
        """Replace the keys; running requests go on."""
        names = {entry.tenant.id for entry in entries.values()}
        # The last tenant left of several does not become an administrator: this process knows what the others did.
        self._several = self._several or len(names) > 1
        accounts = {
            entry.tenant.id: _account(entry, self._secret, alone=not self._several) for entry in entries.values()
        }
        self._known = {digest: accounts[entry.tenant.id] for digest, entry in entries.items()}
        self._named = {account.name: account for account in accounts.values()}

    def named(self, name: str) -> Account | None:
        """Return a tenant's account; ``None``: there is no such tenant (any more)."""
        return self._named.get(name)

    def identify(self, header: str) -> Account | None:
        """Return the holder of the key in an ``authorization`` header; ``None``: the key is unknown.

        The time of the look-up could only reveal something about a digest, from which a key cannot be derived.
        """
        scheme, _, key = header.partition(" ")
        if scheme.lower() != "bearer":
            return None
        return self._known.get(hashlib.sha256(key.strip().encode("utf-8", "surrogatepass")).digest())


class Tenants:
    """Names tenants. A salt is a secret and a user may be a person: names contain only digests of both."""

    def __init__(self) -> None:
        self._digest = functools.lru_cache(_REMEMBERED)(functools.partial(_digest, secrets.token_bytes(16)))

    def name(self, account: Account | None, cache_salt: str, user: str) -> str:
        """Return a request's tenant: that of its API key, else of its cache salt, else of its user; else all share one.

        Args:
            account: The API key's holder; ``None``: there are no API keys.
            cache_salt: As in the request.
            user: As in the request.
        """
        if account is not None:
            return account.name
        if cache_salt:
            return f"salt-{self._digest(cache_salt)}"
        return f"user-{self._digest(user)}" if user else ""


def _account(entry: AccountEntry, secret: bytes, *, alone: bool) -> Account:
    key = hmac.digest(secret, _PURPOSE + entry.tenant.id.encode(), "sha256")
    return Account(
        tenant=entry.tenant,
        weight=entry.weight,
        max_in_flight=entry.max_in_flight,
        requests_per_minute=entry.requests_per_minute,
        tokens_per_minute=entry.tokens_per_minute,
        # A single tenant needs no protection from others, unless its file says otherwise.
        priority_floor=(_NO_FLOOR if alone else 0) if entry.priority_floor is None else entry.priority_floor,
        admin=alone if entry.admin is None else entry.admin,
        salt_key=key,
        message=tenant_to_pb(entry.tenant),
        own_salt=salt_of(key, ""),
    )


def _digest(key: bytes, text: str) -> str:
    return hashlib.blake2s(text.encode("utf-8", "surrogatepass"), digest_size=6, key=key).hexdigest()


# --- how keys and tenants are written ---


def read_entries(path: Path) -> dict[bytes, AccountEntry]:
    """Read the tenants, by the SHA-256 of their keys.

    Raises:
        ConfigError: The file cannot be read, is open to others, has no key, or makes no sense; says where.
    """
    data = read_secret_file(path, "the API keys", FIELD, most=MAX_FILE_BYTES)
    try:
        text = data.decode()
        if path.suffix == ".toml":
            entries = entries_of_tenants(tomllib.loads(text))
        elif path.suffix == ".json":
            entries = entries_of_tenants(json.loads(text))
        else:
            entries = entries_of_lines(text)
    except (ValueError, RecursionError) as error:  # tomllib's and json's own errors are ValueErrors
        raise _wrong(f"{path} cannot be read: {error}") from error
    except ConfigError as error:
        raise _wrong(f"{path}: {error.message}") from error
    if not entries:
        raise _wrong(f"{path} has no key")
    return entries


def entries_of_json(data: bytes) -> dict[bytes, AccountEntry]:
    """Read tenants from JSON; see :func:`entries_of_tenants`.

    Raises:
        ConfigError: It is none, or makes no sense; says where.
    """
    try:
        entries = entries_of_tenants(json.loads(data))
    except (ValueError, RecursionError) as error:
        raise _wrong(f"API keys that are no JSON: {error}") from error
    if not entries:
        raise _wrong("there is no API key")
    return entries


def entries_of_lines(text: str) -> dict[bytes, AccountEntry]:
    """Read one key per line, each of a tenant of its own; empty lines and ``#`` comments don't count.

    A tenant is named after its key, not after its line: else removing a line would give caches to others.

    Raises:
        ConfigError: A key has characters that no header can carry.
    """
    entries = {}
    for line in text.splitlines():
        key = line.strip()
        if key and not key.startswith("#"):
            digest = key_digest(key)
            entries[digest] = AccountEntry(Tenant(f"key-{digest.hex()[:8]}"))
    return entries


def entries_of_tenants(value: Any) -> dict[bytes, AccountEntry]:
    """Read ``{"tenants": {"acme": {"keys": [...], "weight": 2}}}``.

    Raises:
        ConfigError: A field is wrong, unknown or missing; names it.
    """
    if not isinstance(value, Mapping) or set(value) != {"tenants"} or not isinstance(value["tenants"], Mapping):
        raise _wrong("a table 'tenants' is wanted, and nothing else")
    entries: dict[bytes, AccountEntry] = {}
    for name, fields_of in value["tenants"].items():
        where = f"tenants.{name}"
        if not isinstance(fields_of, Mapping):
            raise _wrong(f"{where} must be a table")
        unknown = sorted(set(fields_of) - _NAMES)
        if unknown:
            raise _wrong(f"{where}.{unknown[0]} is unknown; there are {', '.join(sorted(_NAMES))}")
        entry = _entry(name, fields_of, where)
        for digest in _digests(fields_of, where):
            if digest in entries:
                raise _wrong(f"{where}: a key is named twice")
            entries[digest] = entry
    return entries


def key_digest(key: str) -> bytes:
    """Return the digest of a key.

    Raises:
        ConfigError: It has characters that no header can carry.
    """
    if not (0 < len(key) <= 4096 and key.isascii() and key.isprintable() and " " not in key):
        raise _wrong("a key is printable ASCII without spaces")
    return hashlib.sha256(key.encode()).digest()


def _entry(name: str, values: Mapping[str, Any], where: str) -> AccountEntry:
    weight = values.get("weight", 1.0)
    if isinstance(weight, bool) or not isinstance(weight, (int, float)) or not 0 < weight <= MAX_WEIGHT:
        raise _wrong(f"{where}.weight must be above 0 and at most {MAX_WEIGHT:g}")
    numbers = {}
    for field in (*_NUMBERS, *_QUOTAS):
        number = values.get(field, 0)
        if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number < 2**63:
            raise _wrong(f"{where}.{field} must be a whole number from 0 on")
        numbers[field] = number
    floor = values.get("priority_floor")
    if floor is not None and (isinstance(floor, bool) or not isinstance(floor, int) or not _NO_FLOOR <= floor < 2**31):
        raise _wrong(f"{where}.priority_floor must be a whole number of 32 bits")
    admin = values.get("admin")
    if not isinstance(admin, bool | None):
        raise _wrong(f"{where}.admin must be true or false")
    try:
        tenant = Tenant(name, *(numbers.pop(field) for field in _QUOTAS))
    except InvalidRequestError as error:
        raise _wrong(f"{where}: {error.message}") from error
    return AccountEntry(tenant, weight=float(weight), priority_floor=floor, admin=admin, **numbers)


def _digests(values: Mapping[str, Any], where: str) -> list[bytes]:
    digests = []
    for field in ("keys", "key_sha256"):
        items = values.get(field, [])
        if not isinstance(items, list) or not all(isinstance(item, str) for item in items):
            raise _wrong(f"{where}.{field} must be a list of strings")
        for item in items:
            if field == "key_sha256" and not _DIGEST.fullmatch(item.lower()):
                raise _wrong(f"{where}.key_sha256 must be 64 hex digits")
            digests.append(bytes.fromhex(item) if field == "key_sha256" else key_digest(item))
    if not digests:
        raise _wrong(f"{where} has no key: give keys or key_sha256")
    return digests


def _wrong(message: str) -> ConfigError:
    return ConfigError(message, field=FIELD)


if TYPE_CHECKING:
    from redis.asyncio import Redis


log = logging.getLogger(__name__)

IN_REDIS = "redis"
"""Value of ``--api-keys`` for keys in Redis."""
INTERVAL_S = 2.0


class FileAccounts:
    """Accounts from a file.

    Args:
        path: The file.
        secret_file: Has the secret of the salts; empty: a random one.
        shared: Whether other routers serve the same tenants, and so need the same secret.

    Raises:
        ConfigError: A file cannot be read or makes no sense.
    """

    def __init__(self, path: str, secret_file: str, *, shared: bool) -> None:
        self._path = Path(path)
        self._seen = file_stamp(self._path)
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
        """Read the file again, in a thread, if it changed; a broken one is reported and changes nothing."""
        stamp = file_stamp(self._path)
        if stamp == self._seen:
            return False
        self._seen = stamp
        try:
            entries = await asyncio.to_thread(read_entries, self._path)
        except ConfigError as error:
            log.error("API keys stay as they were: %s", error.message)
            audit("keys_changed", source=str(self._path), taken="no")
            return False
        self.accounts.replace(entries)
        log.info("API keys were read again: %d tenants", len(self.accounts))
        audit("keys_changed", source=str(self._path), taken="yes", tenants=len(self.accounts))
        return True


def read_secret(path: str) -> bytes | None:
    """Read the secret that decides the tenants' salts; an empty path means none.

    Raises:
        ConfigError: It cannot be read, is open to others, or can be guessed.
    """
    if not path:
        return None
    secret = read_secret_file(path, "the tenants' secret", "tenant_secret_file").strip()
    require_unguessable(secret, f"the tenants' secret in {path}", "tenant_secret_file")
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
    """Return the key of the API keys."""
    return f"{prefix}:api-keys"


class RedisAccounts:
    """Accounts from Redis. While it is unreachable they do not change.

    Args:
        url: URL of Redis.
        prefix: Prefix of the key.
        secret_file: File with the secret of the salts.

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
        await self._apply(data)

    async def renew(self) -> None:
        """Read the accounts again; errors are logged and change nothing."""
        try:
            data = await self._read()
            if data is None:
                raise ConfigError(f"{self._key} is not there", field=FIELD)
            if data != self._seen:
                await self._apply(data)
                log.info("API keys were read again: %d tenants", len(self.accounts))
                audit("keys_changed", source="redis", taken="yes", tenants=len(self.accounts))
        except ConfigError as error:
            self._complain(error.message)
        except redis_errors() as error:
            self._complain(str(error))
        else:
            self._absence.record_return()

    async def close(self) -> None:
        await self._redis.aclose()

    async def _read(self) -> bytes | None:
        if await self._redis.strlen(self._key) > MAX_FILE_BYTES:
            raise ConfigError(f"{self._key} is longer than {MAX_FILE_BYTES} bytes", field=FIELD)
        value = await self._redis.get(self._key)
        return value.encode() if isinstance(value, str) else value

    async def _apply(self, data: bytes) -> None:
        self.accounts.replace(await asyncio.to_thread(entries_of_json, data))
        self._seen = data

    def _complain(self, why: str) -> None:
        self._absence.record_failure("API keys stay as they were: %s", why, level=logging.ERROR)


class CredentialReload:
    """Reads keys and certificates again every :data:`INTERVAL_S` seconds.

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
            self._task = keep_running(self._run, "renewal")

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if self._accounts is not None:
            await self._accounts.close()

    async def look(self) -> None:
        """Apply changes; failures are logged, and retried by the next look."""
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
