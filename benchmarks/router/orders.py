"""Time to first token of both orders of serving, side by side: one prefill and one decode instance, one request a time.

Every prompt is new to both instances. Orders take turns, so that both meet the same machine.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import time

import httpx

from baton.cli.plan import ExtraArgs, Ratio, make_plan
from baton.cli.supervisor import Supervisor

ORDERS = ("decode_first", "prefill_first")


async def ttft_ms(client: httpx.AsyncClient, prompt: list[int], order: str) -> float:
    """Return the milliseconds from a request to its first streamed token."""
    body = {"prompt": prompt, "max_tokens": 4, "temperature": 0, "stream": True}
    began = time.perf_counter()
    async with client.stream("POST", "/v1/completions", json=body, headers={"x-baton-order": order}) as response:
        response.raise_for_status()
        lines = response.aiter_lines()
        async for line in lines:
            if line.startswith("data: "):
                break
        took = 1e3 * (time.perf_counter() - began)
        async for _ in lines:
            pass
        if response.headers["x-baton-order"] != order or response.headers["x-baton-path"] != "remote":
            raise SystemExit(f"{order} was served {response.headers['x-baton-order']}")
    return took


async def main(model: str, lengths: list[int], rounds: int) -> None:
    """Measure and print a table."""
    extra = ExtraArgs(worker=("--model", model, "--dtype", "float32"), decode=("--remote-prefill-threshold", "1"))
    rng = random.Random(0)
    async with Supervisor(make_plan(ratio=Ratio(1, 1), extra=extra), lambda name, line: None) as supervisor:
        url = f"http://{supervisor.plan.http_address}"
        async with httpx.AsyncClient(base_url=url, timeout=120.0) as client:
            print(f"| prompt tokens | {' | '.join(f'`{order}` p50 ms | p90' for order in ORDERS)} |")
            for length in lengths:
                times: dict[str, list[float]] = {order: [] for order in ORDERS}
                for _ in range(rounds + 2):
                    for order in ORDERS:
                        prompt = [rng.randrange(8, 4000) for _ in range(length)]
                        times[order].append(await ttft_ms(client, prompt, order))
                cells = []
                for order in ORDERS:
                    deciles = statistics.quantiles(times[order][2:], n=10)
                    cells.append(f"{statistics.median(times[order][2:]):.1f} | {deciles[8]:.1f}")
                print(f"| {length} | {' | '.join(cells)} |")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="models/baton-tiny")
    parser.add_argument("--lengths", type=int, nargs="+", default=[128, 512, 1500])
    parser.add_argument("--rounds", type=int, default=20)
    options = parser.parse_args()
    asyncio.run(main(options.model, options.lengths, options.rounds))
