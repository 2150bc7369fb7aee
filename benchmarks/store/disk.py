"""Reads of the KV store's disk tier beside plain reads of the same files, in one run.

    python benchmarks/store/disk.py --dir /var/tmp --blocks 256 --block-bytes 2097152

Both sides read whole files around the page cache into memory that was touched before, with the same threads and the
same block size; the tier also checks every block's checksum. Rounds alternate and the medians count.
"""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":
    # The root, for ``tests.support``, and not this file's folder: its http.py would hide the standard library's.
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import argparse
import hashlib
import mmap
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from baton.types import BlockHash
from baton_kvstore.tiers.disk.log import DiskLog
from baton_kvstore.types import PAGE, KvFormat


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--dir", default="/var/tmp", help="on the file system to measure")
    parser.add_argument("--blocks", type=int, default=256)
    parser.add_argument("--block-bytes", type=int, default=2 << 20)
    parser.add_argument("--threads", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--buffered", action="store_true", help="through the page cache, emptied before each read")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.dir) as folder:
        sys.stdout.write(_measure(args, Path(folder) / "kv") + "\n")


def _measure(args: argparse.Namespace, path: Path) -> str:
    size = args.block_bytes
    count = args.blocks
    kind = KvFormat(b"k" * 32, b"c" * 32, size)
    disk_bytes = 2 * count * (size + PAGE) + (1 << 30)
    log = DiskLog(str(path), max_bytes=disk_bytes, segment_bytes=256 << 20, direct=not args.buffered)
    memory = memoryview(mmap.mmap(-1, count * size))
    views = [memory[i * size : (i + 1) * size] for i in range(count)]
    hashes = [BlockHash(hashlib.sha256(b"%d" % i).digest()) for i in range(count)]
    rng = np.random.default_rng(0)
    for view in views:
        view[:] = rng.bytes(size)
    started = time.perf_counter()
    for at in range(0, count, 16):
        if not all(log.write(kind, hashes[at : at + 16], views[at : at + 16], set())):
            raise SystemExit("a block was not written")
    log.sync()
    written = count * size / (time.perf_counter() - started) / 1e9
    with ThreadPoolExecutor(args.threads) as pool:

        def tier(part: range) -> None:
            if not all(log.index.read(kind, hashes[part.start : part.stop], views[part.start : part.stop])):
                raise SystemExit("a block was damaged")

        def plain(part: range) -> None:
            _plain(path, part, size, views, direct=not args.buffered)

        rates: dict[str, list[float]] = {"tier": [], "plain": []}
        for _ in range(args.rounds):
            for name, read in (("plain", plain), ("tier", tier)):
                _drop_cache(path)
                rates[name].append(_rate(pool, read, args.threads, count, size))
    log.close()
    tier = statistics.median(rates["tier"])
    plain = statistics.median(rates["plain"])
    return (
        f"write+sync {written:.2f} GB/s; read: tier {tier:.2f} GB/s, plain preadv {plain:.2f} GB/s, "
        f"ratio {tier / plain:.2f} ({count} blocks of {size} bytes, {args.threads} threads, {args.rounds} rounds)"
    )


def _rate(pool: ThreadPoolExecutor, read: Callable[[range], None], threads: int, count: int, size: int) -> float:
    step = -(-count // threads)
    started = time.perf_counter()
    list(pool.map(read, [range(at, min(at + step, count)) for at in range(0, count, step)]))
    return count * size / (time.perf_counter() - started) / 1e9


def _plain(path: Path, part: range, size: int, views: list[memoryview], *, direct: bool) -> None:
    """Read as many bytes of the same files, block by block."""
    files = sorted(path.glob("segment-*"))
    per_file = [(file.stat().st_size - PAGE) // (size + PAGE) for file in files]
    first = 0
    for file, held in zip(files, per_file, strict=True):
        fd = os.open(file, os.O_RDONLY | (os.O_DIRECT if direct else 0))
        for i in range(max(first, part.start), min(first + held, part.stop)):
            os.preadv(fd, [views[i]], PAGE + (i - first) * (size + PAGE))
        os.close(fd)
        first += held


def _drop_cache(path: Path) -> None:
    for file in path.glob("segment-*"):
        fd = os.open(file, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


if __name__ == "__main__":
    main()
