"""Streams with a token writer in a whole router: one that breaks, a client that leaves, one that does not read."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.servers.fake_tokens import expected_tokens
from tests.support.watched import PROMPT, TINY, Watched, watched_router

from baton.tokenizer import Tokenizer
from baton_router.frontend.openai.answer import EventWriter

TOKENS = 60
EXPECTED = Tokenizer.load(TINY).decode(expected_tokens(PROMPT, TOKENS, seed=7))
BODY: dict[str, Any] = {"prompt": PROMPT, "max_tokens": TOKENS, "seed": 7, "ignore_eos": True}


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Tokens that writers took."""
    ids, push = list[int](), EventWriter.push

    def noted(self: EventWriter, token_id: int, now: float) -> bool:
        took = push(self, token_id, now)
        if took:
            ids.append(token_id)
        return took

    monkeypatch.setattr(EventWriter, "push", noted)
    return ids


async def stream(watched: Watched, **fields: Any) -> list[dict[str, Any]]:
    """Return the events of a streamed answer."""
    body = {**BODY, "stream": True, **fields}
    async with watched.http.stream("POST", "/v1/completions", json=body) as answer:
        assert answer.status_code == 200
        return events([line async for line in answer.aiter_lines()])


def events(lines: list[str]) -> list[dict[str, Any]]:
    *found, done = [line.removeprefix("data: ") for line in lines if line]
    assert done == "[DONE]"
    return [json.loads(event) for event in found]


def text(found: list[dict[str, Any]]) -> str:
    return "".join(event["choices"][0]["text"] for event in found if event["choices"])


async def give(watched: Watched, tokens: int) -> None:
    """Have the only request's instance give its tokens, each when the one before has arrived."""

    def arrived() -> bool:
        return any(len(run._sequences[0].token_ids) == count for run in watched.app.dispatcher._running)

    for count in range(1, tokens + 1):
        for decode in watched.workers[1:]:
            decode.state.pause_after = count
            decode.changed()
        await watched.until(arrived)


def go_on(watched: Watched) -> None:
    """Have all instances give all tokens."""
    for decode in watched.workers[1:]:
        decode.state.pause_after = None
        decode.changed()


async def metric(watched: Watched, name: str) -> float:
    scraped = (await watched.http.get("/metrics")).text
    return sum(float(line.split()[-1]) for line in scraped.splitlines() if line.startswith(name))


@pytest.fixture
async def watched(tmp_path: Path) -> AsyncIterator[Watched]:
    """A router over two instances that give no token yet, and that knows the tokens' texts."""
    async with watched_router(tmp_path, decodes=2) as watched:
        assert text(await stream(watched)) == EXPECTED
        for decode in watched.workers[1:]:
            decode.state.pause_after = 0
        yield watched
        assert [x.load.tokens for x in watched.app.registry.instances()] == [0] * 3


async def test_a_stream_with_a_writer_is_the_same(watched: Watched, taken: list[int]) -> None:
    names = ("baton_request_generated_tokens_total", "baton_request_itl_seconds_count")
    before = [await metric(watched, name) for name in names]
    answer = asyncio.create_task(stream(watched, stream_options={"include_usage": True}))
    await give(watched, TOKENS - 1)
    go_on(watched)
    found = await answer
    assert text(found) == EXPECTED
    assert found[-1]["usage"]["completion_tokens"] == TOKENS
    assert len(taken) > TOKENS / 4, "whole characters behind whole characters"
    assert [await metric(watched, name) for name in names] == [before[0] + TOKENS, before[1] + TOKENS - 1]


async def test_a_stream_goes_on_elsewhere_behind_what_a_writer_took(watched: Watched, taken: list[int]) -> None:
    answer = asyncio.create_task(stream(watched))
    await give(watched, TOKENS // 2)
    assert taken
    (broken,) = [decode for decode in watched.workers[1:] if decode.state.running]
    await broken.stop()
    go_on(watched)
    assert text(await answer) == EXPECTED
    assert await metric(watched, "baton_router_migrations_total") == 1


async def test_a_client_that_leaves_ends_its_request(watched: Watched, taken: list[int]) -> None:
    answer = asyncio.create_task(stream(watched))
    await give(watched, TOKENS // 2)
    assert taken
    (decode,) = [decode for decode in watched.workers[1:] if decode.state.running]
    answer.cancel()
    await decode.wait_until(lambda: bool(decode.state.cancelled))


async def test_a_client_that_does_not_keep_up_gets_what_waited_for_it(watched: Watched, taken: list[int]) -> None:
    giving = asyncio.create_task(give(watched, TOKENS // 2))
    async with watched.http.stream("POST", "/v1/completions", json={**BODY, "stream": True}) as answer:
        await giving
        (connection,) = [x for x in watched.app._http.server_state.connections if x._serving is not None]
        connection.pause_writing()  # what its transport does when the client leaves too much in its buffer
        (decode,) = [decode for decode in watched.workers[1:] if decode.state.running]
        held = len(taken)
        go_on(watched)
        await decode.wait_until(lambda: not decode.state.running)
        await watched.get("/v1/models")  # another connection is served meanwhile
        assert (len(taken), bool(taken)) == (held, True)
        connection.resume_writing()
        assert text(events([line async for line in answer.aiter_lines()])) == EXPECTED
