"""Units of placement over the nodes of a store, in one run: calls and time of a load, balance, what a lost node costs.

    python benchmarks/store/placement.py --trace mooncake_conversation.jsonl

A unit of 1 places each block by itself, a very large one a whole chain by its first block. Times are of real nodes,
processes on this machine, over shared memory; units take turns, and medians count. Balance is of the blocks that the
trace's requests read, where its ids are taken as 32 blocks of 16 tokens; "left" is the share of a chain's blocks that
lies before the first one of a lost node, without replicas.
"""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":
    # The root, for ``tests.support``, and not this file's folder: its http.py would hide the standard library's.
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import argparse
import asyncio
import hashlib
import json
import statistics
import time
from collections import Counter
from collections.abc import Sequence

import numpy as np
from tests.support.servers.store_process import store_processes

from baton.kv_cache.arena import HostArena
from baton.kv_cache.fingerprint import Fingerprint
from baton.kv_cache.layout import KVLayout, LayerShape
from baton.kv_transfer.blocks import BlockFetcher, BlockServer
from baton.kv_transfer.connector.store.backend import ChainPart, LoadCall, SaveCall, StoreOptions, StoreUse
from baton.kv_transfer.connector.store.client import StoreClient, StoreLease
from baton.kv_transfer.connector.store.cluster import FixedMembership, Placement, StoreCluster, segments_of
from baton.types import BlockHash, BlockId, InstanceId, Tenant

LENGTHS = (8, 32, 128)
WHOLE = 1 << 20
TRACE_BLOCKS = 32


class CountingClient(StoreClient):
    """Counts what it asks."""

    calls = 0

    async def lease(
        self, hashes: Sequence[BlockHash], *, deadline: float, tenant: Tenant | None = None, traceparent: str = ""
    ) -> StoreLease | None:
        CountingClient.calls += 1
        return await super().lease(hashes, deadline=deadline, tenant=tenant, traceparent=traceparent)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--nodes", type=int, default=3)
    parser.add_argument("--units", default=f"1,8,16,32,64,{WHOLE}")
    parser.add_argument("--block-bytes", type=int, default=256 << 10)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--trace", default="", help="lines with hash_ids; default: no balance")
    args = parser.parse_args()
    units = [int(unit) for unit in args.units.split(",")]
    loads = asyncio.run(_loads(args, units))
    chains = _trace(args.trace) if args.trace else []
    rows = ["| unit | " + " | ".join(f"{n} blocks: calls, ms" for n in LENGTHS) + " | max / mean | left |"]
    rows.append("| --- " * (len(LENGTHS) + 3) + "|")
    for unit in units:
        cells = [f"{calls:.1f}, {1e3 * seconds:.2f}" for calls, seconds in loads[unit]]
        balance = f"{_balance(chains, unit, args.nodes):.2f}" if chains else "-"
        name = "chain" if unit == WHOLE else str(unit)
        rows.append(f"| {name} | {' | '.join(cells)} | {balance} | {_share_left(unit, args.nodes):.2f} |")
    sys.stdout.write("\n".join(rows) + "\n")


async def _loads(args: argparse.Namespace, units: list[int]) -> dict[int, list[tuple[float, float]]]:
    layout = KVLayout((LayerShape(1, args.block_bytes // 128, 1),), 16, "float32")
    kind = Fingerprint.of(model="bench", model_digest="d", rope="", layout=layout)
    count = max(LENGTHS)
    arena = HostArena(count, kind.block_bytes)
    arena.touch()
    server = BlockServer(arena, kind, InstanceId("bench"))
    fetcher = BlockFetcher(arena, kind)
    result: dict[int, list[tuple[float, float]]] = {}
    flags = ("--capacity-bytes", str(4 * len(units) * sum(LENGTHS) * kind.block_bytes // args.nodes + (64 << 20)))
    async with store_processes(args.nodes, *flags) as nodes:
        names = [node.address for node in nodes]

        def connect(name: str) -> StoreClient:
            return CountingClient(
                name, fingerprint=kind, fetcher=fetcher, token=None, call_timeout_s=5.0, blocks_per_call=1024
            )

        options = StoreOptions(",".join(names), hot_loads_per_s=0.0)
        clusters = {
            unit: StoreCluster(FixedMembership(names), connect, options, StoreUse(), segment_blocks=unit)
            for unit in units
        }
        ids = [BlockId(i) for i in range(count)]
        for length in LENGTHS:
            chains = {unit: _hashes(length, f"{length}-{unit}") for unit in units}
            for unit, chain in chains.items():
                part = ChainPart(chain, 0, length)
                marks = arena.generations[:length].tolist()
                await clusters[unit].save(SaveCall(server.source, part, ids[:length], marks, time.monotonic() + 60))
            seconds: dict[int, list[float]] = {unit: [] for unit in units}
            calls: dict[int, int] = {}
            for _ in range(args.rounds):
                for unit, chain in chains.items():
                    CountingClient.calls = 0
                    call = LoadCall(ChainPart(chain, 0, length), ids[:length], time.monotonic() + 60)
                    started = time.perf_counter()
                    await clusters[unit].load(call)
                    seconds[unit].append(time.perf_counter() - started)
                    calls[unit] = CountingClient.calls
                    if call.progress.num_blocks != length:
                        raise RuntimeError(f"{call.progress.num_blocks} of {length} blocks came")
            for unit in units:
                result.setdefault(unit, []).append((calls[unit], statistics.median(seconds[unit])))
        for cluster in clusters.values():
            await cluster.close()
    server.close()
    fetcher.close()
    arena.close()
    return result


def _hashes(length: int, name: str) -> list[BlockHash]:
    return [BlockHash(hashlib.sha256(f"{name}-{i}".encode()).digest()) for i in range(length)]


def _trace(path: str) -> list[list[int]]:
    with open(path, encoding="utf-8") as lines:
        return [json.loads(line)["hash_ids"] for line in lines]


def _balance(chains: list[list[int]], unit: int, num_nodes: int) -> float:
    """Blocks read from the busiest node, divided by the mean."""
    placement = Placement(f"node-{i}" for i in range(num_nodes))
    read: Counter[str] = Counter()
    known: dict[tuple[int, int], str] = {}
    for chain in chains:
        for first in range(0, len(chain) * TRACE_BLOCKS, unit):
            at = chain[first // TRACE_BLOCKS], first % TRACE_BLOCKS
            if at not in known:
                known[at] = placement.ranked(hashlib.sha256(b"%d-%d" % at).digest(), 1)[0]
            read[known[at]] += min(unit, len(chain) * TRACE_BLOCKS - first)
    return max(read.values()) * num_nodes / sum(read.values())


def _share_left(unit: int, num_nodes: int, length: int = 256, count: int = 200) -> float:
    """Share of chains of 256 blocks (4096 tokens) that is left without one of the nodes, and without replicas."""
    placement = Placement(f"node-{i}" for i in range(num_nodes))
    left = []
    for i in range(count):
        part = ChainPart(_hashes(length, f"left-{i}"), 0, length)
        lost = placement.nodes[i % num_nodes]
        segments = segments_of(part, unit)
        left.append(next((s.start for s in segments if placement.ranked(s.key, 1)[0] == lost), length) / length)
    return float(np.mean(left))


if __name__ == "__main__":
    main()
