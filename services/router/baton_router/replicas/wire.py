"""What replicas tell each other: whole numbers that replace the earlier ones, so a lost entry does no harm.

An entry of the stream carries, for each instance whose numbers changed, what the replica has in flight there *now*. A
*full* entry has all of them, and the registrations; each replica sends one every second (anti-entropy), and at once
when it begins or comes back.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import orjson

from baton.types import Role

VERSION = 1
MAX_ENTRY_BYTES = 4 * 2**20
_MAX_NAME_CHARS = 256
_MAX_COUNT = 2**53


class EntryError(ValueError):
    """An entry that cannot be read; says why."""


@dataclass(frozen=True, slots=True)
class Totals:
    """What one replica has at one instance.

    Attributes:
        requests: Sequences in flight.
        tokens: Their tokens of work.
        held: Units of the instance's capacity that are the replica's.
        wants: Units that it could use.
    """

    requests: int = 0
    tokens: int = 0
    held: int = 0
    wants: int = 0


@dataclass(frozen=True, slots=True)
class Registered:
    """An instance that registered itself with a replica."""

    address: str
    role: Role


@dataclass(frozen=True, slots=True)
class Entry:
    """One entry of the stream.

    Attributes:
        replica: Whose.
        epoch: Of its process.
        sequence: Counts the process's entries.
        totals: Per instance id.
        full: Whether instances that are not named have nothing.
        count: How many replicas it knows, itself included.
        registered: With a full entry.
        left: It goes, and has nothing any more.
    """

    replica: str
    epoch: str
    sequence: int
    totals: Mapping[str, Totals] = field(default_factory=dict)
    full: bool = False
    count: int = 1
    registered: tuple[Registered, ...] = ()
    left: bool = False


def encode(entry: Entry) -> bytes:
    """Write an entry."""
    return orjson.dumps(
        {
            "v": VERSION,
            "replica": entry.replica,
            "epoch": entry.epoch,
            "seq": entry.sequence,
            "totals": {name: [t.requests, t.tokens, t.held, t.wants] for name, t in entry.totals.items()},
            "full": entry.full,
            "count": entry.count,
            "registered": [[x.address, x.role.value] for x in entry.registered],
            "left": entry.left,
        }
    )


def decode(data: bytes) -> Entry:
    """Read an entry.

    Raises:
        EntryError: It is not one, or of another version.
    """
    if len(data) > MAX_ENTRY_BYTES:
        raise EntryError(f"{len(data)} bytes")
    try:
        value = orjson.loads(data)
        if not isinstance(value, dict) or value.get("v") != VERSION:
            raise EntryError("not of this version")
        return Entry(
            replica=_name(value["replica"]),
            epoch=_name(value["epoch"]),
            sequence=_count(value["seq"]),
            totals={_name(name): Totals(*map(_count, numbers)) for name, numbers in value["totals"].items()},
            full=value["full"] is True,
            count=max(1, _count(value["count"])),
            registered=tuple(Registered(_name(address), Role(role)) for address, role in value["registered"]),
            left=value["left"] is True,
        )
    except EntryError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise EntryError(str(error)) from error


def _name(value: Any) -> str:
    if not isinstance(value, str) or not 1 <= len(value) <= _MAX_NAME_CHARS:
        raise EntryError("a name is missing or too long")
    return value


def _count(value: Any) -> int:
    if type(value) is not int or not 0 <= value < _MAX_COUNT:
        raise EntryError(f"{value!r} is no count")
    return value
