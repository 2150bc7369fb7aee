"""The KV store's Redis tier beside plain redis-py on the same values, in one run.

    python benchmarks/store/redis_tier.py --blocks 64 --block-bytes 2097152

Starts a redis-server of its own. The tier checks every block and copies it into page-aligned memory, as a store does;
the other side does GET after GET, or SET after SET, and looks at nothing. Rounds alternate and the medians count.
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
import queue
import statistics
import time
from collections.abc import Callable

import numpy as np
import redis
from tests.support.servers.redis_server import RedisServer

from baton.types import BlockHash
from baton_kvstore.tiers.chain import copies_of
from baton_kvstore.tiers.open import REDIS_BATCH_BYTES
from baton_kvstore.tiers.redis_backend import RedisBackend, RedisOptions
from baton_kvstore.tiers.remote import RemoteOptions, RemoteTier
from baton_kvstore.types import KvFormat


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--blocks", type=int, default=64)
    parser.add_argument("--block-bytes", type=int, default=2 << 20)
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    async with RedisServer() as server:
        for name, (tier, plain) in (await asyncio.to_thread(_measure, args, server.url)).items():
            sys.stdout.write(f"{name}: tier {tier:.2f} GB/s, redis-py {plain:.2f} GB/s, {tier / plain:.2f} x\n")


def _measure(args: argparse.Namespace, url: str) -> dict[str, tuple[float, float]]:
    size = args.block_bytes
    count = args.blocks
    kind = KvFormat(b"k" * 32, b"c" * 32, size)
    options = RemoteOptions(
        "redis",
        durable=False,
        queue_bytes=2 * count * size,
        index_blocks=2 * count,
        batch_bytes=REDIS_BATCH_BYTES,
    )
    tier = RemoteTier(RedisBackend(RedisOptions(url, "bench")), options)
    names = [BlockHash(hashlib.sha256(b"%d" % i).digest()) for i in range(count)]
    rng = np.random.default_rng(0)
    views = copies_of(kind, [memoryview(rng.bytes(size)) for _ in range(count)])
    values = [bytes(view) for view in views]
    client = redis.Redis.from_url(url, protocol=2)

    def tier_write() -> None:
        answers: queue.Queue[list[bool]] = queue.Queue()
        if not tier.write(kind, names, views, answers.put) or not all(answers.get()):
            raise SystemExit("a block was not written")

    def tier_read() -> None:
        if not all(tier.read(kind, names, views)):
            raise SystemExit("a block was not read")

    def plain_write() -> None:
        for i, value in enumerate(values):
            client.set(f"plain:{i}", value)

    def plain_read() -> None:
        for i in range(count):
            client.get(f"plain:{i}")

    sides: dict[str, tuple[Callable[[], None], Callable[[], None]]] = {
        "write": (tier_write, plain_write),
        "read": (tier_read, plain_read),
    }
    result: dict[str, tuple[float, float]] = {}
    for name, works in sides.items():
        rates: list[list[float]] = [[], []]
        for _ in range(args.rounds):
            for side, work in enumerate(works):
                started = time.perf_counter()
                work()
                rates[side].append(count * size / (time.perf_counter() - started) / 1e9)
        result[name] = (statistics.median(rates[0]), statistics.median(rates[1]))
    client.close()
    tier.close()
    return result


if __name__ == "__main__":
    asyncio.run(main())
