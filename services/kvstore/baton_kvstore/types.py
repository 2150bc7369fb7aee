"""Types shared by all parts of the store: KV formats, counters, and listeners for block changes."""

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
"""Maximum size of a block in a lower tier."""
_LINE_S = 60.0


@dataclass(frozen=True, slots=True)
class KvFormat:
    """A KV format: the parts of a fingerprint that tiers need.

    Attributes:
        key: ``Fingerprint.digest()``.
        content_key: ``Fingerprint.content_key()``.
        block_bytes: Size of one block, in bytes.
    """

    key: bytes
    content_key: bytes
    block_bytes: int


@functools.lru_cache(maxsize=256)  # called several times per RPC
def kv_format_of(fingerprint: Fingerprint) -> KvFormat:
    """Return the KV format of a fingerprint."""
    return KvFormat(fingerprint.digest(), fingerprint.content_key(), fingerprint.block_bytes)


def by_kind(blocks: Iterable[tuple[KvFormat, BlockHash]]) -> dict[KvFormat, set[BlockHash]]:
    """Group blocks by KV format."""
    groups: dict[KvFormat, set[BlockHash]] = {}
    for kind, name in blocks:
        groups.setdefault(kind, set()).add(name)
    return groups


def pages(num_bytes: int) -> int:
    """Round up to whole pages."""
    return -(-num_bytes // PAGE) * PAGE


def digest_of(payload: memoryview) -> bytes:
    """Return the XXH3-128 digest of a block's bytes."""
    return bytes(xxhash.xxh3_128_digest(payload))


class LogLimit:
    """Limits a log message that may repeat for every block to one per minute. Thread safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._next = -math.inf
        self._num_suppressed = 0

    def due(self) -> str | None:
        """Return the suffix of a due message, with the number of suppressed ones; ``None``: suppress this one, too."""
        with self._lock:
            if self._clock() < self._next:
                self._num_suppressed += 1
                return None
            suppressed = self._num_suppressed
            self._num_suppressed = 0
            self._next = self._clock() + _LINE_S
            return f" ({suppressed} like it since the last line)" if suppressed else ""


@dataclass
class Counters:
    """Numbers of blocks since start, unless a name says otherwise."""

    hits: int = 0
    misses: int = 0
    evictions: int = 0
    stored: int = 0
    expired_leases: int = 0
    expired_blocks: int = 0


@dataclass(kw_only=True)
class StoreStats(Counters):
    """Snapshot of a store; numbers of blocks unless a name says otherwise."""

    capacity_bytes: int
    used_bytes: int
    backed_bytes: int
    num_blocks: int
    num_pools: int
    num_leases: int


@dataclass
class TierCounters:
    """Numbers of blocks since start; ``hits`` and ``misses`` by tier name."""

    hits: Counter[str] = field(default_factory=Counter)
    misses: Counter[str] = field(default_factory=Counter)
    promotions: int = 0
    demotions: int = 0
    refused: int = 0


class TierListener(Protocol):
    """Callback for block changes: ``listener(kind, hashes, tier, present)``.

    Guarantees, per tier:

    - A block is reported present after it can be found, and absent after it no longer can, in that order. A tier that
      drops a block and finds it again reports both.
    - A new listener first receives all present blocks, then the changes; none in between is lost.
    - ``memory`` and ``disk`` report every change. ``redis`` and ``object`` are shared with other nodes and report what
      this node knows: a block that another node or the server dropped counts as present until a read misses it.

    Calls come from the event loop (``memory``) or from any thread, while the tier is locked: append to a queue and
    return. Do not block, raise, or call the tier.
    """

    def __call__(self, kind: KvFormat, hashes: Sequence[BlockHash], tier: str, present: bool) -> None:
        """Handle blocks of one KV format that entered or left a tier: ``memory``, ``disk``, ``redis`` or ``object``."""


class Listeners:
    """The listeners of one tier; the tier calls the methods while it is locked."""

    def __init__(self, tier: str) -> None:
        self.tier = tier
        self._listeners: list[TierListener] = []

    def __bool__(self) -> bool:
        return bool(self._listeners)

    def add(self, listener: TierListener, present: Mapping[KvFormat, Collection[BlockHash]]) -> None:
        """Report the present blocks to a listener, and every change from now on."""
        for kind, hashes in present.items():
            listener(kind, list(hashes), self.tier, True)
        self._listeners.append(listener)

    def notify(self, kind: KvFormat, hashes: Sequence[BlockHash], present: bool) -> None:
        """Call all listeners; an exception of one is logged and does not affect the others."""
        if not hashes:
            return
        for listener in self._listeners:
            try:
                listener(kind, hashes, self.tier, present)
            except Exception:
                log.exception("a listener of tier %s failed", self.tier)
