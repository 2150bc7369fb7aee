"""Streams beside schemas that cost much: what they cost, and what those feel whose answers are in the same instances.

Through real services: ``baton up``, 1P1D. Costly schemas go in one after the other, each with names of its own, so that
none is known; free streams run meanwhile, and their tokens must be those that they have by themselves.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import psutil

STREAMS, TOKENS = 6, 200
REPEATS = 5
"""Of each costly schema, for its CPU time."""


def deep(levels: int = 500) -> dict[str, Any]:
    """Return a schema in a schema in a schema."""
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(levels):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return schema


def _deep_text(number: int, levels: int = 500) -> str:
    inner = f'{{"const": {number}}}'  # json.dumps does not go so deep
    return '{"properties": {"a": ' * levels + inner + "}}" * levels


def _enum_text(number: int, count: int) -> str:
    return json.dumps({"enum": [f"{number} name {at}" for at in range(count)]})


def _doubling_text(number: int, length: int = 40) -> str:
    """Return a schema of 2 KB for which a compiler takes for ever: it is ended."""
    names: dict[str, Any] = {f"d{at}": {"allOf": 2 * [{"$ref": f"#/$defs/d{at + 1}"}]} for at in range(length)}
    return json.dumps(
        {"$ref": "#/$defs/d0", "$defs": {**names, f"d{length}": {"type": "string", "pattern": f"{number}a+"}}}
    )


COSTLY: dict[str, tuple[Callable[[int], str], int]] = {
    "enum of 100,000 strings": (lambda number: _enum_text(number, 100_000), 400),
    "enum of 10,000 strings": (lambda number: _enum_text(number, 10_000), 200),
    "schema 60 deep": (lambda number: _deep_text(number, 60), 200),
    "schema 500 deep": (_deep_text, 400),
    "allOf of two, 40 times": (_doubling_text, 400),
}
"""How the JSON of each is made from a number, and the status of its answer."""


def body(schema: str) -> str:
    """Return a request for an answer that follows a schema."""
    message = '{"role": "user", "content": "JSON: "}'
    form = f'{{"type": "json_schema", "json_schema": {{"name": "s", "schema": {schema}}}}}'
    return f'{{"messages": [{message}], "max_tokens": 2, "response_format": {form}}}'


async def send_costly(client: httpx.AsyncClient, name: str, number: int) -> None:
    """Send a costly schema; its answer must be what it should be, with the reason where it is refused."""
    make, status = COSTLY[name]
    answer = await client.post(
        "/v1/chat/completions", content=body(make(number)), headers={"Content-Type": "application/json"}
    )
    assert answer.status_code == status, f"{name}: {answer.status_code} {answer.text[:300]}"
    if status == 400:
        assert any(word in answer.json()["error"]["message"] for word in ("at most", "nested", "costs too much"))


async def stream(client: httpx.AsyncClient, number: int, tokens: int) -> tuple[str, list[float]]:
    """Have a free answer streamed; return its text and the seconds between its events."""
    fields = {
        "prompt": f"def function_{number}(self):", "max_tokens": tokens, "ignore_eos": True, "stream": True,
        "temperature": 1.0, "seed": number,
    }  # fmt: skip
    text, gaps, last = "", list[float](), 0.0
    async with client.stream("POST", "/v1/completions", json=fields) as answer:
        assert answer.status_code == 200, await answer.aread()
        async for line in answer.aiter_lines():
            if not line.startswith("data: {"):
                continue
            now = time.perf_counter()
            if last:
                gaps.append(now - last)
            last = now
            text += json.loads(line.removeprefix("data: "))["choices"][0]["text"]
    return text, gaps


async def streams(client: httpx.AsyncClient, tokens: int = TOKENS) -> tuple[list[str], list[float]]:
    """Have several free answers streamed at once; return their texts, and all seconds between events."""
    found = await asyncio.gather(*(stream(client, number, tokens) for number in range(STREAMS)))
    return [text for text, _ in found], [gap for _, gaps in found for gap in gaps]


async def streams_beside(
    client: httpx.AsyncClient, numbers: Iterator[int], tokens: int = TOKENS, names: Iterator[str] | None = None
) -> tuple[list[str], list[float], Counter[str]]:
    """Have the same answers streamed while costly schemas go in, one after the other; and count these.

    Args:
        client: Of the router.
        numbers: What the schemas are made from.
        tokens: Of each answer.
        names: Which schemas; default: all of them in turn.
    """
    running = asyncio.ensure_future(streams(client, tokens))
    sent = Counter[str]()
    for name in names or itertools.cycle(COSTLY):
        await send_costly(client, name, next(numbers))
        sent[name] += 1
        if running.done():
            break
    texts, gaps = await running
    return texts, gaps, sent


def cpu_seconds(process: psutil.Process) -> float:
    """Return the processor time of a process and all that it started, those that have ended among them."""
    total = 0.0
    for one in (process, *process.children(recursive=True)):
        times = one.cpu_times()
        total += times.user + times.system + times.children_user + times.children_system
    return total


def quantiles(gaps: list[float]) -> str:
    """Return p50, p99 and the longest, in milliseconds."""
    marks = statistics.quantiles(gaps, n=100)
    return f"p50 {1e3 * marks[49]:6.1f}  p99 {1e3 * marks[98]:6.1f}  max {1e3 * max(gaps):6.1f} ms"


async def report(url: str, pid: int) -> list[str]:
    """Measure; return lines of a report."""
    found, numbers, process = list[str](), itertools.count(), psutil.Process(pid)
    async with httpx.AsyncClient(base_url=url, timeout=120, limits=httpx.Limits(max_connections=32)) as client:
        alone, _ = await streams(client)  # warms up
        began, cpu = time.monotonic(), cpu_seconds(process)
        await asyncio.sleep(2.0)  # what a deployment takes that has nothing to do
        idle = (cpu_seconds(process) - cpu) / (time.monotonic() - began)
        for name in COSTLY:
            await send_costly(client, name, next(numbers))
            began, cpu = time.monotonic(), cpu_seconds(process)
            for _ in range(REPEATS):
                await send_costly(client, name, next(numbers))
            each = (cpu_seconds(process) - cpu - idle * (time.monotonic() - began)) / REPEATS
            found.append(f"{1e3 * each:7.0f} ms of CPU in all processes  {name} ({COSTLY[name][1]})")
        gaps: dict[str, list[float]] = {"alone": [], "beside costly schemas": []}
        sent = Counter[str]()
        for _ in range(3):
            texts, found_gaps = await streams(client)
            gaps["alone"] += found_gaps
            beside, found_gaps, more = await streams_beside(client, numbers)
            gaps["beside costly schemas"] += found_gaps
            sent += more
            assert texts == beside == alone, "a stream has other tokens beside costly schemas"
    found += [f"{STREAMS} streams {name}: {quantiles(each)}" for name, each in gaps.items()]
    return [*found, f"{sent.total()} costly schemas meanwhile"]
