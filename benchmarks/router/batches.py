"""Batches against a real deployment (``baton up``, files and batches in SQLite), by the unmodified openai SDK.

``endurance``: a batch of 1,000 lines, two of them broken, and one of 600 that is cancelled at half. The router is
killed (SIGKILL) when a fifth of the first is answered, and again right after the cancellation; ``baton up`` starts it
again. At the end every name must be in exactly one of a batch's two files, in the order of the input, the broken lines
with their error; else it exits with status 1.

``interference``: what a running batch does to other requests' time to first token. Chats arrive at random times; in
every other window, in the order ABBA, a batch runs beside them that would take all idle capacity. Both windows of a
pair have the same arrivals and lengths of prompts, and other words. Prints the percentiles of both kinds of windows,
their ratios with intervals of 90 % (windows drawn again, pair by pair), and the lines answered meanwhile.

    python -m benchmarks.router.batches --windows 16 --seconds 25 --rate 3
    python -m benchmarks.router.batches --part interference --prefill 1 --executor paced_agents --rate 1
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import openai
import psutil
from benchmarks.planner_parts.paced_plugin import paced_executors
from openai.types import Batch
from tests.support.servers.up import running_up

CHAT = "/v1/chat/completions"
ORDER = (False, True, True, False)
WORDS = ("def", "return", "list", "value", "sorted", "index", "class", "self", "print", "range", "while", "import")
LINES = 1000
CANCELLED_LINES = 600
NOT_JSON, NO_TOKENS = 400, 700
"""Numbers of the broken lines: the text of one is no JSON, the other asks for ``max_tokens`` of -1."""
DRAWS = 2000


def chat(rng: random.Random, words: int, max_tokens: int) -> dict[str, Any]:
    """Return a chat with a prompt that no cache has."""
    text = " ".join(rng.choice(WORDS) for _ in range(words))
    return {
        "model": "baton",
        "messages": [{"role": "user", "content": text}],
        "max_tokens": max_tokens,
        "ignore_eos": True,
    }


def line(number: int, body: dict[str, Any]) -> bytes:
    return json.dumps({"custom_id": f"r{number}", "method": "POST", "url": CHAT, "body": body}).encode() + b"\n"


async def create(client: openai.AsyncOpenAI, lines: list[bytes]) -> Batch:
    file = await client.files.create(file=("lines.jsonl", b"".join(lines)), purpose="batch")
    return await client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")


async def wait_until(client: openai.AsyncOpenAI, ident: str, *states: str, done: int = sys.maxsize) -> Batch:
    """Wait for a state of a batch, or a number of its answers; the router may be away meanwhile."""
    while True:
        with contextlib.suppress(openai.APIConnectionError):
            batch = await client.batches.retrieve(ident)
            if batch.status in states or (batch.request_counts and batch.request_counts.completed >= done):
                return batch
        await asyncio.sleep(0.05)


# --- endurance ---


@contextlib.contextmanager
def deployment(options: argparse.Namespace, folder: str) -> Iterator[tuple[str, int]]:
    """The URL of a deployment, and the process that supervises it."""
    with running_up(
        "--ratio", f"{options.prefill}P1D", "--model", options.model, "--threads", "1", "--kv-blocks", "4096",
        "--served-model-name", "baton", "--policy", options.policy, "--executor", options.executor,
        "--router-args", f"--batch-store {folder}",
    ) as running:  # fmt: skip
        yield running.url, running.process.pid


def kill_router(supervisor: int) -> int:
    """Kill the router's process; return its number."""
    (router,) = (x for x in psutil.Process(supervisor).children() if "baton_router.main" in x.cmdline())
    os.kill(router.pid, signal.SIGKILL)
    router.wait()
    return router.pid


async def names_of(client: openai.AsyncOpenAI, ident: str | None) -> dict[str | None, dict[str, Any]]:
    """Return the lines of a result file by their names, in the order of the file; a name twice is an error."""
    if ident is None:
        return {}
    lines = [json.loads(x) for x in (await client.files.content(ident)).text.splitlines()]
    found = {x["custom_id"]: x for x in lines}
    if len(found) != len(lines):
        raise AssertionError(f"{len(lines)} lines have {len(found)} names")
    return found


async def endure(options: argparse.Namespace, url: str, supervisor: int) -> dict[str, Any]:
    """Run two batches, with kills; check that nothing is lost, repeated or out of order."""
    rng = random.Random(0)
    lines = [line(i, chat(rng, 40, 16)) for i in range(LINES)]
    lines[NOT_JSON] = b'{"custom_id": "r400", "method": \n'
    lines[NO_TOKENS] = line(NO_TOKENS, {**chat(rng, 40, 16), "max_tokens": -1})
    began = time.monotonic()
    killed = []
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=600) as client:
        batch = await create(client, lines)
        other = await create(client, [line(i, chat(rng, 40, 16)) for i in range(CANCELLED_LINES)])
        await wait_until(client, batch.id, done=LINES // 5)
        killed.append(kill_router(supervisor))
        await wait_until(client, other.id, done=CANCELLED_LINES // 2)
        await client.batches.cancel(other.id)
        killed.append(kill_router(supervisor))
        at_kill = await wait_until(client, batch.id, done=1)
        other = await wait_until(client, other.id, "cancelled")
        batch = await wait_until(client, batch.id, "completed")
        answered, failed = await names_of(client, batch.output_file_id), await names_of(client, batch.error_file_id)
        kept, given_up = await names_of(client, other.output_file_id), await names_of(client, other.error_file_id)
    expected = [f"r{i}" for i in range(LINES)]
    # What is no JSON has no name: its error says which line it is.
    assert list(failed) == [None, f"r{NO_TOKENS}"], list(failed)
    assert failed[None]["error"]["line"] == NOT_JSON + 1
    assert failed[f"r{NO_TOKENS}"]["response"]["body"]["error"]["param"] == "max_tokens"
    assert list(answered) == [x for i, x in enumerate(expected) if i not in (NOT_JSON, NO_TOKENS)]
    assert all(x["response"]["body"]["usage"]["completion_tokens"] == 16 for x in answered.values())
    assert batch.usage is not None
    assert batch.usage.output_tokens == 16 * len(answered)
    assert {x["error"]["code"] for x in given_up.values()} == {"batch_cancelled"}
    for names in (kept, given_up):
        numbers = [int(str(x)[1:]) for x in names]
        assert numbers == sorted(numbers)
    assert not kept.keys() & given_up.keys()
    assert kept.keys() | given_up.keys() == {f"r{i}" for i in range(CANCELLED_LINES)}
    assert at_kill.request_counts is not None
    return {
        "lines": {"answered": len(answered), "broken": len(failed)},
        "answered at the second kill": at_kill.request_counts.completed,
        "cancelled batch": {"answered": len(kept), "given up": len(given_up)},
        "routers killed": len(set(killed)),
        "seconds": round(time.monotonic() - began, 1),
    }


# --- interference ---


class Chats:
    """Chats at a router.

    Args:
        http: Client of the router.
        options: Options of the command.
    """

    def __init__(self, http: httpx.AsyncClient, options: argparse.Namespace) -> None:
        self._http = http
        self._options = options
        self._words = random.Random(0)

    async def window(self, pair: int) -> list[float]:
        """Send chats for the time of a window; return their milliseconds to the first token.

        Args:
            pair: Number of the arrivals and lengths.
        """
        options = self._options
        rng = random.Random(pair)
        ttft: list[float] = []
        tasks = []
        end = options.seconds
        began = time.monotonic()
        due = 0.0
        while (due := due + rng.expovariate(options.rate)) < end:
            body = chat(self._words, rng.randint(options.words // 2, options.words * 3 // 2), options.tokens)
            await asyncio.sleep(max(0.0, began + due - time.monotonic()))
            tasks.append(asyncio.create_task(self._send(body, ttft)))
        await asyncio.gather(*tasks)
        return ttft

    async def _send(self, body: dict[str, Any], ttft: list[float]) -> None:
        began = time.monotonic()
        async with self._http.stream("POST", CHAT, json=body | {"stream": True}) as answer:
            answer.raise_for_status()
            first = True
            async for _ in answer.aiter_bytes():
                if first:
                    ttft.append(1000 * (time.monotonic() - began))
                    first = False

    def lines(self) -> list[bytes]:
        """Return more lines than are answered in a window."""
        options = self._options
        count = int(options.seconds * 100)
        return [line(i, chat(self._words, options.words, options.tokens)) for i in range(count)]


def ratio(pairs: list[tuple[list[float], list[float]]], percentile: int) -> dict[str, float]:
    """Return the ratio of percentiles, beside a batch over without, and its interval of 90 %."""
    rng = np.random.default_rng(0)

    def of(chosen: list[tuple[list[float], list[float]]]) -> float:
        without, beside = (np.percentile(np.concatenate(x), percentile) for x in zip(*chosen, strict=True))
        return float(beside / without)

    drawn = [of([pairs[i] for i in rng.integers(0, len(pairs), len(pairs))]) for _ in range(DRAWS)]
    low, high = np.percentile(drawn, (5, 95)).round(3).tolist()
    return {"ratio": round(of(pairs), 3), "from": low, "to": high}


async def interfere(options: argparse.Namespace, url: str) -> dict[str, Any]:
    """Run all windows."""
    times: dict[bool, list[list[float]]] = {False: [], True: []}
    lines = 0
    async with (
        httpx.AsyncClient(base_url=url, timeout=600) as http,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", timeout=600) as client,
    ):
        chats = Chats(http, options)
        await chats.window(0)  # warms everything up
        for number in range(options.windows):
            beside = ORDER[number % len(ORDER)]
            batch = None
            before = 0
            if beside:
                batch = await create(client, chats.lines())
                counts = (await wait_until(client, batch.id, done=20)).request_counts
                before = counts.completed if counts else 0
            times[beside].append(await chats.window(number // 2))
            if batch is not None:
                counts = (await client.batches.retrieve(batch.id)).request_counts
                lines += counts.completed - before if counts else 0
                await client.batches.cancel(batch.id)
                await wait_until(client, batch.id, "cancelled")
    pairs = list(zip(times[False], times[True], strict=True))
    result: dict[str, Any] = {"chats": {}}
    for name, kind in (("without", False), ("beside a batch", True)):
        all_times = np.concatenate(times[kind])
        p50, p90, p99 = np.percentile(all_times, (50, 90, 99)).round(1).tolist()
        result["chats"][name] = {"number": len(all_times), "ttft_ms": {"p50": p50, "p90": p90, "p99": p99}}
    for percentile in (50, 90, 99):
        result[f"ratio p{percentile}"] = ratio(pairs, percentile)
    result["lines per second"] = round(lines / (options.seconds * len(pairs)), 2)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--part", choices=("all", "endurance", "interference"), default="all")
    parser.add_argument("--model", default="models/baton-tiny")
    parser.add_argument("--prefill", type=int, default=0, help="prefill instances; each needs a core, or pacing")
    parser.add_argument("--executor", choices=("auto", "paced_agents"), default="auto", help="steps: as fast as may be")
    parser.add_argument("--policy", default="fcfs", help="--policy of the instances")
    parser.add_argument("--rate", type=float, default=3.0, help="chats per second")
    parser.add_argument("--words", type=int, default=400, help="words of a prompt, in the mean")
    parser.add_argument("--tokens", type=int, default=32, help="tokens of an answer")
    parser.add_argument("--windows", type=int, default=16, help="windows, half of them beside a batch")
    parser.add_argument("--seconds", type=float, default=25.0, help="seconds of a window")
    options = parser.parse_args()
    result: dict[str, Any] = {}
    with (
        paced_executors(),
        tempfile.TemporaryDirectory() as folder,
        deployment(options, f"{folder}/batches") as (url, supervisor),
    ):
        if options.part != "interference":
            result["endurance"] = asyncio.run(endure(options, url, supervisor))
        if options.part != "endurance":
            result["interference"] = asyncio.run(interfere(options, url))
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
