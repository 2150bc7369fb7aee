"""Whose API key a request shows, and what that means: a tenant with a salt of its own, a share and limits.

Prefix caches of tenants are apart because their block hashes are: each tenant's chains begin with a salt that is an
HMAC of its id under a secret of the routers. A client's own ``cache_salt`` is mixed in and so divides a tenant's cache
further; it cannot lead into another's.

Keys and tenants are written as TOML or JSON, or just one key per line; where they come from: ``sources.py``.
"""

from __future__ import annotations

import functools
import hashlib
import hmac
import json
import re
import secrets
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from baton.config.secrets import read_secret_file
from baton.errors import ConfigError, InvalidRequestError
from baton.rpc.convert import tenant_to_pb
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
        entries: By the SHA-256 of their keys.
        secret: Of the routers: decides the salts.
    """

    def __init__(self, entries: Mapping[bytes, AccountEntry], secret: bytes) -> None:
        self._secret = secret
        self._known: dict[bytes, Account] = {}
        self._several = False
        self.replace(entries)

    @classmethod
    def of_keys(cls, *keys: str) -> Accounts:
        """Return accounts for keys, each of a tenant of its own, with a random secret."""
        return cls(entries_of_lines("\n".join(keys)), secrets.token_bytes(32))

    def __len__(self) -> int:
        return len({account.name for account in self._known.values()})

    def replace(self, entries: Mapping[bytes, AccountEntry]) -> None:
        """Take other keys; running requests go on."""
        names = {entry.tenant.id for entry in entries.values()}
        # Who is left of several is no administrator by that: this process knows what the others did.
        self._several = self._several or len(names) > 1
        accounts = {
            entry.tenant.id: _account(entry, self._secret, alone=not self._several) for entry in entries.values()
        }
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


def _account(entry: AccountEntry, secret: bytes, *, alone: bool) -> Account:
    key = hmac.digest(secret, _PURPOSE + entry.tenant.id.encode(), "sha256")
    return Account(
        tenant=entry.tenant,
        weight=entry.weight,
        max_in_flight=entry.max_in_flight,
        requests_per_minute=entry.requests_per_minute,
        tokens_per_minute=entry.tokens_per_minute,
        # A tenant that is alone has nothing to be kept from, unless its file says otherwise.
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

    A tenant is called after its key, not after its line: else to take a line out would give caches to others.

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
    """Return what is kept of a key.

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
    found = []
    for field in ("keys", "key_sha256"):
        items = values.get(field, [])
        if not isinstance(items, list) or not all(isinstance(item, str) for item in items):
            raise _wrong(f"{where}.{field} must be a list of strings")
        for item in items:
            if field == "key_sha256" and not _DIGEST.fullmatch(item.lower()):
                raise _wrong(f"{where}.key_sha256 must be 64 hex digits")
            found.append(bytes.fromhex(item) if field == "key_sha256" else key_digest(item))
    if not found:
        raise _wrong(f"{where} has no key: give keys or key_sha256")
    return found


def _wrong(message: str) -> ConfigError:
    return ConfigError(message, field=FIELD)
