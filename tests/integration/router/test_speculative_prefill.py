"""Prefill of next turns: real engines, a model whose template renders answers as history otherwise than they were."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest
from prometheus_client import generate_latest
from tests.support.models.rerendered import MODEL, link_rerendered_model
from tests.support.servers.cluster import LocalCluster

from baton.config import EngineConfig
from baton.config.router import RouterConfig
from baton_router.app import RouterApp
from baton_router.frontend.openai.speculative_prefill import num_common

HINTS = {"nvext": {"agent_hints": {"speculative_prefill": True}}}
BLOCK = 16


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    link_rerendered_model(folder)
    return folder


@contextlib.asynccontextmanager
async def serving(
    model: Path, num_prefill: int = 0, *, enabled: bool = True
) -> AsyncIterator[tuple[RouterApp, openai.AsyncOpenAI]]:
    engine = EngineConfig(model=str(model), dtype="float32", device="cpu", kv_blocks=512, block_size=BLOCK)
    async with LocalCluster(engine, num_prefill=num_prefill) as cluster:
        config = RouterConfig(
            port=0,
            grpc_port=0,
            decode=tuple(x.address for x in cluster.decode),
            prefill=tuple(x.address for x in cluster.prefill),
            speculative_prefill=enabled,
        )
        app = RouterApp(config)
        await app.start()
        url = f"http://127.0.0.1:{app.http_port}/v1"
        try:
            async with asyncio.timeout(240):
                while not app.is_ready():
                    await asyncio.sleep(0.01)
            async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=240) as client:
                yield app, client
        finally:
            await app.stop()


async def say(client: openai.AsyncOpenAI, messages: list[Any], *, stream: bool, **more: Any) -> tuple[str, Any]:
    """Return the text and the usage of an answer."""
    fields: dict[str, Any] = {"temperature": 0, "max_tokens": 80, "extra_body": {"ignore_eos": True, **more}}
    if not stream:
        answer = await client.chat.completions.create(model="", messages=messages, **fields)
        return answer.choices[0].message.content or "", answer.usage
    text, usage = "", None
    options: Any = {"include_usage": True}
    async for event in await client.chat.completions.create(
        model="", messages=messages, stream=True, stream_options=options, **fields
    ):
        text += (event.choices[0].delta.content or "") if event.choices else ""
        usage = event.usage or usage
    return text, usage


def count(app: RouterApp, outcome: str) -> float:
    sample = f'baton_router_speculative_prefills_total{{outcome="{outcome}"}} '
    lines = generate_latest(app.metrics).decode().splitlines()
    return next((float(line.removeprefix(sample)) for line in lines if line.startswith(sample)), 0.0)


async def until(app: RouterApp, outcome: str, number: int) -> None:
    async with asyncio.timeout(240):
        while count(app, outcome) != number:
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("num_prefill", [0, 1])
@pytest.mark.parametrize("stream", [False, True])
async def test_the_next_turn_finds_the_answer_computed(model: Path, stream: bool, num_prefill: int) -> None:
    async with serving(model, num_prefill) as (app, client):
        missing = []
        for at, hints in enumerate((HINTS, {})):
            messages = [{"role": "user", "content": f"{at}. " + "def add(a, b):\n    return a + b\n" * 4}]
            text, _ = await say(client, messages, stream=stream, **hints)
            if hints:
                await until(app, "done", 1)
            messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "Go on."}]
            _, usage = await say(client, messages, stream=stream)
            missing.append(usage.prompt_tokens - usage.prompt_tokens_details.cached_tokens)
        prefilled, usual = missing
        assert prefilled < 2 * BLOCK, "what is left is the user's words, and a block that was not full"
        assert usual > 60, "the answer is computed again"
        assert count(app, "done") == 1


async def test_what_is_held_is_not_computed_again_and_the_flag_decides() -> None:
    messages = [{"role": "user", "content": "def add(a, b):"}]
    async with serving(MODEL) as (app, client):
        await say(client, messages, stream=False, max_tokens=2, **HINTS)
        await until(app, "held", 1)
    async with serving(MODEL, enabled=False) as (_, client):
        raw = await client.chat.completions.with_raw_response.create(
            model="", messages=messages, max_tokens=2, extra_body=HINTS
        )
        assert raw.headers["x-baton-ignored-fields"] == "nvext.agent_hints.speculative_prefill"


async def test_it_ends_with_the_router_and_leaves_no_task(model: Path) -> None:
    before = asyncio.all_tasks()
    async with serving(model) as (_, client):
        messages = [{"role": "user", "content": "def add(a, b):"}]
        await asyncio.gather(*(say(client, messages, stream=True, **HINTS) for _ in range(4)))
    assert asyncio.all_tasks() == before


@pytest.mark.parametrize(("one", "other", "same"), [("", "", 0), ("ab", "abc", 2), ("abc", "abd", 2), ("b", "a", 0)])
def test_common_beginnings(one: str, other: str, same: int) -> None:
    assert num_common(one.encode(), other.encode()) == same
