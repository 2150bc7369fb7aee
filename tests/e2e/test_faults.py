"""Instances are killed while they work. Every answer must be right to the last token, and nothing may leak."""

from __future__ import annotations

import asyncio
import os
import random
import signal

import pytest
import pytest_asyncio

from baton.cli.plan import ExtraArgs, Ratio, make_plan
from baton.cli.supervisor import Supervisor
from baton.client import AsyncClient
from baton.testing.equality import hf_greedy
from baton.text.tokenizer import Tokenizer
from baton.types import Role

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(900)]

ROUNDS = 20
NEW_TOKENS = 80
SETTLED_S = 60.0


@pytest.fixture(scope="module")
def prompts(model, texts) -> list[list[int]]:
    tokenizer = Tokenizer.load(model)
    return [tokenizer.encode(text)[:1500] for text in texts]


@pytest.fixture(scope="module")
def expected(model, prompts) -> list[list[int]]:
    return hf_greedy(model, prompts, NEW_TOKENS)


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def deployment(model):
    lines: list[str] = []
    worker = ("--model", model, "--dtype", "float32", "--kv-blocks", "1200", "--prefill-chunk", "128")
    extra = ExtraArgs(worker=worker, decode=("--remote-prefill-threshold", "32", "--prefill-stall-s", "4"))
    plan = make_plan(ratio=Ratio(2, 3), port=0, extra=extra)
    try:
        async with Supervisor(plan, lambda name, line: lines.append(f"{name} | {line}")) as supervisor:
            yield supervisor
    finally:
        print("\n".join(lines[-300:]))  # noqa: T201  pytest shows it with a failure


async def run_round(supervisor: Supervisor, prompts, expected, role: Role, rng: random.Random) -> list:
    """Send every prompt twice, kill one instance of the role meanwhile, check every answer; returns the traces."""
    async with AsyncClient(supervisor.plan.grpc_address, timeout=120.0, retries=0) as client:
        order = [i for i in range(len(prompts)) for _ in range(2)]
        rng.shuffle(order)

        async def answer(i: int):
            # ignore the cache for half of them, so that there is always something to transfer
            salt = f"{rng.random()}" if rng.random() < 0.5 else ""
            return await client.generate(prompts[i], temperature=0.0, max_tokens=NEW_TOKENS, cache_salt=salt)

        tasks = [asyncio.create_task(answer(i)) for i in order]
        await asyncio.sleep(rng.uniform(0.0, 1.2))  # the moment of the fault
        victims = [name for name in supervisor.processes if name.startswith(role.value)]
        alive = [name for name in victims if supervisor.processes[name].returncode is None]
        supervisor.kill(rng.choice(alive))
        results = await asyncio.gather(*tasks)
        for i, result in zip(order, results, strict=True):
            assert result.token_ids == expected[i], f"prompt {i}: {result.trace}"
        return [result.trace for result in results]


async def settle(supervisor: Supervisor) -> None:
    """Wait until everybody is back and every pool is empty but for cached blocks."""
    names = {spec.name for spec in supervisor.plan.workers}
    last: list = []
    async with AsyncClient(supervisor.plan.grpc_address) as client:
        try:
            async with asyncio.timeout(SETTLED_S):
                while True:
                    last = [item for item in await client.list_instances() if item.healthy]
                    idle = all(item.load.blocks_total and not item.load.blocks_active for item in last)
                    busy = [item for item in last if item.in_flight or item.load.num_running or item.load.num_loading]
                    if {item.instance_id for item in last} == names and idle and not busy:
                        return
                    await asyncio.sleep(0.05)
        except TimeoutError:
            pytest.fail(f"not settled: {last}")


@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
async def test_killed_instances_cost_no_token(deployment, prompts, expected, role):
    rng = random.Random(f"kill {role}")
    traces = []
    for _ in range(ROUNDS):
        traces += await run_round(deployment, prompts, expected, role, rng)
        await settle(deployment)
    if role is Role.DECODE:
        assert sum(trace.num_migrations for trace in traces) > 0
    else:
        assert sum(len(trace.failed_prefills) for trace in traces) > 0


async def test_a_frozen_prefill_instance_delays_but_does_not_stop_an_answer(deployment, prompts, expected):
    """SIGSTOP: the process is there, its sockets too, but nothing moves."""
    process = deployment.processes["prefill-0"]
    os.kill(process.pid, signal.SIGSTOP)
    try:
        async with AsyncClient(deployment.plan.grpc_address, timeout=120.0) as client:
            answers = await asyncio.gather(
                *(client.generate(prompt, temperature=0.0, max_tokens=NEW_TOKENS) for prompt in prompts)
            )
        assert [answer.token_ids for answer in answers] == expected
    finally:
        os.kill(process.pid, signal.SIGCONT)
    await settle(deployment)


async def test_a_client_that_goes_away_leaves_nothing_within_a_second(deployment, prompts):
    async with AsyncClient(deployment.plan.grpc_address) as client:
        streams = [
            await client.generate(prompt, temperature=0.0, max_tokens=400, ignore_eos=True, stream=True)
            for prompt in prompts
        ]
        await asyncio.gather(*(anext(stream) for stream in streams))
        for stream in streams:
            stream.cancel()
        async with asyncio.timeout(1.0 + 0.5):  # load reports come every 100 ms and travel on two busy cores
            while any(item.load.blocks_active or item.in_flight for item in await client.list_instances()):
                await asyncio.sleep(0.02)
