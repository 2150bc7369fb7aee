"""Replays a trace against the store's own objects: which share of the blocks does a bounded memory hold?

What is counted: a request asks the store for the chain of its prompt's blocks and is given the longest prefix that is
there, as a Get does; those blocks are hits. Then it puts what follows that prefix, as a prefill instance does. The hit
rate is the sum of all hits over the sum of all prompts' blocks.
"""

from __future__ import annotations

import argparse
import bisect
import dataclasses
import heapq
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from baton.errors import ConfigError, shown
from baton.kv_cache.fingerprint import Fingerprint
from baton.kv_cache.layout import KVLayout, LayerShape
from baton.types import BlockHash
from baton_bench.report import command_line, make_table, numbers, show_document, words
from baton_bench.traces import best_hit_rate, read_lines, whole_numbers
from baton_kvstore.memory.eviction import POLICIES, Eviction, S3Fifo
from baton_kvstore.memory.pool import Entry
from baton_kvstore.memory.store import BlockStore

BELADY = "belady"
PAPER = "s3fifo-paper"
REPLAYED = (*POLICIES, PAPER, BELADY)
"""The store's policies; S3-FIFO with the paper's numbers; the bound."""
BLOCK_TOKENS = 512
MAX_BLOCKS = 1 << 24
_BLOCK_BYTES = 64
"""Bytes of a block in the replay; their value does not matter."""
_NEVER = 1 << 62
"""Times that a replay has the store check its books."""

Chains = Sequence[Sequence[int]]


@dataclass(frozen=True)
class ReplayRecord:
    """One policy at one size.

    Attributes:
        policy: One of ``REPLAYED``.
        blocks: That fit.
        hit_rate: Hits / all blocks.
        of_best: Hits / hits of a store with endless memory.
        evictions: Blocks that had to go.
        us_per_block: Time of the store's own work per block of the trace: looked up, leased, released, put.
    """

    policy: str
    blocks: int
    hit_rate: float
    of_best: float
    evictions: int
    us_per_block: float


def read_chains(path: Path, limit: int | None = None) -> list[list[int]]:
    """Read the ``hash_ids`` of a trace in Mooncake's format, in the order of its lines.

    Raises:
        ConfigError: The file cannot be read, or a line has no such numbers; names the line.
    """
    chains = [
        list(whole_numbers(value.get("hash_ids") or None, f"{where}: hash_ids", "trace"))
        for where, value in read_lines(path, limit)
    ]
    if not chains:
        raise ConfigError(f"{path} has no request", field="trace")
    return chains


def replay(chains: Chains, policy: str, blocks: int) -> ReplayRecord:
    """Replay a trace.

    Args:
        chains: Per request, names of its prompt's blocks.
        policy: One of ``REPLAYED``.
        blocks: That fit.
    """
    return _Replay(chains, policy, blocks).run()


Need = tuple[int, int]
"""Time at which a block is needed next, and its index in its chain; the largest is evicted first."""


class Clairvoyant(Eviction):
    """Evicts what is needed last; of blocks needed at the same time those at a chain's end. Logarithmic time.

    Args:
        next_need: Returns the next time at which a block is needed, as of now.
    """

    def __init__(self, next_need: Callable[[Entry], Need]) -> None:
        self._next_need = next_need
        self._needs: dict[Entry, Need] = {}
        self._heap: list[tuple[int, int, int, Entry]] = []
        self._count = 0
        self.saved_bytes = 0

    def __len__(self) -> int:
        return len(self._needs)

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._needs)

    def __contains__(self, entry: Entry) -> bool:
        return entry in self._needs

    @property
    def unsaved(self) -> Collection[Entry]:
        """All of them: a replay has no tier behind."""
        return self._needs.keys()

    @property
    def in_order(self) -> bool:
        return True

    def unpin(self, entry: Entry, *, used: bool) -> None:
        need = self._needs[entry] = self._next_need(entry)
        self._count += 1
        heapq.heappush(self._heap, (-need[0], -need[1], self._count, entry))

    def touch(self, entry: Entry) -> None:
        """Past uses do not matter."""

    def recheck(self, count: int, still: Callable[[Entry], bool]) -> None:
        """There is no tier behind."""

    def discard(self, entry: Entry) -> None:
        """Take an entry out, if it is in."""
        self._needs.pop(entry, None)

    def last(self) -> Need | None:
        """Return when the entry that would be evicted next is needed."""
        self._tidy()
        return (-self._heap[0][0], -self._heap[0][1]) if self._heap else None

    def pop(self) -> Entry | None:
        """Take out what is needed last."""
        self._tidy()
        if not self._heap:
            return None
        entry = heapq.heappop(self._heap)[3]
        del self._needs[entry]
        return entry

    def _tidy(self) -> None:
        """Drop entries that were removed or unpinned again since they were pushed."""
        heap = self._heap
        needs = self._needs
        while heap and needs.get(heap[0][3]) != (-heap[0][0], -heap[0][1]):
            heapq.heappop(heap)


class _Replay:
    def __init__(self, chains: Chains, policy: str, blocks: int) -> None:
        layout = KVLayout((LayerShape(1, 1, 1),), BLOCK_TOKENS, "float32")
        kind = Fingerprint.of(model="replay", model_digest="replay", rope="", layout=layout)
        self._kind = dataclasses.replace(kind, block_bytes=_BLOCK_BYTES)
        self._chains = chains
        self._policy = policy
        self._blocks = blocks
        real = policy if policy in POLICIES else "lru"
        self._store = BlockStore(blocks * _BLOCK_BYTES, max_pools=1, max_leases=1, clock=time.monotonic, eviction=real)
        self._now = 0
        self._future: _Future | None = None
        if policy == BELADY:
            self._future = _Future(chains)
            self._store.eviction = self._oracle = Clairvoyant(self._need)
        if policy == PAPER:
            self._store.eviction = S3Fifo(small_share=0.1, uses=2)

    def run(self) -> ReplayRecord:
        names = {block: BlockHash(block.to_bytes(32, "big")) for chain in self._chains for block in chain}
        hits = total = 0
        spent = 0.0
        for number, chain in enumerate(self._chains):
            self._now = number
            total += len(chain)
            asked = [names[block] for block in dict.fromkeys(chain)]
            started = time.perf_counter()
            hits += self._request(asked)
            spent += time.perf_counter() - started
        evictions = self._store.counters.evictions
        self._store.close()
        best = best_hit_rate(self._chains)
        return ReplayRecord(
            policy=self._policy,
            blocks=self._blocks,
            hit_rate=round(hits / total, 6),
            of_best=round(hits / total / best, 6) if best else 1.0,
            evictions=evictions,
            us_per_block=round(1e6 * spent / total, 3),
        )

    def _request(self, names: list[BlockHash]) -> int:
        store = self._store
        lease = store.lease(self._kind, names, 60.0)
        result = 0
        if lease is not None:
            result = len(lease.entries)
            store.release(lease.lease_id)
        if self._future is not None:
            self._put_worthy(names[result:], self._future)
        elif names[result:]:
            self._put_blocks(names[result:])
        return result

    def _put_blocks(self, names: list[BlockHash]) -> None:
        reservation = self._store.reserve(self._kind, names)
        self._store.commit(reservation, [True] * len(reservation.missing))

    def _put_worthy(self, names: list[BlockHash], future: _Future) -> None:
        """Put block by block those that are needed before what would have to go; nothing forces a bound to store."""
        for name in names:
            need = future.need(name, self._now)
            last = self._oracle.last()
            full = self._store.num_blocks >= self._blocks
            if need[0] == _NEVER or (full and (last is None or need >= last)):
                return
            self._put_blocks([name])

    def _need(self, entry: Entry) -> Need:
        assert self._future is not None
        return self._future.need(entry.block_hash, self._now)


class _Future:
    """The times at which each block is needed, and its index in its chain."""

    def __init__(self, chains: Chains) -> None:
        self._needs: dict[bytes, list[int]] = {}
        self._depth: dict[bytes, int] = {}
        for number, chain in enumerate(chains):
            for depth, block in enumerate(dict.fromkeys(chain)):
                name = block.to_bytes(32, "big")
                self._needs.setdefault(name, []).append(number)
                self._depth.setdefault(name, depth)

    def need(self, name: BlockHash, now: int) -> Need:
        """Return when a block is needed next after request ``now``."""
        needs = self._needs[name]
        at = bisect.bisect_right(needs, now)
        return needs[at] if at < len(needs) else _NEVER, self._depth[name]


def replay_all(args: argparse.Namespace) -> int:
    """Replay and show, see :func:`show_document`; returns the exit status.

    Raises:
        ConfigError: A flag or a file that cannot work.
    """
    policies = words(args.policy)
    sizes = numbers(args.blocks, "blocks")
    unknown = sorted(set(policies) - set(REPLAYED))
    if unknown or not policies:
        raise ConfigError(f"--policy takes some of {','.join(REPLAYED)}, got {shown(args.policy)}", field="policy")
    if not sizes or not all(1 <= size <= MAX_BLOCKS for size in sizes):
        raise ConfigError(f"--blocks takes numbers from 1 to {MAX_BLOCKS}", field="blocks")
    if args.limit is not None and args.limit < 1:
        raise ConfigError(f"--limit must be at least 1, got {args.limit}", field="limit")
    chains = read_chains(Path(args.trace), args.limit)
    records = [replay(chains, policy, size) for size in sizes for policy in policies]
    result = document(Path(args.trace).name, chains, records)
    show_document(result, print_replay, 160, as_json=args.json)
    return 0


def document(name: str, chains: Chains, records: Sequence[ReplayRecord]) -> dict[str, Any]:
    """Return everything as one JSON object."""
    return {
        "command": command_line(),
        "trace": name,
        "block_tokens": BLOCK_TOKENS,
        "requests": len(chains),
        "blocks": sum(map(len, chains)),
        "different_blocks": len({block for chain in chains for block in chain}),
        "best_hit_rate": round(best_hit_rate(chains), 6),
        "runs": [dataclasses.asdict(record) for record in records],
    }


def print_replay(document: dict[str, Any], console: Console) -> None:
    """Print a document for people."""
    console.print(
        f"{document['requests']:,} requests, {document['blocks']:,} blocks of {document['block_tokens']} tokens, "
        f"{document['different_blocks']:,} different ones; best possible hit rate {document['best_hit_rate']:.2%}",
        markup=False,
    )
    columns = ("memory, blocks", "policy", "hits", "of best", "evictions", "µs per block")
    table = make_table("", columns, left=("policy",))
    for run in document["runs"]:
        table.add_row(
            f"{run['blocks']:,}",
            run["policy"],
            f"{run['hit_rate']:.2%}",
            f"{run['of_best']:.1%}",
            f"{run['evictions']:,}",
            f"{run['us_per_block']:.1f}",
        )
    console.print(table)
