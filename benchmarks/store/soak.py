"""A week's worth of a KV store's operations: memory is flat, slots and bytes add up, every byte read is the right one.

    python benchmarks/store/soak.py                                   # 10 million operations, with each eviction policy
    python benchmarks/store/soak.py --operations 100000 --service-operations 2000

The greater part goes through the store's own objects in this process: puts in two phases (some of which fail), leases,
releases, expiry, look-ups, deletions, kinds of KV that come and go. A smaller part goes through the whole service:
gRPC, pulls from a pool, reads into it, a disk tier behind a memory that is too small. An operation is one call.

What is checked: the bytes of every block that is leased, when it is leased and when it is released; at intervals the
store's books (``check_store``) and the bytes of every block that can be found. Memory is compared between the
first and the last fifth of each part, after a warm-up. Exit status 1 if it grew by more than ``--max-growth`` percent.
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
import random
import statistics
import tempfile
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import psutil
from tests.support.transport.store_check import check_store

from baton.api.v1 import kvstore_pb2, kvstore_pb2_grpc
from baton.config.kvstore import KVStoreConfig
from baton.errors import InternalError, QueueFullError
from baton.kv_cache.arena import HostArena
from baton.kv_cache.fingerprint import Fingerprint
from baton.kv_cache.layout import KVLayout, LayerShape
from baton.kv_transfer.blocks import BlockFetcher, BlockServer
from baton.kv_transfer.connector.store.client import StoreClient
from baton.kv_transfer.types import Bytes
from baton.rpc.channel import open_channel
from baton.rpc.convert import fingerprint_to_pb
from baton.types import BlockHash, BlockId, InstanceId
from baton_kvstore.memory.eviction import POLICIES
from baton_kvstore.memory.leases import Lease
from baton_kvstore.memory.store import BlockStore
from baton_kvstore.server import KVStoreServer

RESULT = Path(__file__).parents[1] / "results" / "store" / "store-soak.json"
SAMPLES = 100
"""Times per part that everything is added up."""
WARM_UP = 0.3
"""Share of a part before its memory is looked at: tables, files and threads have the size they stay at by then."""
CHAIN = 4
CHAINS = 5000
SLOTS = 4000
"""Of the smallest blocks that fit; there are five times as many different ones of each kind."""
BLOCK_BYTES = (512, 1024, 4096)
MAX_LEASES = 64
OPERATIONS = (("get", 40), ("release", 32), ("put", 20), ("contains", 5), ("delete", 2), ("expire", 1))
SERVICE_OPERATIONS = (("get", 45), ("put", 35), ("contains", 12), ("delete", 5), ("expire", 3))
WORKERS = 4
CALL_S = 60.0


@dataclass
class Part:
    """What a part of the soak found. Times in seconds, memory in bytes.

    Attributes:
        name: Name of the part.
        operations: Done.
        seconds: Seconds that it took.
        counts: Operations by kind, and what happened.
        memory: Resident memory, at equal distances, after the warm-up.
        checks: Times that everything was added up.
        compared: Blocks whose bytes were compared.
    """

    name: str
    operations: int = 0
    seconds: float = 0.0
    counts: Counter[str] = field(default_factory=Counter)
    memory: list[int] = field(default_factory=list)
    checks: int = 0
    compared: int = 0

    def look(self, process: psutil.Process, operations: int) -> None:
        """Note the memory, unless this part of so many operations is still warming up."""
        if self.operations > WARM_UP * operations:
            self.memory.append(process.memory_info().rss)

    @property
    def growth_percent(self) -> float:
        """By how much the median of the last fifth is above that of the first."""
        fifth = max(1, len(self.memory) // 5)
        first = statistics.median(self.memory[:fifth])
        last = statistics.median(self.memory[-fifth:])
        return round(100 * (last / first - 1), 2)

    def to_fields(self) -> dict[str, Any]:
        fifth = max(1, len(self.memory) // 5)
        return {
            "part": self.name,
            "operations": self.operations,
            "seconds": round(self.seconds, 1),
            "per_s": round(self.operations / self.seconds),
            "counts": dict(sorted(self.counts.items())),
            "rss_mib_first_fifth": round(statistics.median(self.memory[:fifth]) / 2**20, 1),
            "rss_mib_last_fifth": round(statistics.median(self.memory[-fifth:]) / 2**20, 1),
            "growth_percent": self.growth_percent,
            "checks": self.checks,
            "blocks_compared": self.compared,
        }


def kv_format_of(block_bytes: int) -> Fingerprint:
    """Return a kind of KV with blocks of a size."""
    layout = KVLayout((LayerShape(1, block_bytes // 128, block_bytes // 128),), 16, "float32")
    return Fingerprint.of(model="soak", model_digest="soak", rope="", layout=layout)


def chain_names(chain: int) -> list[BlockHash]:
    """Return the names of a chain."""
    return [BlockHash(hashlib.sha256(b"%d/%d" % (chain, i)).digest()) for i in range(CHAIN)]


def content(kind: Fingerprint, name: BlockHash) -> Bytes:
    """Return what is in a block: its name, over and over; the kind's size keeps equal names of two kinds apart."""
    seed = hashlib.sha256(kind.block_bytes.to_bytes(8, "little") + name).digest()
    return np.resize(np.frombuffer(seed, np.uint8), kind.block_bytes)


class Model:
    """What every block must contain; made when it is first asked for."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, BlockHash], bytes] = {}

    def seed(self, kind: Fingerprint, name: BlockHash) -> bytes:
        """Return the first 32 bytes of a block."""
        key = (kind.block_bytes, name)
        if key not in self._known:
            self._known[key] = content(kind, name)[:32].tobytes()
        return self._known[key]

    def write(self, kind: Fingerprint, name: BlockHash, block: Bytes) -> None:
        block.reshape(-1, 32)[:] = np.frombuffer(self.seed(kind, name), np.uint8)

    def compare(self, kind: Fingerprint, name: BlockHash, block: Bytes) -> None:
        """Raise ``InternalError`` unless every byte of a block is right."""
        if block.tobytes() != self.seed(kind, name) * (kind.block_bytes // 32):
            raise InternalError(f"block {name.hex()} has wrong bytes")


class Objects:
    """The part that goes through the store's objects.

    Args:
        eviction: Name of the policy.
        seed: Seed of all random choices.
    """

    def __init__(self, eviction: str, seed: int) -> None:
        self.part = Part(f"objects, {eviction}")
        self._rng = random.Random(seed)
        self._now = 0.0
        self._model = Model()
        self._kinds = [kv_format_of(size) for size in BLOCK_BYTES]
        self._chains = [chain_names(chain) for chain in range(CHAINS)]
        self._leases: deque[tuple[Fingerprint, Lease]] = deque()
        self.store = BlockStore(
            SLOTS * BLOCK_BYTES[0],
            max_pools=len(BLOCK_BYTES) - 1,
            max_leases=MAX_LEASES,
            clock=lambda: self._now,
            eviction=eviction,
        )
        self._do: dict[str, Callable[[Fingerprint, list[BlockHash]], None]] = {
            "get": self._get,
            "put": self._put_blocks,
            "contains": self._contains,
            "delete": self._delete,
        }

    def run(self, operations: int) -> Part:
        """Do so many operations and everything that is to be checked."""
        part = self.part
        rng = self._rng
        names, weights = zip(*OPERATIONS, strict=True)
        every = max(1, operations // SAMPLES)
        process = psutil.Process()
        started = time.perf_counter()
        while part.operations < operations:
            for name in rng.choices(names, weights, k=min(every, operations - part.operations)):
                part.operations += 1
                part.counts[name] += 1
                self._now += 0.001
                if name == "release":
                    self._release()
                elif name == "expire":
                    self._now += 2.0
                    self.store.expire()
                else:
                    self._do[name](self._pick_kind(), self._pick_chain())
            self.check()
            part.look(process, operations)
        part.seconds = time.perf_counter() - started
        self._end()
        return part

    def check(self) -> None:
        """Add everything up, and compare all blocks that can be found."""
        check_store(self.store)
        for pool in self.store.pools:
            for name, entry in pool.index.items():
                self._model.compare(pool.fingerprint, name, pool.arena.blocks[entry.slot])
            self.part.compared += len(pool.index)
        self.part.checks += 1

    def _pick_kind(self) -> Fingerprint:
        """Return a kind; the third of three drives out another one, which takes time, and is rare."""
        chance = self._rng.random()
        return self._kinds[0 if chance < 0.7 else 1 if chance < 0.9995 else 2]

    def _pick_chain(self) -> list[BlockHash]:
        """Return a chain, or its beginning; some are asked for often."""
        rng = self._rng
        chain = rng.randrange(CHAINS // 10) if rng.random() < 0.7 else rng.randrange(CHAINS)
        return self._chains[chain][: rng.randint(1, CHAIN)]

    def _get(self, kind: Fingerprint, names: list[BlockHash]) -> None:
        try:
            lease = self.store.lease(kind, names, self._rng.uniform(0.05, 5.0))
        except QueueFullError:
            self.part.counts["refused"] += 1
            return
        if lease is None:
            self.part.counts["missed"] += 1
            return
        self._compare(kind, lease)
        self._leases.append((kind, lease))
        if len(self._leases) > MAX_LEASES:
            self._leases.popleft()  # its client is gone: it runs out

    def _release(self) -> None:
        if not self._leases:
            return
        self._leases.rotate(self._rng.randrange(len(self._leases)))
        kind, lease = self._leases.popleft()
        if lease.expires_at > self._now:
            self._compare(kind, lease)
        alive = self.store.release(lease.lease_id)
        self.part.counts["ran out" if not alive else "given back"] += 1

    def _put_blocks(self, kind: Fingerprint, names: list[BlockHash]) -> None:
        try:
            reservation = self.store.reserve(kind, names)
        except QueueFullError:
            self.part.counts["refused"] += 1
            return
        arrived = []
        for i, slot in zip(reservation.missing, reservation.slots, strict=True):
            self._model.write(kind, names[i], reservation.pool.arena.blocks[slot])
            arrived.append(self._rng.random() > 0.01)
        self.store.commit(reservation, arrived)
        self.part.counts["blocks stored"] += sum(arrived)

    def _contains(self, kind: Fingerprint, names: list[BlockHash]) -> None:
        self.part.counts["blocks found"] += self.store.contains(kind, names)

    def _delete(self, kind: Fingerprint, names: list[BlockHash]) -> None:
        self.part.counts["blocks deleted"] += self.store.delete(kind, names)

    def _compare(self, kind: Fingerprint, lease: Lease) -> None:
        for entry in lease.entries:
            self._model.compare(kind, entry.block_hash, entry.pool.arena.blocks[entry.slot])
        self.part.compared += len(lease.entries)

    def _end(self) -> None:
        """Nothing is left when everything was given back and deleted."""
        self._now += 100.0
        self.store.expire()
        self.check()
        for kind in self._kinds:
            self.store.delete(kind, None)
        if self.store.used_bytes or self.store.num_blocks or len(self.store.leases):
            raise InternalError("something is left in an empty store")
        self.part.counts["evictions"] = self.store.counters.evictions
        self.store.close()


class Service:
    """The part that goes through the whole service, with a disk tier behind a memory that is too small.

    Args:
        folder: For the disk tier.
        seed: Seed of all random choices.
    """

    def __init__(self, folder: Path, seed: int) -> None:
        self.part = Part("service")
        self._rng = random.Random(seed)
        self._model = Model()
        self._folder = folder
        self._kind = kv_format_of(BLOCK_BYTES[-1])
        self._chains = [chain_names(chain) for chain in range(CHAINS // 10)]
        self._arena = HostArena(2 * WORKERS * CHAIN, self._kind.block_bytes)

    async def run(self, operations: int) -> Part:
        """Do so many operations and everything that is to be checked."""
        whole = len(self._chains) * CHAIN * self._kind.block_bytes
        config = KVStoreConfig(
            capacity_bytes=whole // 4,
            disk_path=str(self._folder / "kv"),
            disk_bytes=max(1 << 20, whole),  # with their headers, half of the blocks
            disk_segment_bytes=1 << 20,
            default_lease_s=0.2,
        )
        server = KVStoreServer(config)
        await server.start()
        source = BlockServer(self._arena, self._kind, InstanceId("soak"))
        fetcher = BlockFetcher(self._arena, self._kind, max_threads=WORKERS)
        client = StoreClient(
            server.address,
            fingerprint=self._kind,
            fetcher=fetcher,
            token=None,
            call_timeout_s=CALL_S,
            blocks_per_call=CHAIN,
        )
        channel = open_channel(server.address)
        stub = kvstore_pb2_grpc.KvStoreServiceStub(channel)
        try:
            await self._work(operations, server, _Caller(self, client, stub, source))
            await stub.Delete(
                kvstore_pb2.DeleteRequest(fingerprint=fingerprint_to_pb(self._kind), all=True), timeout=CALL_S
            )
            check_store(server.store)
        finally:
            await client.close()
            await channel.close(None)
            source.close()
            fetcher.close()
            await server.stop()
            self._arena.close()
        if server.store.used_bytes or server.store.num_blocks:
            raise InternalError("something is left in a closed store")
        return self.part

    async def _work(self, operations: int, server: KVStoreServer, caller: _Caller) -> None:
        part = self.part
        every = max(WORKERS, operations // SAMPLES)
        names, weights = zip(*SERVICE_OPERATIONS, strict=True)
        process = psutil.Process()
        started = time.perf_counter()

        async def worker(number: int, count: int) -> None:
            for name in self._rng.choices(names, weights, k=count):
                part.operations += 1
                part.counts[name] += 1
                chain = self._chains[self._rng.randrange(len(self._chains))][: self._rng.randint(1, CHAIN)]
                await caller.run_operation(name, chain, number)

        while part.operations < operations:
            left = operations - part.operations
            shares = [min(every, left) // WORKERS + (i < min(every, left) % WORKERS) for i in range(WORKERS)]
            await asyncio.gather(*(worker(number, count) for number, count in enumerate(shares)))
            check_store(server.store)
            part.checks += 1
            part.look(process, operations)
        part.seconds = time.perf_counter() - started

    def fill(self, names: list[BlockHash], first: int) -> None:
        """Write a chain into the pool."""
        for i, name in enumerate(names):
            self._model.write(self._kind, name, self._arena.blocks[first + i])

    def compare(self, names: list[BlockHash], first: int) -> None:
        """Compare what was loaded into the pool."""
        for i, name in enumerate(names):
            self._model.compare(self._kind, name, self._arena.blocks[first + i])
        self.part.compared += len(names)

    def generations(self, ids: list[BlockId]) -> list[int]:
        return [int(value) for value in self._arena.generations[ids]]


class _Caller:
    """One call of each kind; a worker has places of its own in the pool, to load into and to put from."""

    def __init__(self, service: Service, client: StoreClient, stub: Any, source: BlockServer) -> None:
        self._service = service
        self._client = client
        self._stub = stub
        self._source = source
        self._kind = fingerprint_to_pb(service._kind)

    async def run_operation(self, name: str, names: list[BlockHash], worker: int) -> None:
        part = self._service.part
        first = 2 * CHAIN * worker
        deadline = time.monotonic() + CALL_S
        try:
            if name == "put":
                self._service.fill(names, first)
                ids = [BlockId(first + i) for i in range(len(names))]
                stored, _ = await self._client.put_blocks(
                    self._source.source, names, ids, self._service.generations(ids), deadline=deadline
                )
                part.counts["blocks stored"] += sum(stored)
            elif name == "get":
                await self._get(names, first + CHAIN, deadline)
            elif name == "expire":  # this lease is never given back
                wanted = kvstore_pb2.GetRequest(fingerprint=self._kind, block_hashes=names, lease_ms=200)
                await self._stub.Get(wanted, timeout=CALL_S)
            elif name == "contains":
                asked = kvstore_pb2.ContainsRequest(fingerprint=self._kind, block_hashes=names)
                part.counts["blocks found"] += (await self._stub.Contains(asked, timeout=CALL_S)).num_blocks
            else:
                order = kvstore_pb2.DeleteRequest(fingerprint=self._kind, block_hashes=names[-1:])
                part.counts["blocks deleted"] += (await self._stub.Delete(order, timeout=CALL_S)).num_deleted
        except QueueFullError:
            part.counts["refused"] += 1

    async def _get(self, names: list[BlockHash], first: int, deadline: float) -> None:
        lease = await self._client.lease(names, deadline=deadline)
        if lease is None:
            self._service.part.counts["missed"] += 1
            return
        ids = [BlockId(first + i) for i in range(len(lease))]
        result = await self._client.fetch(lease, ids, deadline=deadline, cancelled=threading.Event())
        if not result.valid.all():
            raise InternalError("a leased block was not valid")
        self._client.release(lease)
        self._service.compare(names[: len(lease)], first)


def soak(operations: int, service_operations: int, seed: int, folder: Path) -> list[Part]:
    """Run all parts: the store's objects with every eviction policy, and the service."""
    share = operations - service_operations
    parts = [Objects(name, seed).run(share // len(POLICIES)) for name in POLICIES]
    if service_operations:
        parts.append(asyncio.run(Service(folder, seed).run(service_operations)))
    return parts


def main() -> int:
    """Run, print, and say whether memory was flat."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--operations", type=int, default=10_000_000, help="all together")
    parser.add_argument("--service-operations", type=int, default=60_000, help="of them through the service")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dir", default="/var/tmp", help="for the disk tier")
    parser.add_argument("--max-growth", type=float, default=5.0, help="percent of memory")
    parser.add_argument("--write", action="store_true", help=f"write {RESULT.name}")
    args = parser.parse_args()
    started = time.perf_counter()
    with tempfile.TemporaryDirectory(dir=args.dir) as folder:
        parts = soak(args.operations, args.service_operations, args.seed, Path(folder))
    result = {
        "command": f"benchmarks/store/soak.py --operations {args.operations} "
        f"--service-operations {args.service_operations} --seed {args.seed}",
        "operations": sum(part.operations for part in parts),
        "seconds": round(time.perf_counter() - started, 1),
        "cpu_s": round(time.process_time(), 1),
        "parts": [part.to_fields() for part in parts],
    }
    text = json.dumps(result, indent=2) + "\n"
    sys.stdout.write(text)
    if args.write:
        RESULT.write_text(text, encoding="utf-8")
    return int(any(part.growth_percent > args.max_growth for part in parts))


if __name__ == "__main__":
    sys.exit(main())
