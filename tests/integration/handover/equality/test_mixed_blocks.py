"""Instances with blocks of different sizes behind one router: prefill 16, one decode instance 16 and one 32."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from tests.support.equality import hf_greedy, mixed_prompts
from tests.support.servers.supervised import supervised
from tests.support.servers.warm import WarmStarter

from baton.cli.plan import ExtraArgs, Ratio, make_plan
from baton.cli.supervisor import DeploymentPlan, Supervisor
from baton.client import AsyncClient, Generation
from baton.types import PrefillPath

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(900)]

MODEL = str(Path(__file__).resolve().parents[4] / "models" / "baton-tiny")
BLOCK_SIZES = {"prefill-0": 16, "decode-0": 16, "decode-1": 32}
PROMPTS = [prompt[:300] for prompt in mixed_prompts(14, 4000) if len(prompt) > 40]
"""None of whose tokens is as near to another one as rounding comes to, however they are batched."""
NEW_TOKENS = 8
KNOWN_S = 240.0


def plan() -> DeploymentPlan:
    worker = ("--model", MODEL, "--dtype", "float32", "--kv-blocks", "500")
    extra = ExtraArgs(worker=worker, decode=("--remote-prefill-threshold", "16"), router=("--policy-seed", "3"))
    made = make_plan(ratio=Ratio(1, 2), extra=extra)
    workers = tuple(
        dataclasses.replace(x, args=(*x.args, "--block-size", str(BLOCK_SIZES[x.name]))) for x in made.workers
    )
    return dataclasses.replace(made, workers=workers)


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def deployment(starter: WarmStarter) -> AsyncIterator[Supervisor]:
    async with supervised(plan(), starter) as supervisor:
        yield supervisor


async def ask_all(client: AsyncClient) -> list[Generation]:
    calls = (client.generate(prompt, temperature=0.0, max_tokens=NEW_TOKENS) for prompt in PROMPTS)
    return list(await asyncio.gather(*calls))


async def until_known(client: AsyncClient, prompt: list[int], name: str) -> None:
    """Wait until the router knows that an instance holds all of a prompt's full blocks, and counts them in tokens."""
    held = len(prompt) // BLOCK_SIZES[name] * BLOCK_SIZES[name]
    async with asyncio.timeout(KNOWN_S):  # the events of the last blocks may still be on their way
        while True:
            rates = {x.instance_id: x.match_rate for x in (await client.route(prompt)).candidates}
            if rates[name] == pytest.approx(held / len(prompt)):
                return
            await asyncio.sleep(0.02)


async def test_answers_are_right_and_matches_are_counted_in_tokens(deployment: Supervisor) -> None:
    expected = hf_greedy(MODEL, PROMPTS, NEW_TOKENS)
    async with AsyncClient(deployment.plan.grpc_address, timeout=240, retries=0) as client:
        first, second = await ask_all(client), await ask_all(client)
        for results in (first, second):
            assert [x.token_ids for x in results] == expected
        paths = {(x.trace.decode_instance, x.trace.path) for x in first if x.trace is not None}
        assert {("decode-0", PrefillPath.REMOTE), ("decode-1", PrefillPath.REMOTE)} <= paths
        for prompt, *results in zip(PROMPTS, first, second, strict=True):
            for name in {x.trace.decode_instance for x in results if x.trace is not None}:
                await until_known(client, prompt, name)


async def test_a_prompt_goes_back_to_where_it_is_whatever_the_blocks(deployment: Supervisor) -> None:
    async with AsyncClient(deployment.plan.grpc_address, timeout=240, retries=0) as client:
        seen = set()
        for start in range(4):  # several at once: an idle deployment sends all to the faster decode instance
            prompts = [[300 + 6 * start + i, *PROMPTS[0][1:200]] for i in range(6)]
            firsts = await asyncio.gather(
                *(client.generate(prompt, temperature=0.0, max_tokens=NEW_TOKENS) for prompt in prompts)
            )
            for prompt, first in zip(prompts, firsts, strict=True):
                assert first.trace is not None
                name = first.trace.decode_instance
                await until_known(client, prompt, name)
                again = await client.generate(prompt, temperature=0.0, max_tokens=NEW_TOKENS)
                assert again.trace is not None
                assert again.token_ids == first.token_ids
                assert again.trace.decode_instance == name
                assert again.trace.cached_tokens == (len(prompt) - 1) // BLOCK_SIZES[name] * BLOCK_SIZES[name]
                seen.add(name)
            if len(seen) == 2:
                return
        raise AssertionError(f"all went to {seen}")


async def test_nothing_is_left_behind(deployment: Supervisor) -> None:
    async with AsyncClient(deployment.plan.grpc_address, timeout=240, retries=0) as client, asyncio.timeout(KNOWN_S):
        while any(x.in_flight or x.load.blocks_active for x in await client.list_instances()):
            await asyncio.sleep(0.05)
