"""The KV pipe of one prefill instance swallows what it carries, while gRPC and everything else work.

The first request that meets it waits some seconds; those after it do not wait for nothing again and again.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import random
import time

import pytest
from tests.support.equality import hf_greedy
from tests.support.servers.tcp_proxy import TcpProxy

from baton.cli.plan import ExtraArgs, Ratio, make_plan
from baton.cli.supervisor import Supervisor
from baton.client import AsyncClient
from baton.rpc.server import free_ports
from baton.types import PrefillPath

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

PEERS = "127.0.0.2"
"""Address that others dial: proxies listen there on the ports of the instance."""
PASSED_BYTES = 100_000
LONGEST_S = 5.0
SECONDS = 30.0
CALLERS = 4
NEW_TOKENS = 4


def prompt(rng: random.Random) -> list[int]:
    return [rng.randrange(20, 500) for _ in range(300)]


@pytest.mark.asyncio
@pytest.mark.parametrize("prefills", [1, 2])
async def test_a_pipe_that_swallows_kv_costs_some_seconds_once(model: str, starter, prefills: int) -> None:
    worker = ("--model", model, "--dtype", "float32", "--kv-blocks", "1500")
    extra = ExtraArgs(worker=worker, router=("--policy", "round_robin"))
    plan = make_plan(ratio=Ratio(prefills, 1), pipes="tcp", extra=extra)
    (kv_port,) = free_ports(1)
    workers = []
    for spec in plan.workers:
        if spec.name == "prefill-0":
            port = int(spec.health_address.rpartition(":")[2])
            where = ("--advertise", f"{PEERS}:{port}", "--kv-port", str(kv_port))
            spec = dataclasses.replace(spec, args=(*spec.args, *where))
        workers.append(spec)
    plan = dataclasses.replace(plan, workers=tuple(workers))
    rng = random.Random(7)
    async with contextlib.AsyncExitStack() as stack:
        proxies = [TcpProxy(number, host=PEERS, port=number) for number in (port, kv_port)]
        for proxy in proxies:
            await proxy.start()
            stack.push_async_callback(proxy.stop)
        supervisor = Supervisor(plan, lambda name, line: None)
        supervisor.spawn = starter.spawn
        await stack.enter_async_context(supervisor)
        client = await stack.enter_async_context(AsyncClient(plan.grpc_address, timeout=240.0))

        async def ask(tokens: list[int]):
            began = time.monotonic()
            answer = await client.generate(tokens, temperature=0.0, max_tokens=NEW_TOKENS)
            return time.monotonic() - began, tokens, answer

        warm = [await ask(prompt(rng)) for _ in range(4)]
        assert {answer.trace.path for _, _, answer in warm} == {PrefillPath.REMOTE}
        passed = 0

        async def swallow(data: bytes, to_target: bool) -> bytes:
            nonlocal passed
            passed += len(data)
            return data if passed <= PASSED_BYTES else b""

        proxies[1].disturb = swallow
        await ask(prompt(rng))
        until = time.monotonic() + SECONDS
        taken = []

        async def keep_asking() -> None:
            while time.monotonic() < until:
                taken.append(await ask(prompt(rng)))

        await asyncio.gather(*(keep_asking() for _ in range(CALLERS)))
        seconds = sorted(took_s for took_s, _, _ in taken)
        assert seconds[int(0.99 * (len(seconds) - 1))] <= LONGEST_S
        assert seconds[len(seconds) // 2] <= 1.0
        some = rng.sample(taken, min(20, len(taken)))
        assert [x.token_ids for _, _, x in some] == hf_greedy(model, [tokens for _, tokens, _ in some], NEW_TOKENS)
        if prefills == 2:  # most prompts went to the one whose KV comes
            remote = [x for _, _, x in taken if x.trace.path is PrefillPath.REMOTE]
            assert {x.trace.prefill_instance for x in remote} == {"prefill-1"}
            assert len(remote) > len(taken) // 2
        proxies[1].disturb = None
        proxies[1].reset()
        async with asyncio.timeout(240):  # the pipe is tried again, and used
            while (await ask(prompt(rng)))[2].trace.prefill_instance != "prefill-0":
                await asyncio.sleep(0.5)
