"""Saves and loads of the local connectors, host memory and shared storage, beside memcpy and plain reads, in one run.

    python benchmarks/kv/connectors.py --dir /var/tmp --blocks 96

Blocks are those of Llama 8B in bfloat16 (2 MiB). Files are read from the page cache by both sides, for it is the
connector's own cost that is measured. Rounds alternate and the medians count.
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
import statistics
import tempfile
import time
from collections.abc import Callable

import numpy as np

from baton.kv_cache.arena import HostArena
from baton.kv_cache.fingerprint import Fingerprint
from baton.kv_cache.layout import KVLayout, LayerShape
from baton.kv_cache.shards import KVShards
from baton.kv_transfer.blocks import BlockServer
from baton.kv_transfer.connector.store.backend import ChainPart, LoadCall, SaveCall, StoreBackend
from baton.kv_transfer.connector.store.files import BlockFolder, FileStore
from baton.kv_transfer.connector.store.host_memory import HostMemoryStore, StagingArena
from baton.types import BlockHash, BlockId, InstanceId

LAYOUT = KVLayout((LayerShape(8, 128, 128),) * 32, 16, "bfloat16")
KIND = Fingerprint.of(model="llama-8b", model_digest="0", rope="", layout=LAYOUT)
DEADLINE_S = 120.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--dir", default="/var/tmp", help="on the file system to measure")
    parser.add_argument("--blocks", type=int, default=96)
    parser.add_argument("--threads", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.dir) as folder:
        sys.stdout.write(asyncio.run(_measure(args, Path(folder))) + "\n")


async def _measure(args: argparse.Namespace, folder: Path) -> str:
    count = args.blocks
    size = KIND.block_bytes
    pool = KVShards([HostArena(2 * count, size)])
    arena = pool.primary
    arena.touch()
    arena.blocks[:count] = np.random.default_rng(0).integers(0, 256, (count, size), np.uint8)
    server = BlockServer(pool, KIND, InstanceId("bench"), kinds=("shm",))
    names = tuple(BlockHash(hashlib.sha256(b"%d" % i).digest()) for i in range(count))
    part = ChainPart(names, 0, count)
    ids = [BlockId(i) for i in range(2 * count)]
    files = BlockFolder(folder, KIND, max_bytes=1 << 40, sync=False)
    backends: dict[str, StoreBackend] = {
        "host memory": HostMemoryStore(StagingArena(pool, KIND, count)),
        "shared storage": FileStore(files, pool, KIND, threads=args.threads, blocks_per_call=1024),
    }
    lines = []
    for name, backend in backends.items():
        started = time.perf_counter()
        deadline = time.monotonic() + DEADLINE_S
        saved = await backend.save(SaveCall(server.source, part, ids[:count], [0] * count, deadline))
        assert saved.num_blocks == count
        lines.append(f"{name}: first save {_rate(count * size, time.perf_counter() - started)}")
    loads: dict[str, list[float]] = {name: [] for name in (*backends, "memcpy", "plain reads")}
    buffer = np.ones(size + 65536, np.uint8)
    for _ in range(args.rounds):
        for name, backend in backends.items():
            call = LoadCall(part, ids[count:], time.monotonic() + DEADLINE_S)
            started = time.perf_counter()
            await backend.load(call)
            loads[name].append(time.perf_counter() - started)
            assert call.progress.num_blocks == count
        loads["memcpy"].append(_timed(lambda: np.copyto(arena.blocks[count:], arena.blocks[:count])))
        loads["plain reads"].append(_timed(lambda: _read_all(folder, buffer)))
    middle = {name: statistics.median(times) for name, times in loads.items()}
    for name, beside in (("host memory", "memcpy"), ("shared storage", "plain reads")):
        seconds = middle[name]
        beside_s = middle[beside]
        rates = f"{_rate(count * size, seconds)}, {beside} {_rate(count * size, beside_s)}"
        lines.append(f"{name}: load {rates}: {beside_s / seconds:.2f} of it")
    for backend in backends.values():
        await backend.close()
    server.close()
    pool.close()
    return "\n".join(lines)


def _read_all(folder: Path, buffer: np.ndarray) -> None:
    for path in folder.glob("**/*.safetensors"):
        with open(path, "rb", buffering=0) as file:
            file.readinto(buffer.data)


def _timed(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def _rate(num_bytes: int, seconds: float) -> str:
    return f"{num_bytes / seconds / 1e9:.2f} GB/s"


if __name__ == "__main__":
    main()
