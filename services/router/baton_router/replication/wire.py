"""What replicas tell each other: whole numbers that replace the earlier ones, so a lost entry does no harm.

An entry of the stream carries, for each instance whose numbers changed, what the replica has in flight there *now*. A
*full* entry has all of them, and the registrations; each replica sends one every second (anti-entropy), and at once
when it begins or comes back.

Beside these it may tell which chains of blocks its requests make instances compute (:class:`ExpectedNews`). A chain is
told once under a number and named over later; full entries name all numbers that still count, so what a lost entry
said is over by the next one, and repeat as many of the newest chains as fit.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import orjson

from baton.hashing import HASH_BYTES
from baton.types import Epoch, InstanceId, Role

VERSION = 1
MAX_ENTRY_BYTES = 4 * 2**20
_MAX_NAME_CHARS = 256
_MAX_COUNT = 2**53
MAX_CHAINS = 1024
"""Chains of one replica that count at a time: a thousand requests a second, each a second from being computed."""
MAX_CHAIN_BLOCKS = 512
"""Leading blocks of a chain that are told: 8192 tokens in blocks of 16. Who shares those shares the costly part."""
LIFETIME_S = 120.0
"""Longest that a chain counts: as long as a prompt counts as cached where no events tell. Prefills take seconds."""
MAX_BYTES = 2**20
"""Of the chains of one replica that count at a time, on either side."""
_MAX_EPOCH_BYTES = 64


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
class Expected:
    """A chain that an instance is expected to hold.

    Attributes:
        number: Its name among those of the replica's process; never used twice.
        instance, epoch: Whose process.
        chain: The hashes of its leading blocks, from the first one on.
    """

    number: int
    instance: InstanceId
    epoch: Epoch
    chain: bytes


@dataclass(frozen=True, slots=True)
class ExpectedNews:
    """What is expected since the last entry, and what is not any more.

    Attributes:
        new: Chains; of a full entry also such as were told before.
        over: Numbers.
        live: Of a full entry: the numbers of all that count.
    """

    new: tuple[Expected, ...] = ()
    over: tuple[int, ...] = ()
    live: tuple[int, ...] = ()


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
        expected: Blocks that are not computed yet.
    """

    replica: str
    epoch: str
    sequence: int
    totals: Mapping[str, Totals] = field(default_factory=dict)
    full: bool = False
    count: int = 1
    registered: tuple[Registered, ...] = ()
    left: bool = False
    expected: ExpectedNews = ExpectedNews()


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
            "expected": _expected_json(entry.expected),
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
            expected=_expected(value.get("expected")),
        )
    except EntryError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise EntryError(str(error)) from error


def _expected_json(news: ExpectedNews) -> dict[str, Any] | None:
    """Return the news as JSON has them: a chain that several instances compute stands there once."""
    if not (news.new or news.over or news.live):
        return None
    at = {place: number for number, place in enumerate(dict.fromkeys((x.instance, x.epoch) for x in news.new))}
    chains = {chain: number for number, chain in enumerate(dict.fromkeys(x.chain for x in news.new))}
    return {
        "at": [[instance, epoch.hex()] for instance, epoch in at],
        "chains": [base64.b64encode(chain).decode() for chain in chains],
        "new": [[x.number, at[x.instance, x.epoch], chains[x.chain]] for x in news.new],
        "over": news.over,
        "live": news.live,
    }


def _expected(value: Any) -> ExpectedNews:
    """Read the news; a replica of an earlier version has none."""
    if value is None:
        return ExpectedNews()
    at = [(InstanceId(_name(instance)), _epoch(epoch)) for instance, epoch in value["at"]]
    chains = [_chain(text) for text in value["chains"]]
    new = []
    for number, place, chain in value["new"]:
        if not (_count(place) < len(at) and _count(chain) < len(chains)):
            raise EntryError(f"chain {number!r} names an instance or a chain that is not there")
        instance, epoch = at[place]
        new.append(Expected(_count(number), instance, epoch, chains[chain]))
    over, live = tuple(map(_count, value["over"])), tuple(map(_count, value["live"]))
    if max(len(new), len(over), len(live)) > MAX_CHAINS:
        raise EntryError(f"{max(len(new), len(over), len(live))} chains at a time, {MAX_CHAINS} are possible")
    return ExpectedNews(tuple(new), over, live)


def _epoch(value: Any) -> Epoch:
    epoch = bytes.fromhex(value)
    if not 1 <= len(epoch) <= _MAX_EPOCH_BYTES:
        raise EntryError(f"an epoch of {len(epoch)} bytes")
    return Epoch(epoch)


def _chain(value: Any) -> bytes:
    chain = base64.b64decode(value, validate=True)
    if len(chain) % HASH_BYTES or not 1 <= len(chain) // HASH_BYTES <= MAX_CHAIN_BLOCKS:
        raise EntryError(f"a chain of {len(chain)} bytes is no 1 to {MAX_CHAIN_BLOCKS} hashes")
    return chain


def _name(value: Any) -> str:
    if not isinstance(value, str) or not 1 <= len(value) <= _MAX_NAME_CHARS:
        raise EntryError("a name is missing or too long")
    return value


def _count(value: Any) -> int:
    if type(value) is not int or not 0 <= value < _MAX_COUNT:
        raise EntryError(f"{value!r} is no count")
    return value
