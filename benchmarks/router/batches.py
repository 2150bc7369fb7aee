"""What a running batch does to other requests' time to first token: real processes, one run, windows in turns.

One decode instance (with ``--prefill`` prefill instances) and a router. Chats arrive at random times; in every other
window, in the order ABBA, a batch runs beside them that would take all idle capacity. Prints the p50 and p99 of the
time to first token of both kinds of windows, their ratio, and the lines that were answered meanwhile.

    python -m benchmarks.router.batches --rate 2 --windows 8 --seconds 30
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from benchmarks.kv.overlap import process, ready

from baton.rpc.server import free_port

HOST = "127.0.0.1"
LINES = 20_000
ORDER = (False, True, True, False)
WORDS = ("def", "return", "list", "value", "sorted", "index", "class", "self", "print", "range", "while", "import")


def chat(rng: random.Random, words: int, max_tokens: int) -> dict[str, Any]:
    """Return a chat with a prompt that no cache has."""
    text = " ".join(rng.choice(WORDS) for _ in range(words))
    return {"messages": [{"role": "user", "content": text}], "max_tokens": max_tokens, "ignore_eos": True}


class Load:
    """Chats and batches at one router.

    Args:
        http: Client of the router.
        options: Options of the command.
    """

    def __init__(self, http: httpx.AsyncClient, options: argparse.Namespace) -> None:
        self._http = http
        self._options = options
        self._rng = random.Random(0)

    async def window(self) -> list[float]:
        """Send chats for the time of a window; return their milliseconds to the first token."""
        options = self._options
        ttft: list[float] = []
        tasks = []
        end = time.monotonic() + options.seconds
        due = time.monotonic()
        while (due := due + self._rng.expovariate(options.rate)) < end:
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            tasks.append(asyncio.create_task(self._send(ttft)))
        await asyncio.gather(*tasks)
        return ttft

    async def _send(self, ttft: list[float]) -> None:
        body = chat(self._rng, self._options.words, self._options.tokens) | {"stream": True}
        began = time.monotonic()
        async with self._http.stream("POST", "/v1/chat/completions", json=body) as answer:
            answer.raise_for_status()
            first = True
            async for _ in answer.aiter_bytes():
                if first:
                    ttft.append(1000 * (time.monotonic() - began))
                    first = False

    async def start_batch(self) -> str:
        """Create a batch; return its identifier when a line of it has been answered."""
        options = self._options
        lines = "".join(
            json.dumps(
                {
                    "custom_id": str(number),
                    "method": "POST",
                    "url": "/v1/chat/completions",
                    "body": chat(self._rng, options.words, options.tokens),
                }
            )
            + "\n"
            for number in range(LINES)
        )
        file = await self._http.post("/v1/files", data={"purpose": "batch"}, files={"file": ("lines", lines.encode())})
        body = {
            "input_file_id": file.raise_for_status().json()["id"],
            "endpoint": "/v1/chat/completions",
            "completion_window": "24h",
        }
        batch = (await self._http.post("/v1/batches", json=body)).raise_for_status().json()["id"]
        while not await self.count_lines(batch):  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        return str(batch)

    async def count_lines(self, batch: str) -> int:
        """Return the number of lines that have an answer."""
        answer = (await self._http.get(f"/v1/batches/{batch}")).raise_for_status().json()
        return int(answer["request_counts"]["completed"])

    async def stop_batch(self, batch: str) -> None:
        """Cancel a batch, and wait for its end."""
        await self._http.post(f"/v1/batches/{batch}/cancel")
        while (await self._http.get(f"/v1/batches/{batch}")).json()["status"] != "cancelled":  # noqa: ASYNC110
            await asyncio.sleep(0.05)


async def measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Run all windows."""
    with contextlib.ExitStack() as stack:
        engine = ["--model", options.model, "--threads", "1", "--kv-blocks", "4096", "--policy", options.policy]
        addresses = {}
        for role in ("prefill",) * options.prefill + ("decode",):
            port = free_port()
            addresses.setdefault(role, []).append(f"{HOST}:{port}")
            stack.enter_context(process(f"baton_{role}.main", *engine, "--port", str(port)))
        port = free_port()
        flags = ["--port", str(port), "--grpc-port", str(free_port()), "--batch-store", str(folder / "batches")]
        for role, names in addresses.items():
            flags += [f"--{role}", *names]
            for address in names:
                await ready(address)
        stack.enter_context(process("baton_router.main", *flags))
        async with httpx.AsyncClient(base_url=f"http://{HOST}:{port}", timeout=600) as http:
            await _wait_ready(http)
            return await _measure(Load(http, options), options)


async def _wait_ready(http: httpx.AsyncClient) -> None:
    while True:
        with contextlib.suppress(httpx.TransportError):
            if (await http.get("/readyz")).status_code == 200:
                return
        await asyncio.sleep(0.1)


async def _measure(load: Load, options: argparse.Namespace) -> dict[str, Any]:
    times: dict[bool, list[float]] = {False: [], True: []}
    lines = 0
    await load.window()  # warms everything up
    for number in range(options.windows):
        beside = ORDER[number % len(ORDER)]
        batch = await load.start_batch() if beside else ""
        before = await load.count_lines(batch) if beside else 0
        times[beside] += await load.window()
        if beside:
            lines += await load.count_lines(batch) - before
            await load.stop_batch(batch)
    without, beside_batch = (np.percentile(times[kind], (50, 99)) for kind in (False, True))
    return {
        "chats": {"without": len(times[False]), "beside a batch": len(times[True])},
        "ttft_ms p50": {"without": round(without[0], 1), "beside a batch": round(beside_batch[0], 1)},
        "ttft_ms p99": {"without": round(without[1], 1), "beside a batch": round(beside_batch[1], 1)},
        "ratio p50": round(beside_batch[0] / without[0], 3),
        "ratio p99": round(beside_batch[1] / without[1], 3),
        "lines per second": round(lines / (options.seconds * options.windows / 2), 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="models/baton-tiny")
    parser.add_argument("--prefill", type=int, default=0, help="prefill instances")
    parser.add_argument("--policy", default="fcfs", help="--policy of the instances")
    parser.add_argument("--rate", type=float, default=2.0, help="chats per second")
    parser.add_argument("--words", type=int, default=400, help="words of a prompt")
    parser.add_argument("--tokens", type=int, default=32, help="tokens of an answer")
    parser.add_argument("--windows", type=int, default=8, help="windows, half of them beside a batch")
    parser.add_argument("--seconds", type=float, default=30.0, help="seconds of a window")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(asyncio.run(measure(options, Path(folder))), indent=1))


if __name__ == "__main__":
    main()
