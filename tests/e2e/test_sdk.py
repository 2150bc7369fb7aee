"""The SDK against real services: 1P2D and two routers, all processes; hundreds of streams, and a router that dies."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from tests.support.equality import hf_greedy

from baton import AsyncClient, Client
from baton.cli.plan import ExtraArgs, Ratio, make_plan
from baton.cli.supervisor import ManagedProcess, ProcessSpec, Supervisor
from baton.config.deployment import ListenConfig
from baton.errors import DeadlineError, NotFoundError
from baton.rpc.server import free_ports
from baton.tokenizer.tokenizer import Tokenizer
from baton.types import Role

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(900)]
STREAMS, TOKENS = 500, 1200
CONTEXT = 16384
TEXTS = [
    "def main():\n",
    "import os\n\n\nclass Reader:\n",
    "# A list of names\nnames = [",
    "for item in range(10):\n    ",
]
LONG = "import os\n\n\ndef main():\n    print(os.environ)\n" * 6


@pytest.fixture(scope="module")
def model(model: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the demo model with a longer context: a stream can be too long to end before a test acts on it."""
    copy = tmp_path_factory.mktemp("model") / Path(model).name
    shutil.copytree(model, copy)
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, "max_position_embeddings": CONTEXT}))
    return str(copy)


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def deployment(model, starter) -> AsyncIterator[tuple[Supervisor, list[str]]]:
    http, grpc, *plan_router = free_ports(4)
    routers = f"127.0.0.1:{plan_router[1]},127.0.0.1:{grpc}"
    extra = ExtraArgs(
        worker=("--model", model, "--dtype", "float32", "--kv-blocks", "2000", "--routers", routers),
        decode=("--remote-prefill-threshold", "32"),
    )
    plan = make_plan(ratio=Ratio(1, 2), listen=ListenConfig(port=plan_router[0], grpc_port=plan_router[1]), extra=extra)
    lines: list[str] = []
    second = ProcessSpec(
        "router-1", "baton_router.main", ("--port", str(http), "--grpc-port", str(grpc)), f"127.0.0.1:{grpc}", "router"
    )
    supervisor = Supervisor(plan, lambda name, line: lines.append(f"{name} | {line}"))
    supervisor.spawn = starter.spawn
    try:
        async with contextlib.AsyncExitStack() as stack:
            emit = supervisor._emit
            other = ManagedProcess(second, emit, supervisor._env, start=starter.spawn)
            stack.push_async_callback(other.end, 20.0)
            await other.wait_ready(300)
            await stack.enter_async_context(supervisor)
            addresses = [plan.grpc_address, second.health_address]
            async with AsyncClient(addresses[1]) as client, asyncio.timeout(240):
                while sum(each.healthy for each in await client.list_instances()) < 3:
                    await asyncio.sleep(0.05)
            yield supervisor, addresses
    finally:
        print("\n".join(lines[-200:]))  # noqa: T201  pytest shows it with a failure


@pytest.fixture(scope="module")
def expected(model) -> list[list[int]]:
    tokenizer = Tokenizer.load(model)
    return hf_greedy(model, [tokenizer.encode(text) for text in TEXTS], 8)


async def test_five_hundred_streams_of_one_client(deployment, expected) -> None:
    """All begin before the first may end, and each has the tokens that it would have alone."""
    _, addresses = deployment
    begun, all_begun = Counter[str](), asyncio.Event()

    async def read(client: AsyncClient, at: int) -> None:
        which = at % len(TEXTS)
        tokens: list[int] = []
        async with await client.generate(TEXTS[which], stream=True, max_tokens=8, temperature=0) as stream:
            begun["streams"] += 1
            if begun["streams"] == STREAMS:
                all_begun.set()
            await all_begun.wait()
            async for chunk in stream:
                tokens += chunk.token_ids
        assert tokens == expected[which][:8]

    async with AsyncClient(addresses[0], timeout=300) as client, asyncio.TaskGroup() as group:
        for at in range(STREAMS):
            group.create_task(read(client, at))
    async with AsyncClient(addresses[0]) as client:
        await idle(client)


async def idle(client: AsyncClient) -> float:
    """Wait until nothing runs and no block is in use; returns the seconds it took."""
    loop = asyncio.get_running_loop()
    began = loop.time()
    async with asyncio.timeout(240):
        while True:
            found = await client.list_instances()
            if not any(x.in_flight or x.load.num_running or x.load.blocks_active for x in found if x.healthy):
                return loop.time() - began
            await asyncio.sleep(0.02)


async def test_cancelling_frees_the_blocks(deployment, record_property) -> None:
    _, addresses = deployment
    async with AsyncClient(addresses[0]) as client:
        streams = [
            await client.generate(text, stream=True, max_tokens=1500, ignore_eos=True, cache_salt=f"cancel {at}")
            for at, text in enumerate([*TEXTS, LONG])
        ]
        await asyncio.gather(*(anext(stream) for stream in streams))
        assert sum(each.in_flight for each in await client.list_instances()) >= len(streams)
        for stream in streams:
            stream.cancel()
        record_property("seconds_until_free", await idle(client))


async def test_a_deadline_holds_and_leaves_nothing(deployment) -> None:
    _, addresses = deployment
    async with AsyncClient(addresses[0]) as client:
        with pytest.raises(DeadlineError):
            await client.generate(LONG, max_tokens=1500, ignore_eos=True, timeout=0.3)
        await idle(client)


async def test_health_stats_and_explanations(deployment) -> None:
    _, addresses = deployment

    def ask() -> Any:
        with Client(addresses) as client:
            answer = client.generate(LONG, max_tokens=4, temperature=0, cache_salt="explained")
            return (
                client.health(),
                client.stats(window=30),
                client.explain(answer.request_id),
                answer,
                client.route("x"),
            )

    health, stats, told, answer, _ = await asyncio.to_thread(ask)
    assert health == dict.fromkeys(addresses, True)
    assert stats.ttft_ms.p50 <= stats.ttft_ms.p99
    assert stats.tokens_per_s > 0
    assert told["id"].startswith(answer.request_id)
    assert told["trace"]["decode"] == answer.trace.decode_instance
    assert told["generated_tokens"] == 4
    assert told["why"]
    async with AsyncClient(addresses[1]) as other:
        with pytest.raises(NotFoundError):
            await other.explain(answer.request_id)  # the router that placed it remembers it


async def owner_of_the_stream(client: AsyncClient, *, besides: str = "") -> str:
    """Wait for a decode instance, other than ``besides``, that has a request of a router; returns its id."""
    async with asyncio.timeout(240):
        while True:
            for each in await client.list_instances():
                if each.in_flight and each.role is Role.DECODE and each.instance_id != besides:
                    return each.instance_id
            await asyncio.sleep(0.02)


async def test_a_stream_goes_on_when_its_router_and_then_its_instance_is_killed(deployment, model) -> None:
    """No token and no character is repeated or missing, whichever process dies.

    The request asks for all of the context, so that its stream cannot end, however late this test reads it, before its
    instance is known and killed. It is cancelled once the tokens that are compared have come.
    """
    supervisor, addresses = deployment
    tokenizer = Tokenizer.load(model)
    prompt = tokenizer.encode(LONG)
    (expected,) = hf_greedy(model, [prompt], TOKENS)
    most = CONTEXT - len(prompt) - 1
    async with AsyncClient(addresses, timeout=400) as client, AsyncClient(addresses[1]) as second:
        tokens: list[int] = []
        text = ""
        stream = await client.generate(LONG, stream=True, max_tokens=most, temperature=0, ignore_eos=True)
        async with stream:
            async for chunk in stream:
                before, tokens, text = len(tokens), [*tokens, *chunk.token_ids], text + chunk.text
                if before < 10 <= len(tokens):
                    supervisor.kill("router")
                if before < 60 <= len(tokens):
                    killed = await owner_of_the_stream(second)
                    supervisor.kill(killed)
                    await owner_of_the_stream(second, besides=killed)
                if len(tokens) >= TOKENS:
                    break
        assert tokens[:TOKENS] == expected
        assert tokenizer.decode(tokens).startswith(text)
        await idle(second)
