"""Can a tenant learn by the time to first token what another one has cached?

Starts `baton up` (1P1D, the demo model, a KV store that instances use) with two API keys. Before every request that
counts tenant A sends a prompt. Then tenant B sends either the very same prompt ("cached by A") or another one
("not cached"), in random order; the time to B's first token is taken at the client. Beside these, how long A's
own second request takes ("cached by itself"), to show that there is something to be seen.

The two distributions are compared by their medians and by the Mann-Whitney U test (two-sided, normal approximation
with correction for ties): the probability of a difference at least as large by chance. And the power of the test: the
same with `--leak`, where both keys belong to one tenant, has to be found.

    python benchmarks/router/tenants.py
    python benchmarks/router/tenants.py --leak
    python benchmarks/router/tenants.py --write     # both, into benchmarks/results/tenants.json
"""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":
    # The root, for ``tests.support``, and not this file's folder: its http.py would hide the standard library's.
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import argparse
import asyncio
import json
import math
import os
import random
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import httpx
from tests.support.servers.up import running_up

from baton_bench.report import Spread

RESULT = Path(__file__).parents[1] / "results" / "tenants.json"
_VOCABULARY = range(100, 4000)


@contextmanager
def deployment(leak: bool) -> Iterator[str]:
    """Run `baton up` with the keys ``a`` and ``b``, of two tenants or (``leak``) of one; gives the URL."""
    tenants = {"one": {"keys": ["a", "b"]}} if leak else {"a": {"keys": ["a"]}, "b": {"keys": ["b"]}}
    with tempfile.TemporaryDirectory() as folder:
        keys = Path(folder) / "keys.json"
        secret = Path(folder) / "secret"
        for private in (keys, secret):
            private.touch(mode=0o600)
        keys.write_text(json.dumps({"tenants": tenants}))
        secret.write_bytes(os.urandom(32).hex().encode())
        flags = ("--router-args", f"--api-keys {keys} --tenant-secret-file {secret}")
        with running_up("--ratio", "1P1D", "--kvstore", *flags) as running:
            yield running.url


async def first_token(http: httpx.AsyncClient, key: str, prompt: Sequence[int]) -> float:
    """Send a prompt and return the milliseconds to the first piece of the answer, which is then read to its end."""
    body = {"prompt": list(prompt), "max_tokens": 2, "temperature": 0, "stream": True}
    began = time.perf_counter()
    took = math.nan
    async with http.stream("POST", "/v1/completions", json=body, headers={"authorization": f"Bearer {key}"}) as answer:
        answer.raise_for_status()
        async for _ in answer.aiter_raw():
            if math.isnan(took):
                took = 1000 * (time.perf_counter() - began)
    return took


async def measure(args: argparse.Namespace, *, leak: bool) -> dict[str, Any]:
    """Return both distributions and what the test says of them."""
    rng = random.Random(args.seed)

    def fresh() -> list[int]:
        return rng.choices(_VOCABULARY, k=args.tokens)

    times: dict[str, list[float]] = {"cached by A": [], "not cached": [], "cached by itself": []}
    with deployment(leak) as url:
        async with httpx.AsyncClient(base_url=url, timeout=120) as http:
            for _ in range(20):
                for key in "ab":
                    await first_token(http, key, fresh())
            turns = ["cached by A", "not cached"] * args.requests
            rng.shuffle(turns)
            for turn in turns:
                prompt_of_a = fresh()
                await first_token(http, "a", prompt_of_a)
                await asyncio.sleep(args.pause_s)  # its KV has reached the store, and the router knows of it
                prompt = prompt_of_a if turn == "cached by A" else fresh()
                times[turn].append(await first_token(http, "b", prompt))
                times["cached by itself"].append(await first_token(http, "a", prompt_of_a))
    cached = times["cached by A"]
    uncached = times["not cached"]
    return {
        "tenants": 1 if leak else 2,
        "prompt_tokens": args.tokens,
        "ttft_ms": {name: _row(values) for name, values in times.items()},
        "median_ratio": round(statistics.median(cached) / statistics.median(uncached), 4),
        **dict(
            zip(("rank_probability", "p_value"), (round(x, 4) for x in mann_whitney(cached, uncached)), strict=True)
        ),
    }


def _row(values: Sequence[float]) -> dict[str, float]:
    spread = Spread.of(values)
    return {"n": len(values), "p50": round(spread.p50, 3), "p95": round(spread.p95, 3), "p99": round(spread.p99, 3)}


def mann_whitney(a: Sequence[float], b: Sequence[float]) -> tuple[float, float]:
    """Return the probability that a sample of ``a`` is larger than one of ``b``, and the two-sided p-value."""
    both = sorted([(value, 0) for value in a] + [(value, 1) for value in b])
    ranks = 0.0
    ties = 0.0
    at = 0
    while at < len(both):
        stop = at
        while stop < len(both) and both[stop][0] == both[at][0]:
            stop += 1
        mean_rank = (at + 1 + stop) / 2
        ranks += mean_rank * sum(1 for _, group in both[at:stop] if group == 0)
        ties += (stop - at) ** 3 - (stop - at)
        at = stop
    n = len(a)
    m = len(b)
    u = ranks - n * (n + 1) / 2
    total = n + m
    sigma = math.sqrt(n * m / 12 * (total + 1 - ties / (total * (total - 1))))
    z = max(0.0, abs(u - n * m / 2) - 0.5) / sigma
    return u / (n * m), math.erfc(z / math.sqrt(2))


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=150, help="of B that count, of each kind")
    parser.add_argument("--tokens", type=int, default=512, help="in a prompt")
    parser.add_argument("--pause-s", type=float, default=0.05, help="between A's request and B's")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--leak", action="store_true", help="both keys belong to one tenant")
    parser.add_argument("--write", action="store_true", help=f"both, into {RESULT.name}")
    args = parser.parse_args()
    results = [await measure(args, leak=leak) for leak in ((False, True) if args.write else (args.leak,))]
    for result in results:
        print(f"{result['tenants']} tenant(s), {result['prompt_tokens']} tokens; B's time to first token, ms:")
        for name, row in result["ttft_ms"].items():
            print(f"  {name:18} p50 {row['p50']:8.3f}   p95 {row['p95']:8.3f}   p99 {row['p99']:8.3f}   n {row['n']}")
        print(f"  medians cached by A / by uncached: {result['median_ratio']:.3f}")
        print(f"  P(cached by A is slower) {result['rank_probability']:.3f}, p = {result['p_value']:.4f}")
    if args.write:
        RESULT.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    asyncio.run(main())
