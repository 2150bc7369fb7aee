"""Instances of ``baton up`` are started, change roles and are ended under load: no request fails, tokens stay."""

from __future__ import annotations

import asyncio
import contextlib
import random
import re
from collections import Counter
from collections.abc import AsyncIterator

import httpx
import pytest
from tests.support.equality import hf_greedy
from tests.support.servers.supervised import supervised
from tests.support.servers.up import start, stop

from baton import AsyncClient
from baton.cli.autoscale import ProcessFleet
from baton.cli.plan import ExtraArgs, Ratio, make_plan
from baton.cli.supervisor import Supervisor
from baton.errors import ConfigError
from baton.tokenizer.tokenizer import Tokenizer
from baton.types import Role

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
TEXT = "import os\n\n\ndef main():\n    print(os.environ)\n" * 4


@pytest.fixture
async def supervisor(model, starter) -> AsyncIterator[Supervisor]:
    worker = ("--model", model, "--dtype", "float32", "--kv-blocks", "600")
    extra = ExtraArgs(worker=worker, decode=("--remote-prefill-threshold", "32"))
    async with supervised(make_plan(ratio=Ratio(1, 1), extra=extra), starter) as made:
        yield made


async def roles(client: AsyncClient) -> dict[str, Role | None]:
    return {each.instance_id: each.role for each in await client.list_instances() if each.healthy}


async def until(client: AsyncClient, wanted: dict[str, Role]) -> None:
    async with asyncio.timeout(240):
        while await roles(client) != wanted:
            await asyncio.sleep(0.05)


@contextlib.asynccontextmanager
async def load(client: AsyncClient, model: str) -> AsyncIterator[Counter[str]]:
    """Keep asking; yields what came: ``done`` and ``wrong``."""
    expected = hf_greedy(model, [Tokenizer.load(model).encode(TEXT)], 24)[0]
    found, ending = Counter[str](), asyncio.Event()

    async def ask(at: int) -> None:
        while not ending.is_set():
            # Every other answer computes its prompt anew.
            salt = f"{random.random()}" if at % 2 else ""
            answer = await client.generate(TEXT, max_tokens=24, temperature=0, cache_salt=salt)
            found["done" if answer.token_ids == expected else "wrong"] += 1

    async with asyncio.TaskGroup() as group:
        for at in range(4):
            group.create_task(ask(at))
        try:
            yield found
        finally:
            ending.set()


async def test_processes_come_change_and_go_under_load(supervisor: Supervisor, model: str) -> None:
    address = supervisor.plan.grpc_address
    async with AsyncClient(address, timeout=240, retries=0) as client, load(client, model) as found:
        fleet = ProcessFleet(client, supervisor, 5.0)
        assert await fleet.add(Role.DECODE) == "decode-1 is up"
        before = found["done"]
        async with asyncio.timeout(240):
            while found["done"] < before + 8:
                await asyncio.sleep(0.05)
        done = await fleet.switch(Role.PREFILL)
        changed = done.split()[0]
        assert done == f"{changed} is a prefill instance now"
        stayed = {"decode-0": "decode-1", "decode-1": "decode-0"}[changed]
        now = {"prefill-0": Role.PREFILL, changed: Role.PREFILL, stayed: Role.DECODE}
        assert await roles(client) == now
        with pytest.raises(ConfigError, match="at least one decode instance must stay"):
            await fleet.switch(Role.PREFILL)

        pid = supervisor.processes[changed].pid  # it dies, and comes back as what it had become
        supervisor.kill(changed)
        async with asyncio.timeout(240):
            while supervisor.processes[changed].pid == pid:
                await asyncio.sleep(0.05)
        await until(client, now)

        gone = (await fleet.remove(Role.PREFILL)).removesuffix(" has ended")
        await until(client, {name: role for name, role in now.items() if name != gone})
        assert gone not in supervisor.processes
        wanted = max(found["done"] + 8, 21)
        async with asyncio.timeout(240):
            while found["done"] < wanted:
                await asyncio.sleep(0.05)
    assert found["wrong"] == 0


def test_up_changes_the_ratio_by_itself(model: str) -> None:
    """1P2D, long prompts that nobody has: the controller makes a prefill instance of a decode instance."""
    eager = ("--scale-window-s", "2", "--scale-interval-s", "0.2", "--scale-cooldown-s", "2")
    running = start(
        "--ratio", "1P2D", "--dtype", "float32", "--model", model, "--autoscale", *eager,
        "--scale-prefill-queue-s", "0.001", "--router-args", "--remote-prefill-threshold 32",
    )  # fmt: skip

    async def ask() -> None:
        rng = random.Random(7)
        ended = asyncio.Event()

        async def keep_asking(client: AsyncClient) -> None:
            while not ended.is_set():
                prompt = [rng.randrange(20, 500) for _ in range(1200)]
                assert len((await client.generate(prompt, max_tokens=2, ignore_eos=True)).token_ids) == 2

        async with AsyncClient(running.grpc, timeout=240, retries=0) as client, asyncio.TaskGroup() as group:
            for _ in range(8):
                group.create_task(keep_asking(client))
            try:
                async with asyncio.timeout(240):
                    while Counter((await roles(client)).values()) != {Role.PREFILL: 2, Role.DECODE: 1}:
                        await asyncio.sleep(0.1)
                    while not any("done: decode-" in line for line in running.lines):
                        await asyncio.sleep(0.05)
            finally:
                ended.set()

    try:
        assert running.process.poll() is None, "".join(running.lines)
        asyncio.run(ask())
        said = [line.partition("|")[2].strip() for line in running.lines if line.lstrip().startswith("autoscale")]
        assert any(
            re.match(r"one decode instance becomes prefill: prefill [\d.]+ \(.* s of prompts wait", x) for x in said
        )
        (address,) = re.findall(r"autoscale .*metrics (127\.0\.0\.1:\d+/metrics)", "".join(running.lines))
        text = httpx.get(f"http://{address}", timeout=240).text
        assert 'baton_autoscale_changes_total{action="switch",outcome="done",role="prefill"} 1.0' in text
        stop(running)
    finally:
        running.process.kill()
        print(running.end())  # noqa: T201  pytest shows it with a failure
