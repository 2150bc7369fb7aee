"""A stream begins with the first token, even where that is no text yet."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from tests.support.servers.fake_tokens import expected_tokens
from tests.support.watched import PROMPT, TINY, watched_router

from baton.tokenizer.tokenizer import Tokenizer


def half_a_character() -> int:
    """Return a seed with which the fake worker's first token is not a whole character."""
    tokenizer = Tokenizer.load(TINY)
    for seed in range(1000):
        if "\ufffd" in tokenizer.decode(expected_tokens(PROMPT, 1, seed=seed)):
            return seed
    raise AssertionError("every token is text")


@pytest.mark.parametrize("prompt", [PROMPT, [PROMPT, PROMPT]], ids=["one", "several"])
async def test_headers_do_not_wait_for_text(tmp_path: Path, prompt: list[int] | list[list[int]]) -> None:
    async with watched_router(tmp_path, decodes=1) as watched:
        decode = watched.workers[1]
        decode.state.pause_after = 1
        body = {"prompt": prompt, "max_tokens": 3, "seed": half_a_character(), "stream": True}
        async with asyncio.timeout(240), watched.http.stream("POST", "/v1/completions", json=body) as stream:
            assert (stream.status_code, stream.headers["x-baton-decode-instance"]) == (200, "d0")
            assert len(decode.state.running) == (2 if isinstance(prompt[0], list) else 1), "no token came behind it"
            decode.state.pause_after = None
            decode.changed()
            *_, last = [line async for line in stream.aiter_lines() if line]
        assert last == "data: [DONE]"
