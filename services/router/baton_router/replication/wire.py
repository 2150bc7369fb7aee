"""What replicas publish: whole numbers that replace the earlier ones, so a lost entry does no harm.

An entry of the stream carries, for each instance whose numbers changed (tokens: by more than an eighth), what the
replica has in flight there *now*. A *full* entry has all of them, and the registrations; each replica sends one every
second (anti-entropy), and at once when it begins or comes back.

Beside these it may say which chains of blocks its requests make instances compute (:class:`ExpectedNews`). A chain is
published once under a number and named over later; full entries name all numbers that still count, so what a lost entry
said is over by the next one, and repeat as many of the newest chains as fit.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

import msgspec
from msgspec import Meta

from baton.hashing import HASH_BYTES
from baton.types import Epoch, InstanceId, Role

VERSION = 1
MAX_ENTRY_BYTES = 4 * 2**20
MAX_CHAINS = 1024
"""Chains of one replica that count at a time: a thousand requests a second, each a second from being computed."""
MAX_CHAIN_BLOCKS = 512
"""Leading blocks of a chain that are published: 8192 tokens in blocks of 16. Sharing those shares the costly part."""
LIFETIME_S = 120.0
"""Longest that a chain counts: as long as a prompt counts as cached where no events tell. Prefills take seconds."""
MAX_BYTES = 2**20
"""Of the chains of one replica that count at a time, on either side."""
_MAX_EPOCH_BYTES = 64
_FEW_TOKENS = 512

Name = Annotated[str, Meta(min_length=1, max_length=256)]
Count = Annotated[int, Meta(ge=0, lt=2**53)]
Numbers = Annotated[tuple[Count, ...], Meta(max_length=MAX_CHAINS)]


class EntryError(ValueError):
    """An entry that cannot be read; says why."""


class Totals(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What one replica has at one instance.

    Attributes:
        requests: Sequences in flight.
        tokens: Tokens of work of these sequences.
        held: Units of the instance's capacity that the replica holds.
        wants: Units that it could use.
    """

    requests: Count = 0
    tokens: Count = 0
    held: Count = 0
    wants: Count = 0

    def is_news(self, told: Totals | None) -> bool:
        """Whether the change since the last published totals is worth an entry.

        Every generated token changes ``tokens``; a change below an eighth affects no placement, and is part of the
        next full entry.
        """
        if told is None or (self.requests, self.held, self.wants) != (told.requests, told.held, told.wants):
            return True
        return abs(self.tokens - told.tokens) > max(_FEW_TOKENS, told.tokens / 8)


class Registered(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """An instance that registered itself with a replica."""

    address: Name
    role: Role


class Expected(msgspec.Struct, frozen=True):
    """A chain that an instance is expected to hold.

    Attributes:
        number: Number of the chain, unique in the replica's process.
        instance: Name of the instance.
        epoch: Id of the instance's process.
        chain: Hashes of its leading blocks, from the first one on.
    """

    number: int
    instance: InstanceId
    epoch: Epoch
    chain: bytes


class ExpectedNews(msgspec.Struct, frozen=True):
    """What is expected since the last entry, and what is not any more.

    Attributes:
        new: Chains that count from now on; in a full entry also earlier ones.
        over: Numbers of chains that do not count any more.
        live: Numbers of all chains that count, in a full entry.
    """

    new: tuple[Expected, ...] = ()
    over: tuple[int, ...] = ()
    live: tuple[int, ...] = ()


class _Header(msgspec.Struct, frozen=True, rename={"sequence": "seq"}):
    replica: Name
    epoch: Name
    sequence: Count
    totals: Mapping[Name, Totals] = {}
    full: bool = False
    count: Annotated[int, Meta(ge=1, lt=2**53)] = 1
    registered: tuple[Registered, ...] = ()
    left: bool = False


class Entry(_Header, frozen=True):
    """One entry of the stream.

    Attributes:
        replica: Name of the replica.
        epoch: Id of the replica's process.
        sequence: Number of the entry, rising in the process.
        totals: Work and units by instance id.
        full: Whether instances without an entry in ``totals`` have none.
        count: Number of replicas that it knows, itself included.
        registered: Instances that registered with it; only in a full entry.
        left: Whether the replica ends, and holds nothing any more.
        expected: Changes of its pending chains.
    """

    expected: ExpectedNews = ExpectedNews()


class _News(msgspec.Struct, frozen=True):
    """:class:`ExpectedNews` as JSON has it: a chain that several instances compute stands there once."""

    at: list[tuple[Name, str]]
    chains: list[bytes]
    new: Annotated[list[tuple[Count, Count, Count]], Meta(max_length=MAX_CHAINS)]
    over: Numbers
    live: Numbers


class _Message(_Header, frozen=True, kw_only=True):
    """:class:`Entry` as JSON has it; a replica of an earlier version has no ``expected``."""

    version: int = msgspec.field(name="v")
    expected: _News | None = None


_DECODER = msgspec.json.Decoder(_Message)


def encode(entry: Entry) -> bytes:
    fields = {**msgspec.structs.asdict(entry), "expected": _to_json(entry.expected)}
    return msgspec.json.encode(_Message(version=VERSION, **fields))


def decode(data: bytes) -> Entry:
    """Read an entry.

    Raises:
        EntryError: It is not one, or of another version.
    """
    if len(data) > MAX_ENTRY_BYTES:
        raise EntryError(f"{len(data)} bytes")
    try:
        message = _DECODER.decode(data)
        fields = msgspec.structs.asdict(message)
        if fields.pop("version") != VERSION:
            raise EntryError("not of this version")
        return Entry(**{**fields, "expected": _from_json(message.expected)})
    except EntryError:
        raise
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise EntryError(str(error)) from error


def _to_json(news: ExpectedNews) -> _News | None:
    if not (news.new or news.over or news.live):
        return None
    at = {place: number for number, place in enumerate(dict.fromkeys((x.instance, x.epoch) for x in news.new))}
    chains = {chain: number for number, chain in enumerate(dict.fromkeys(x.chain for x in news.new))}
    return _News(
        at=[(instance, epoch.hex()) for instance, epoch in at],
        chains=list(chains),
        new=[(x.number, at[x.instance, x.epoch], chains[x.chain]) for x in news.new],
        over=news.over,
        live=news.live,
    )


def _from_json(news: _News | None) -> ExpectedNews:
    if news is None:
        return ExpectedNews()
    at = [(InstanceId(instance), Epoch(bytes.fromhex(epoch))) for instance, epoch in news.at]
    for _, epoch in at:
        if not 1 <= len(epoch) <= _MAX_EPOCH_BYTES:
            raise EntryError(f"an epoch of {len(epoch)} bytes")
    for chain in news.chains:
        if len(chain) % HASH_BYTES or not 1 <= len(chain) // HASH_BYTES <= MAX_CHAIN_BLOCKS:
            raise EntryError(f"a chain of {len(chain)} bytes is no 1 to {MAX_CHAIN_BLOCKS} hashes")
    for number, place, chain_at in news.new:
        if not (place < len(at) and chain_at < len(news.chains)):
            raise EntryError(f"chain {number} names an instance or a chain that is not there")
    new = [Expected(number, *at[place], news.chains[chain_at]) for number, place, chain_at in news.new]
    return ExpectedNews(tuple(new), news.over, news.live)
