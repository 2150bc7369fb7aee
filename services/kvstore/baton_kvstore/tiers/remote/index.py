"""What one node knows of the blocks in a tier that others share; bounded: those unused for longest are forgotten."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence

from baton.types import BlockHash
from baton_kvstore.types import KvFormat, Listeners, TierListener


class RemoteIndex:
    """Blocks by kind and hash, the one used last at the end. Every method may be called from any thread.

    Args:
        tier: Its name.
        max_blocks: As many are known; about 300 bytes of memory each.
        absent_s: How long a block that was looked for in vain is not looked for again.
        clock: Monotonic seconds.
    """

    def __init__(
        self, tier: str, max_blocks: int, *, absent_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._max, self._absent_s, self._clock = max_blocks, absent_s, clock
        self._blocks: OrderedDict[bytes, KvFormat] = OrderedDict()
        self._absent: OrderedDict[bytes, float] = OrderedDict()
        self._bytes = 0
        self._mutex = threading.Lock()
        self._listeners = Listeners(tier)

    def __len__(self) -> int:
        return len(self._blocks)

    @property
    def num_bytes(self) -> int:
        """Of the blocks known, headers left out."""
        return self._bytes

    def listen(self, listener: TierListener) -> None:
        """Tell a listener what is known, and then every change."""
        with self._mutex:
            kinds: dict[KvFormat, list[BlockHash]] = {}
            for key, kind in self._blocks.items():
                kinds.setdefault(kind, []).append(BlockHash(key[len(kind.key) :]))
            for kind, names in kinds.items():
                listener(kind, names, self._listeners.tier, True)
            self._listeners.add(listener)

    def holds(self, kind: KvFormat, block_hash: BlockHash) -> bool:
        """Whether a block is known."""
        return kind.key + block_hash in self._blocks

    def add(self, kind: KvFormat, hashes: Sequence[BlockHash], *, unless: Collection[BlockHash] = ()) -> None:
        """Note blocks that are there; those of ``unless`` were deleted meanwhile."""
        with self._mutex:
            new = []
            for name in hashes:
                if name in unless:
                    continue
                key = kind.key + name
                self._absent.pop(key, None)
                if key in self._blocks:
                    self._blocks.move_to_end(key)
                else:
                    self._blocks[key] = kind
                    self._bytes += kind.block_bytes
                    new.append(name)
            self._listeners.tell(kind, new, True)
            while len(self._blocks) > self._max:
                self._forget(next(iter(self._blocks)))

    def use(self, kind: KvFormat, hashes: Sequence[BlockHash]) -> None:
        """Note that blocks were read."""
        with self._mutex:
            for name in hashes:
                if kind.key + name in self._blocks:
                    self._blocks.move_to_end(kind.key + name)

    def drop(self, kind: KvFormat, hashes: Sequence[BlockHash] | None) -> list[BlockHash]:
        """Forget blocks (``None``: all of the kind) and return those that were known."""
        with self._mutex:
            if hashes is None:
                size = len(kind.key)
                hashes = [BlockHash(key[size:]) for key, other in self._blocks.items() if other.key == kind.key]
            found = [name for name in hashes if kind.key + name in self._blocks]
            for name in found:
                self._bytes -= self._blocks.pop(kind.key + name).block_bytes
            self._listeners.tell(kind, found, False)
            return found

    def clear(self) -> None:
        """Forget every block."""
        with self._mutex:
            kinds: dict[KvFormat, list[BlockHash]] = {}
            for key, kind in self._blocks.items():
                kinds.setdefault(kind, []).append(BlockHash(key[len(kind.key) :]))
            self._blocks.clear()
            self._bytes = 0
            for kind, names in kinds.items():
                self._listeners.tell(kind, names, False)

    def coldest(self, num_bytes: int) -> tuple[KvFormat, list[BlockHash]] | None:
        """Return the blocks of one kind, unused for longest, that have so many bytes together; ``None``: none known."""
        chosen: list[BlockHash] = []
        with self._mutex:
            first = next(iter(self._blocks.values()), None)
            if first is None:
                return None
            for key, kind in self._blocks.items():
                if kind != first or len(chosen) * kind.block_bytes >= num_bytes:
                    break
                chosen.append(BlockHash(key[len(kind.key) :]))
        return first, chosen

    def unknown(self, kind: KvFormat, hashes: Sequence[BlockHash]) -> list[BlockHash]:
        """Return those that are neither known nor were looked for in vain a moment ago."""
        now = self._clock()
        with self._mutex:
            found = []
            for name in hashes:
                key = kind.key + name
                if key not in self._blocks and self._absent.get(key, now) <= now:
                    found.append(name)
            return found

    def missed(self, kind: KvFormat, hashes: Sequence[BlockHash]) -> None:
        """Note blocks that were looked for in vain."""
        until = self._clock() + self._absent_s
        with self._mutex:
            for name in hashes:
                self._absent[kind.key + name] = until
                self._absent.move_to_end(kind.key + name)
            while len(self._absent) > self._max:
                self._absent.popitem(last=False)

    def _forget(self, key: bytes) -> None:
        kind = self._blocks.pop(key)
        self._bytes -= kind.block_bytes
        self._listeners.tell(kind, [BlockHash(key[len(kind.key) :])], False)
