"""How long does the index stop the router while its table grows?"""

from __future__ import annotations

import random
import time

from baton_router.indexer.prefix_index import BlockTable

HASH = 32


def measure_growth(blocks: int, per_event: int, rounds: int) -> dict[str, float]:
    """Store ``blocks`` random blocks in events; returns microseconds of processor time per event.

    Every round does the same, so an event's time is its least: what another process or the system's clock added once
    is not the table's.
    """
    least = [float("inf")] * (blocks // per_event)
    for _ in range(rounds):
        table = BlockTable(2 * blocks)
        rng = random.Random(0)
        for at in range(len(least)):
            data = rng.randbytes(per_event * HASH)
            began = time.thread_time()
            table.store(at % 16, data)
            least[at] = min(least[at], time.thread_time() - began)
    ordered = sorted(least)
    return {
        "blocks": blocks,
        "per_event": per_event,
        "p50_us": 1e6 * ordered[len(ordered) // 2],
        "p99_us": 1e6 * ordered[len(ordered) * 99 // 100],
        "worst_us": 1e6 * ordered[-1],
        "sum_s": sum(least),
    }
