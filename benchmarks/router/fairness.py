"""A modest tenant beside a greedy one: how long its answers take, with the router's queue and without.

Starts `baton up` (1P1D, the demo model, 8 sequences in a batch) twice; the greedy tenant sends 150 requests at once,
the modest one 5 half a second later.

    python benchmarks/router/fairness.py
"""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":
    # The root, for ``tests.support``, and not this file's folder: its http.py would hide the standard library's.
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import asyncio
import statistics
import time

import httpx
from tests.support.servers.up import running_up

_NO_QUEUE = {"BATON_INSTANCE_SLOTS": "0", "BATON_PREFILL_QUEUE_TOKENS": "0"}
_FLAGS = ("--ratio", "1P1D", "--max-num-seqs", "8", "--kv-blocks", "600")


async def send(http: httpx.AsyncClient, user: str, number: int) -> float:
    """Send a request and return the seconds to its answer."""
    began = time.perf_counter()
    prompt = f"{user} {number} def f(x):\n    return x + {number}\n" * 4
    answer = await http.post("/v1/completions", json={"prompt": prompt, "max_tokens": 40, "user": user})
    answer.raise_for_status()
    return time.perf_counter() - began


async def measure(env: dict[str, str]) -> tuple[float, float, float]:
    """Return the mean seconds of both tenants' requests, and the seconds that everything took."""
    with running_up(*_FLAGS, env=env) as deployment:
        limits = httpx.Limits(max_connections=400)
        async with httpx.AsyncClient(base_url=deployment.url, timeout=120, limits=limits) as http:
            for number in range(4):
                await send(http, "warm", number)
            began = time.perf_counter()
            greedy = [asyncio.create_task(send(http, "greedy", number)) for number in range(150)]
            await asyncio.sleep(0.5)
            modest = [asyncio.create_task(send(http, "modest", number)) for number in range(5)]
            times = [statistics.mean(await asyncio.gather(*tasks)) for tasks in (greedy, modest)]
            return times[0], times[1], time.perf_counter() - began


async def main() -> None:
    for name, env in (("without", _NO_QUEUE), ("with", {})):
        greedy, modest, took = await measure(env)
        print(f"{name} the queue: modest {modest:.2f} s, greedy {greedy:.2f} s on average; all in {took:.1f} s")


if __name__ == "__main__":
    asyncio.run(main())
