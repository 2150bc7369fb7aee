"""Words that every part of the store shares: formats of KV, counters, and who hears of changes."""

from __future__ import annotations

import functools
import logging
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import xxhash

from baton.kv_cache.fingerprint import Fingerprint
from baton.types import BlockHash

log = logging.getLogger(__name__)

PAGE = 4096
MAX_BLOCK_BYTES = 1 << 32
"""Of a block in a tier behind memory."""
_LINE_S = 60.0


@dataclass(frozen=True, slots=True)
class KvFormat:
    """One format of KV: what tiers need to know of a fingerprint.

    Attributes:
        key: ``Fingerprint.digest()``.
        content_key: ``Fingerprint.content_key()``.
        block_bytes: Of every block.
    """

    key: bytes
    content_key: bytes
    block_bytes: int


@functools.lru_cache(maxsize=256)  # asked for several times in every call
def kv_format_of(fingerprint: Fingerprint) -> KvFormat:
    """Return what a tier behind needs to know of a kind of KV."""
    return KvFormat(fingerprint.digest(), fingerprint.content_key(), fingerprint.block_bytes)


def by_kind(blocks: Iterable[tuple[KvFormat, BlockHash]]) -> dict[KvFormat, set[BlockHash]]:
    """Sort blocks by what they are."""
    found: dict[KvFormat, set[BlockHash]] = {}
    for kind, name in blocks:
        found.setdefault(kind, set()).add(name)
    return found


def pages(num_bytes: int) -> int:
    """Round up to whole pages."""
    return -(-num_bytes // PAGE) * PAGE


def digest_of(payload: memoryview) -> bytes:
    """XXH3-128 of a block's bytes."""
    return bytes(xxhash.xxh3_128_digest(payload))


class LogLimit:
    """Lets one line of a kind into the log per minute, for what may go wrong with every block. Thread safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._lock = clock, threading.Lock()
        self._next, self._held_back = -math.inf, 0

    def due(self) -> str | None:
        """Return what to end the line with, which tells how many were held back; ``None``: this one is, too."""
        with self._lock:
            if self._clock() < self._next:
                self._held_back += 1
                return None
            before, self._held_back = self._held_back, 0
            self._next = self._clock() + _LINE_S
            return f" ({before} like it since the last line)" if before else ""


@dataclass
class Counters:
    """Since start; blocks unless a name says otherwise."""

    hits: int = 0
    misses: int = 0
    evictions: int = 0
    stored: int = 0
    expired_leases: int = 0
    expired_blocks: int = 0


@dataclass(kw_only=True)
class StoreStats(Counters):
    """A moment's view of a store; counts of blocks unless a name says otherwise."""

    capacity_bytes: int
    used_bytes: int
    backed_bytes: int
    num_blocks: int
    num_pools: int
    num_leases: int


@dataclass
class TierCounters:
    """Of the tiers, since start; blocks. ``hits`` and ``misses`` by tier."""

    hits: Counter[str] = field(default_factory=Counter)
    misses: Counter[str] = field(default_factory=Counter)
    promotions: int = 0
    demotions: int = 0
    refused: int = 0


class TierListener(Protocol):
    """Hears of changes: ``listener(kind, hashes, tier, present)``.

    What is promised, per tier:

    - A block is told as present after it can be found, and as not present after it cannot any more, in the order in
      which that happened. A tier that forgets and finds again says both.
    - A new listener is told of everything that is there first, then of changes; nothing in between is lost.
    - Of ``memory`` and ``disk`` every change is told. ``redis`` and ``object`` are shared with other nodes: told is
      what this node knows of, so a block that another node or the server dropped counts as present until a read
      misses it.

    Calls come from the event loop (``memory``) or from any thread, while the tier is locked: append to a queue and
    return. Do not wait, do not raise, and do not call the tier.
    """

    def __call__(self, kind: KvFormat, hashes: Sequence[BlockHash], tier: str, present: bool) -> None:
        """Hear that blocks of one kind came to or left a tier: ``memory``, ``disk``, ``redis`` or ``object``."""


class Listeners:
    """The listeners of one tier; the tier calls this while it is locked."""

    def __init__(self, tier: str) -> None:
        self.tier = tier
        self._listeners: list[TierListener] = []

    def __bool__(self) -> bool:
        return bool(self._listeners)

    def add(self, listener: TierListener, there: Mapping[KvFormat, Collection[BlockHash]]) -> None:
        """Tell it what is there, and everything from now on."""
        for kind, hashes in there.items():
            listener(kind, list(hashes), self.tier, True)
        self._listeners.append(listener)

    def tell(self, kind: KvFormat, hashes: Sequence[BlockHash], present: bool) -> None:
        """Tell all of them; a listener that fails is logged, and others still hear."""
        if not hashes:
            return
        for listener in self._listeners:
            try:
                listener(kind, hashes, self.tier, present)
            except Exception:
                log.exception("a listener of tier %s failed", self.tier)
