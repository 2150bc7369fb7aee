"""Whose API key a request shows, and what that means: a tenant with a salt of its own, a share and limits.

Prefix caches of tenants are apart because their block hashes are: each tenant's chains begin with a salt that is an
HMAC of its id under a secret of the routers. A client's own ``cache_salt`` is mixed in and so divides a tenant's cache
further; it cannot lead into another's.
"""

from __future__ import annotations

import functools
import hashlib
import hmac
import logging
import secrets
from collections.abc import Mapping
from pathlib import Path

from baton.errors import ConfigError
from baton.rpc.convert import tenant_to_pb
from baton_router.accounts.file_source import AccountEntry, entries_of_lines, read_entries
from baton_router.types import Account, salt_of

log = logging.getLogger(__name__)

MIN_SECRET_BYTES = 16
_PURPOSE = b"baton tenant salt 1\0"
_REMEMBERED = 1024
"""So many salts and users, of at most 512 characters each, have names that are not worked out again."""


class Accounts:
    """The holders of all API keys.

    Args:
        entries: By the SHA-256 of their keys.
        secret: Of the routers: decides the salts.
    """

    def __init__(self, entries: Mapping[bytes, AccountEntry], secret: bytes) -> None:
        self._secret = secret
        self._known: dict[bytes, Account] = {}
        self.replace(entries)

    @classmethod
    def of_keys(cls, *keys: str) -> Accounts:
        """Return accounts for keys, each of a tenant of its own, with a random secret."""
        return cls(entries_of_lines("\n".join(keys)), secrets.token_bytes(32))

    def __len__(self) -> int:
        """Tenants."""
        return len({account.name for account in self._known.values()})

    def replace(self, entries: Mapping[bytes, AccountEntry]) -> None:
        """Take other keys; running requests go on."""
        names = {entry.tenant.id for entry in entries.values()}
        accounts = {entry.tenant.id: _account(entry, self._secret, alone=len(names) == 1) for entry in entries.values()}
        self._known = {digest: accounts[entry.tenant.id] for digest, entry in entries.items()}

    def identify(self, header: str) -> Account | None:
        """Return whose key an ``authorization`` header shows; ``None``: no known key's.

        What the time of the look-up could tell is about a digest, from which a key cannot be worked out.
        """
        scheme, _, key = header.partition(" ")
        if scheme.lower() != "bearer":
            return None
        return self._known.get(hashlib.sha256(key.strip().encode("utf-8", "surrogatepass")).digest())


class Tenants:
    """Names tenants. A salt is a secret and a user may be a person: their names say nothing to those who see them."""

    def __init__(self) -> None:
        self._digest = functools.lru_cache(_REMEMBERED)(functools.partial(_digest, secrets.token_bytes(16)))

    def name(self, account: Account | None, cache_salt: str, user: str) -> str:
        """Return a request's tenant: whose API key it showed, else its cache salt, else its user; else all share one.

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

    async def renew(self) -> None:
        """See :meth:`refresh`."""
        self.refresh()

    async def close(self) -> None:
        """Do nothing: no connection is open."""

    def refresh(self) -> bool:
        """Read the file again if it changed; a broken one is reported and changes nothing. Blocks for a moment."""
        stamp = self._stamp()
        if stamp == self._seen:
            return False
        self._seen = stamp
        try:
            self.accounts.replace(read_entries(self._path))
        except ConfigError as error:
            log.error("API keys stay as they were: %s", error.message)
            return False
        log.info("API keys were read again: %d tenants", len(self.accounts))
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
        ConfigError: It cannot be read, or is too short.
    """
    if not path:
        return None
    try:
        secret = Path(path).read_bytes().strip()
    except OSError as error:
        raise ConfigError(
            f"cannot read the tenants' secret {path}: {error.strerror}", field="tenant_secret_file"
        ) from error
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


def _account(entry: AccountEntry, secret: bytes, *, alone: bool) -> Account:
    key = hmac.digest(secret, _PURPOSE + entry.tenant.id.encode(), "sha256")
    return Account(
        tenant=entry.tenant,
        weight=entry.weight,
        max_in_flight=entry.max_in_flight,
        requests_per_minute=entry.requests_per_minute,
        tokens_per_minute=entry.tokens_per_minute,
        admin=entry.admin or alone,  # a tenant that is alone has nothing to be kept from
        salt_key=key,
        message=tenant_to_pb(entry.tenant),
        own_salt=salt_of(key, ""),
    )


def _digest(key: bytes, text: str) -> str:
    return hashlib.blake2s(text.encode("utf-8", "surrogatepass"), digest_size=6, key=key).hexdigest()
