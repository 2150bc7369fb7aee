"""Streams on the fast path through a whole router: one that breaks, a client that leaves, one that does not read."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.servers.fake_tokens import expected_tokens
from tests.support.watched import PROMPT, TINY, Watched, watched_router

from baton.tokenizer import Tokenizer
from baton_router.frontend.openai.fast_events import FastEvents

TOKENS = 60
BODY: dict[str, Any] = {"prompt": PROMPT, "max_tokens": TOKENS, "seed": 7, "ignore_eos": True}


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Tokens that took the fast path."""
    ids, push = list[int](), FastEvents.push

    def noted(self: FastEvents, token_id: int, now: float) -> bool:
        took = push(self, token_id, now)
        if took:
            ids.append(token_id)
        return took

    monkeypatch.setattr(FastEvents, "push", noted)
    return ids


async def stream(watched: Watched, **fields: Any) -> list[dict[str, Any]]:
    """Return the events of a streamed answer."""
    body = {**BODY, "stream": True, **fields}
    async with watched.http.stream("POST", "/v1/completions", json=body) as answer:
        assert answer.status_code == 200
        *events, done = [line.removeprefix("data: ") async for line in answer.aiter_lines() if line]
    assert done == "[DONE]"
    return [json.loads(event) for event in events]


def text(events: list[dict[str, Any]]) -> str:
    return "".join(event["choices"][0]["text"] for event in events if event["choices"])


async def metric(watched: Watched, name: str) -> float:
    scraped = (await watched.http.get("/metrics")).text
    return sum(float(line.split()[-1]) for line in scraped.splitlines() if line.startswith(name))


async def test_a_stream_is_the_same_on_the_fast_path(tmp_path: Path, taken: list[int]) -> None:
    expected = Tokenizer.load(TINY).decode(expected_tokens(PROMPT, TOKENS, seed=7))
    async with watched_router(tmp_path, decodes=2) as watched:
        decodes = watched.workers[1:]
        assert text(await stream(watched)) == expected
        taken.clear()
        before = [await metric(watched, f"baton_request_{name}") for name in ("generated_tokens", "itl_seconds_count")]
        events = await stream(watched, stream_options={"include_usage": True})
        assert text(events) == expected
        assert events[-1]["usage"]["completion_tokens"] == TOKENS
        assert taken
        after = [await metric(watched, f"baton_request_{name}") for name in ("generated_tokens", "itl_seconds_count")]
        assert [b - a for a, b in zip(before, after, strict=True)] == [TOKENS, TOKENS - 1]
        for decode in decodes:
            decode.state.break_after = TOKENS // 2  # both: wherever it runs
        taken.clear()
        assert text(await stream(watched)) == expected
        assert taken
        assert await metric(watched, "baton_router_migrations_total") == 1
        assert [x.load.tokens for x in watched.app.registry.instances()] == [0] * 3


async def test_a_client_that_leaves_ends_its_request(tmp_path: Path, taken: list[int]) -> None:
    async with watched_router(tmp_path, decodes=1) as watched:
        decode = watched.workers[1]
        await stream(watched)
        decode.state.pause_after = TOKENS // 2
        taken.clear()
        async with watched.http.stream("POST", "/v1/completions", json={**BODY, "stream": True}) as answer:
            lines = answer.aiter_lines()
            async with asyncio.timeout(20):
                while len(taken) < TOKENS / 4:
                    await anext(lines)
        await decode.wait_until(lambda: bool(decode.state.cancelled))
        assert [x.load.tokens for x in watched.app.registry.instances()] == [0] * 2


async def test_a_client_that_does_not_keep_up_gets_what_waited_for_it(tmp_path: Path, taken: list[int]) -> None:
    expected = Tokenizer.load(TINY).decode(expected_tokens(PROMPT, TOKENS, seed=7))
    async with watched_router(tmp_path, decodes=1) as watched:
        decode, pieces = watched.workers[1], list[str]()
        await stream(watched)
        decode.state.pause_after = TOKENS // 2
        taken.clear()
        async with watched.http.stream("POST", "/v1/completions", json={**BODY, "stream": True}) as answer:
            lines = answer.aiter_lines()
            async with asyncio.timeout(20):
                while not taken:
                    pieces.append(await anext(lines))
            (connection,) = [x for x in watched.app._http.server_state.connections if x._serving is not None]
            connection.pause_writing()  # what its transport does when the client leaves too much in its buffer
            decode.state.pause_after = None
            decode.changed()
            await decode.wait_until(lambda: len(decode.state.finished) == 2)
            held = len(taken)
            await watched.get("/v1/models")  # another connection is served meanwhile
            assert len(taken) == held
            connection.resume_writing()
            pieces += [line async for line in lines]
        *events, done = [line.removeprefix("data: ") for line in pieces if line]
        assert (text([json.loads(event) for event in events]), done) == (expected, "[DONE]")
