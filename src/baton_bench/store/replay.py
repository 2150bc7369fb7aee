"""Replays traces against the store's own objects, or an engine's block pool: what does a bounded memory hold?

What is counted: a request asks the store for the chain of its prompt's blocks and is given the longest prefix that is
there, as a Get does; those blocks are hits. Then it puts what follows that prefix, as a prefill instance does. The hit
rate is the sum of all hits over the sum of all prompts' blocks. ``pool`` is an engine's block pool, ``session``
one that knows the requests' sessions.
"""

from __future__ import annotations

import argparse
import bisect
import dataclasses
import heapq
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from baton.errors import ConfigError, shown
from baton.kv_cache.block_pool import BlockPool
from baton.kv_cache.events import BlocksRemoved, KVEvent
from baton.kv_cache.fingerprint import Fingerprint
from baton.kv_cache.layout import KVLayout, LayerShape
from baton.types import BlockHash
from baton_bench.report import command_line, make_table, show_document, words
from baton_bench.traces import GENERATED, GENERATED_REQUESTS, TraceRequest, best_hit_rate, read_trace
from baton_kvstore.memory.eviction import POLICIES, Eviction, S3Fifo
from baton_kvstore.memory.pool import Entry
from baton_kvstore.memory.store import BlockStore

BELADY = "belady"
PAPER = "s3fifo-paper"
POOL = "pool"
SESSION = "session"
REPLAYED = (*POLICIES, PAPER, POOL, SESSION, BELADY)
"""The store's policies; S3-FIFO with the paper's numbers; an engine's pool, without and with sessions; the bound."""
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


def load_requests(trace: str, limit: int | None = None) -> list[TraceRequest]:
    """Read a trace, or generate one of ``GENERATED``.

    Raises:
        ConfigError: As :func:`baton_bench.traces.read_trace`.
    """
    if trace in GENERATED:
        return GENERATED[trace](limit or GENERATED_REQUESTS, 0)
    return read_trace(Path(trace), limit)


def replay(requests: Sequence[TraceRequest], policy: str, blocks: int) -> ReplayRecord:
    """Replay a trace.

    Args:
        requests: In order of arrival.
        policy: One of ``REPLAYED``.
        blocks: That fit.
    """
    chains = [request.blocks for request in requests]
    if policy in (POOL, SESSION):
        spent, hits, evictions = _replay_pool(requests, blocks, named=policy == SESSION)
    else:
        spent, hits, evictions = _Replay(chains, policy, blocks).run()
    total = sum(map(len, chains))
    best = best_hit_rate(chains)
    return ReplayRecord(
        policy=policy,
        blocks=blocks,
        hit_rate=round(hits / total, 6),
        of_best=round(hits / total / best, 6) if best else 1.0,
        evictions=evictions,
        us_per_block=round(1e6 * spent / total, 3),
    )


Counts = tuple[float, int, int]
"""Seconds, hits, evictions."""


def _replay_pool(requests: Sequence[TraceRequest], blocks: int, *, named: bool) -> Counts:
    """Replay in the pool of an engine that serves one request at a time."""
    evicted: list[int] = []
    now_s = 0.0

    def note(event: KVEvent) -> None:
        if isinstance(event, BlocksRemoved):
            evicted.append(len(event.hashes))

    pool = BlockPool(blocks, np.zeros(blocks, np.uint64), note, clock=lambda: now_s)
    names = _names(request.blocks for request in requests)
    hits = 0
    spent = 0.0
    for request in requests:
        now_s = request.at_ms / 1000
        asked = [names[block] for block in dict.fromkeys(request.blocks)]
        started = time.perf_counter()
        hits += _serve(pool, asked[:blocks], request.session.encode() if named else b"")
        spent += time.perf_counter() - started
    return spent, hits, sum(evicted)


def _serve(pool: BlockPool, asked: Sequence[BlockHash], session: bytes) -> int:
    found = pool.match(asked)
    pool.begin_turn(found, "", session)
    pool.acquire(found)
    missing = asked[len(found) :]
    new = pool.allocate(len(missing))
    assert new is not None  # nothing else is in use, and the chain fits
    parent = asked[len(found) - 1] if found else None
    for block_id, name in zip(new, missing, strict=True):
        pool.commit(block_id, name, parent, session=session)
        parent = name
    pool.release([*found, *new])
    return len(found)


def _names(chains: Iterable[Sequence[int]]) -> dict[int, BlockHash]:
    return {block: BlockHash(block.to_bytes(32, "big")) for chain in chains for block in chain}


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

    def run(self) -> Counts:
        names = _names(self._chains)
        hits = 0
        spent = 0.0
        for number, chain in enumerate(self._chains):
            self._now = number
            asked = [names[block] for block in dict.fromkeys(chain)]
            started = time.perf_counter()
            hits += self._request(asked)
            spent += time.perf_counter() - started
        evictions = self._store.counters.evictions
        self._store.close()
        return spent, hits, evictions

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
    sizes = words(args.blocks)
    unknown = sorted(set(policies) - set(REPLAYED))
    if unknown or not policies:
        raise ConfigError(f"--policy takes some of {','.join(REPLAYED)}, got {shown(args.policy)}", field="policy")
    if not sizes:
        raise ConfigError("--blocks takes sizes", field="blocks")
    if args.limit is not None and args.limit < 1:
        raise ConfigError(f"--limit must be at least 1, got {args.limit}", field="limit")
    for size in sizes:
        _size(size, 1)
    traces = []
    for trace in words(args.trace):
        requests = load_requests(trace, args.limit)
        different = len({block for request in requests for block in request.blocks})
        records = [replay(requests, policy, _size(size, different)) for size in sizes for policy in policies]
        traces.append(describe(Path(trace).name, requests, records))
    result = {"command": command_line(), "block_tokens": BLOCK_TOKENS, "traces": traces}
    show_document(result, print_replay, 160, as_json=args.json)
    return 0


def _size(text: str, different: int) -> int:
    """Return a number of blocks, given as such or in percent of a trace's different ones."""
    number, percent = text.removesuffix("%"), text.endswith("%")
    if number.isdecimal() and 1 <= int(number) <= (100 if percent else MAX_BLOCKS):
        return max(1, different * int(number) // 100) if percent else int(number)
    raise ConfigError(
        f"--blocks takes numbers from 1 to {MAX_BLOCKS}, or 1% to 100%, got {shown(text)}", field="blocks"
    )


def describe(name: str, requests: Sequence[TraceRequest], records: Sequence[ReplayRecord]) -> dict[str, Any]:
    """Return a trace and its replays as a JSON object."""
    chains = [request.blocks for request in requests]
    bound = {record.blocks: record.hit_rate for record in records if record.policy == BELADY}
    return {
        "trace": name,
        "requests": len(chains),
        "sessions": len({request.session for request in requests} - {""}),
        "blocks": sum(map(len, chains)),
        "different_blocks": len({block for chain in chains for block in chain}),
        "best_hit_rate": round(best_hit_rate(chains), 6),
        "runs": [
            dataclasses.asdict(record)
            | {"of_belady": round(record.hit_rate / bound[record.blocks], 4) if bound.get(record.blocks) else None}
            for record in records
        ],
    }


def print_replay(document: dict[str, Any], console: Console) -> None:
    """Print a document for people."""
    for trace in document["traces"]:
        console.print(
            f"{trace['trace']}: {trace['requests']:,} requests, {trace['sessions']:,} sessions, {trace['blocks']:,} "
            f"blocks of {document['block_tokens']} tokens, {trace['different_blocks']:,} different ones; best possible "
            f"hit rate {trace['best_hit_rate']:.2%}",
            markup=False,
        )
        columns = ("memory, blocks", "policy", "hits", "of best", "of belady", "evictions", "µs per block")
        table = make_table("", columns, left=("policy",))
        for run in trace["runs"]:
            table.add_row(
                f"{run['blocks']:,}",
                run["policy"],
                f"{run['hit_rate']:.2%}",
                f"{run['of_best']:.1%}",
                "" if run["of_belady"] is None else f"{run['of_belady']:.1%}",
                f"{run['evictions']:,}",
                f"{run['us_per_block']:.1f}",
            )
        console.print(table)
