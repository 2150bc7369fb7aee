"""The file that says whose API keys these are: TOML or JSON with tenants, or just one key per line."""

from __future__ import annotations

import hashlib
import json
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from baton.errors import ConfigError, InvalidRequestError
from baton.types import Tenant

FIELD = "api_keys"
MAX_FILE_BYTES = 16 << 20
MAX_WEIGHT = 1000.0
_DIGEST = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class AccountEntry:
    """A tenant as the file has it; see ``baton_router.accounts.accounts.Account``."""

    tenant: Tenant
    weight: float = 1.0
    max_in_flight: int = 0
    requests_per_minute: int = 0
    tokens_per_minute: int = 0
    admin: bool = False


_NUMBERS = ("max_in_flight", "requests_per_minute", "tokens_per_minute")
_QUOTAS = ("kv_bytes", "kv_disk_bytes")
_NAMES = frozenset({"keys", "key_sha256", *_QUOTAS, *(f.name for f in fields(AccountEntry))} - {"tenant"})


def read_entries(path: Path) -> dict[bytes, AccountEntry]:
    """Read the tenants, by the SHA-256 of their keys.

    Raises:
        ConfigError: The file cannot be read, has no key, or makes no sense; says where.
    """
    try:
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"cannot read the API keys {path}: {error.strerror}", field=FIELD) from error
    if len(data) > MAX_FILE_BYTES:
        raise _wrong(f"{path} is longer than {MAX_FILE_BYTES} bytes")
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
    admin = values.get("admin", False)
    if not isinstance(admin, bool):
        raise _wrong(f"{where}.admin must be true or false")
    try:
        tenant = Tenant(name, *(numbers.pop(field) for field in _QUOTAS))
    except InvalidRequestError as error:
        raise _wrong(f"{where}: {error.message}") from error
    return AccountEntry(tenant, weight=float(weight), admin=admin, **numbers)


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
