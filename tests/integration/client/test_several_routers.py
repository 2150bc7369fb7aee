"""A client of two routers: one is killed, and answers go on with the other, no token repeated or missing."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
from tests.integration.router.test_router_process import Process, router
from tests.support.servers.fake_tokens import expected_tokens
from tests.support.servers.fake_worker import FakeWorker

from baton import AsyncClient
from baton.errors import InvalidRequestError, UnavailableError
from baton.tokenizer import Tokenizer
from baton.types import Role

MODEL = "models/baton-tiny"
PROMPT = list(range(20, 60))
TOKENS = 24


@dataclass
class World:
    worker: FakeWorker
    routers: list[Process]

    @property
    def addresses(self) -> list[str]:
        return [each.grpc for each in self.routers]


@pytest.fixture
async def world() -> AsyncIterator[World]:
    async with contextlib.AsyncExitStack() as stack:
        worker = FakeWorker(Role.DECODE, "d0")
        worker.state.model_path = MODEL
        await worker.start()
        stack.push_async_callback(worker.stop)
        flags = ("--decode", worker.address, "--reconnect-max-s", "0.2")
        routers = [await stack.enter_async_context(router(*flags)) for _ in range(2)]
        for each in routers:
            http = await stack.enter_async_context(httpx.AsyncClient(base_url=f"http://{each.http}", timeout=240))
            async with asyncio.timeout(240):
                while (await http.get("/v1/models")).status_code != 200:
                    await asyncio.sleep(0.02)
        yield World(worker, routers)


async def broken_after(world: World, tokens: int, prompt: Any, **options: Any) -> Any:
    """Begin a stream, kill the router that it runs through after some tokens, and return the whole answer."""
    world.worker.state.pause_after = tokens
    async with AsyncClient(world.addresses, timeout=240) as client:
        stream = await client.generate(prompt, stream=True, max_tokens=TOKENS, **options)
        async with stream:
            chunks = []
            async for chunk in stream:
                chunks.append(chunk)
                come = sum(len(each.token_ids) for each in chunks)  # a chunk may have several
                if come == tokens * options.get("n", 1) and world.routers[0].process.returncode is None:
                    world.routers[0].process.kill()
                    await world.routers[0].process.wait()
                    world.worker.state.pause_after = None
                    world.worker.changed()
        answer = stream.result()
        for choice in answer.choices:
            mine = [chunk for chunk in chunks if chunk.index == choice.index]
            assert [token for chunk in mine for token in chunk.token_ids] == choice.token_ids
            assert "".join(chunk.text for chunk in mine) == choice.text
        return answer


@pytest.mark.parametrize("options", [{"seed": 7}, {"temperature": 0, "seed": 0}, {"seed": 11, "n": 2}])
async def test_a_stream_goes_on_where_it_stopped(world: World, options: dict[str, Any]) -> None:
    answer = await broken_after(world, 9, PROMPT, **options)
    tokenizer = Tokenizer.load(MODEL)
    for index, choice in enumerate(answer.choices):
        assert choice.token_ids == expected_tokens(PROMPT, TOKENS, seed=options["seed"], index=index)
        assert choice.text == tokenizer.decode(choice.token_ids)
        assert choice.finish_reason == "length"
    assert answer.trace.num_migrations == 1


async def test_text_and_conversations_go_on_too(world: World) -> None:
    tokenizer = Tokenizer.load(MODEL)
    text = "import os\n\n\ndef main():\n"
    answer = await broken_after(world, 5, text, seed=3)
    assert answer.token_ids == expected_tokens(tokenizer.encode(text), TOKENS, seed=3)
    assert answer.text == tokenizer.decode(answer.token_ids)


async def test_text_that_was_held_back_for_a_stop_string_is_not_lost(world: World) -> None:
    tokenizer = Tokenizer.load(MODEL)
    tokens = expected_tokens(PROMPT, TOKENS, seed=5)
    whole = tokenizer.decode(tokens)
    begun = tokenizer.decode(tokens[:9])
    # It begins with the last character that came before the break, so that this was held back; and never ends.
    answer = await broken_after(world, 9, PROMPT, seed=5, stop=[begun[-1] + "\x00never"])
    assert (answer.text, answer.token_ids) == (whole, tokens)


async def test_calls_move_on_and_one_router_alone_breaks(world: World) -> None:
    with pytest.raises(InvalidRequestError, match="address"):
        AsyncClient([])
    async with AsyncClient(world.addresses, timeout=240) as client:
        assert len(await client.list_instances()) == 1
        world.routers[0].process.kill()
        await world.routers[0].process.wait()
        assert len(await client.list_instances()) == 1
        answer = await client.generate(PROMPT, max_tokens=4, seed=1)
        assert answer.token_ids == expected_tokens(PROMPT, 4, seed=1)
    world.worker.state.pause_after = 3
    async with AsyncClient(world.addresses[1], timeout=240) as alone:
        stream = await alone.generate(PROMPT, stream=True, max_tokens=9, seed=1)
        await anext(stream)
        world.routers[1].process.kill()
        with pytest.raises(UnavailableError):
            await stream.collect()
