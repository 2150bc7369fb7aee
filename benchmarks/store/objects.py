"""One object per block beside several blocks packed into one object, in one run.

    python benchmarks/store/objects.py --blocks 128 --block-bytes 2097152 --latency-ms 20 --mb-per-s 90

Both sides use the same file system under fsspec, the same number of requests side by side, and the same model of an
object store: every request waits ``--latency-ms``, then moves its bytes at ``--mb-per-s`` (0: as fast as it goes). So
the figures compare layouts, they are not those of any real store. Packed objects are read by byte ranges: a whole
prefix of a chain, and single blocks. Rounds alternate and the medians count.
"""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":
    # The root, for ``tests.support``, and not this file's folder: its http.py would hide the standard library's.
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import argparse
import hashlib
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from baton.types import BlockHash
from baton_kvstore.tiers.object_backend import ObjectBackend
from baton_kvstore.tiers.remote import encode_header
from baton_kvstore.types import KvFormat


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--dir", default="/var/tmp")
    parser.add_argument("--blocks", type=int, default=128)
    parser.add_argument("--block-bytes", type=int, default=2 << 20)
    parser.add_argument("--packed", type=int, default=16, help="blocks in an object on the other side")
    parser.add_argument("--requests", type=int, default=16, help="side by side")
    parser.add_argument("--latency-ms", type=float, default=20.0)
    parser.add_argument("--mb-per-s", type=float, default=90.0, help="of one request; 0: no limit")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.dir) as folder:
        for name, (single, packed) in _measure(args, folder).items():
            sys.stdout.write(
                f"{name}: one object per block {single:.0f} MB/s, {args.packed} blocks per object {packed:.0f} MB/s,"
                f" {single / packed:.2f} x\n"
            )


def _measure(args: argparse.Namespace, folder: str) -> dict[str, tuple[float, float]]:
    size = args.block_bytes
    count = args.blocks
    packed = args.packed
    kind = KvFormat(b"k" * 32, b"c" * 32, size)
    backend = ObjectBackend(f"file://{folder}", timeout_s=600.0, requests=args.requests)
    fs = backend._fs
    _slow_down(fs, args.latency_ms / 1000, args.mb_per_s * 1e6)
    names = [BlockHash(hashlib.sha256(b"%d" % i).digest()) for i in range(count)]
    rng = np.random.default_rng(0)
    payloads = [rng.bytes(size) for _ in range(count)]
    values = [encode_header(kind, name, memoryview(data)) + data for name, data in zip(names, payloads, strict=True)]
    one = len(values[0])
    groups = range(0, count, packed)
    some = [int(i) for i in rng.choice(count, min(count, 32), replace=False)]
    with ThreadPoolExecutor(args.requests) as pool:

        def put_packed() -> None:
            list(pool.map(lambda at: fs.pipe_file(f"{folder}/p{at}", b"".join(values[at : at + packed])), groups))

        def get_ranges(numbers: list[tuple[int, int]]) -> None:
            def read(item: tuple[int, int]) -> bytes:
                at, length = item
                start = at % packed * one
                return bytes(fs.cat_file(f"{folder}/p{at - at % packed}", start=start, end=start + length * one))

            list(pool.map(read, numbers))

        works: dict[str, tuple[int, Callable[[], Any], Callable[[], Any]]] = {
            "write": (count, lambda: backend.write(kind, names, values), put_packed),
            "read of a prefix": (
                count,
                lambda: backend.get(kind, names),
                lambda: get_ranges([(at, min(packed, count - at)) for at in groups]),
            ),
            "read of single blocks": (
                len(some),
                lambda: backend.get(kind, [names[i] for i in some]),
                lambda: get_ranges([(i, 1) for i in some]),
            ),
        }
        result: dict[str, tuple[float, float]] = {}
        for name, (number, *sides) in works.items():
            rates: list[list[float]] = [[], []]
            for _ in range(args.rounds):
                for side, work in enumerate(sides):
                    started = time.perf_counter()
                    work()
                    rates[side].append(number * size / (time.perf_counter() - started) / 1e6)
            result[name] = (statistics.median(rates[0]), statistics.median(rates[1]))
    backend.close()
    return result


def _slow_down(fs: Any, latency_s: float, bytes_per_s: float) -> None:
    """Have a file system take as long for a request as an object store over a network."""
    put = fs.pipe_file
    get = fs.cat_file

    def wait(num_bytes: int) -> None:
        time.sleep(latency_s + (num_bytes / bytes_per_s if bytes_per_s else 0.0))

    def slow_put(path: str, value: bytes, **options: Any) -> None:
        wait(len(value))
        put(path, value, **options)

    def slow_get(path: str, **options: Any) -> bytes:
        data = bytes(get(path, **options))
        wait(len(data))
        return data

    fs.pipe_file = slow_put
    fs.cat_file = slow_get


if __name__ == "__main__":
    main()
