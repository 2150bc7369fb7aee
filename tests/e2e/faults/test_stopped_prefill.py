"""2P2D with one prefill instance stopped: what does not need that one does not notice.

Nobody finds the stopped instance out here (probes and patience last ten minutes), so all that waits for it still does
when the other requests have ended: whatever they ended in, they did not wait for it.
"""

from __future__ import annotations

import asyncio
import os
import random
import re
import signal

import httpx
import pytest
from tests.support.equality import hf_greedy

from baton.cli.plan import ExtraArgs, Ratio, make_plan
from baton.cli.supervisor import Supervisor
from baton.client import AsyncClient
from baton.types import PrefillPath, Role

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

SLOTS = 2
LONG, SHORT = 48, 24
NEW_TOKENS = 6
LIMIT_S = 240.0


def prompts(count: int, size: int, salt: int) -> list[list[int]]:
    rng = random.Random(salt)  # none begins as another does
    return [[rng.randrange(20, 500) for _ in range(size)] for _ in range(count)]


async def metric(supervisor: Supervisor, name: str) -> list[int]:
    """Return a metric of all decode instances."""
    values = []
    async with httpx.AsyncClient(timeout=240) as client:
        for spec in supervisor.plan.workers:
            if spec.role == Role.DECODE.value:
                text = (await client.get(f"http://{dict(spec.listens)['metrics']}")).text
                values.append(int(float(re.findall(rf"^{name} (\S+)$", text, re.MULTILINE)[0])))
    return values


def num_threads(supervisor: Supervisor) -> list[int]:
    names = [spec.name for spec in supervisor.plan.workers if spec.role == Role.DECODE.value]
    return [len(os.listdir(f"/proc/{supervisor.processes[name].pid}/task")) for name in names]


@pytest.mark.asyncio
async def test_a_stopped_prefill_instance_holds_up_those_alone_that_wait_for_it(model, starter):
    worker = ("--model", model, "--dtype", "float32", "--kv-blocks", "1500", "--prefill-stall-s", "600")
    decode = ("--remote-prefill-threshold", "64", "--max-num-seqs", str(SLOTS), "--max-loads", "200")
    # In turns, so half of the prompts go to the stopped one; each has one candidate: else a call that is not
    # acknowledged within a second would go to the other.
    router = (
        "--prefill-candidates",
        "1",
        "--policy",
        "round_robin",
        "--probe-interval-s",
        "600",
        "--no-kv-events",
        "--remote-prefill-threshold",
        "64",
    )
    extra = ExtraArgs(worker=worker, decode=(*decode, "--prefill-wait-s", "600"), router=router)
    supervisor = Supervisor(make_plan(ratio=Ratio(2, 2), extra=extra), lambda name, line: None)
    supervisor.spawn = starter.spawn
    async with supervisor, AsyncClient(supervisor.plan.grpc_address, timeout=LIMIT_S) as client:

        async def ask(prompt: list[int]):
            return await client.generate(prompt, temperature=0.0, max_tokens=NEW_TOKENS)

        warm = prompts(8, 200, 0)
        await asyncio.gather(*map(ask, warm))
        threads = num_threads(supervisor)
        stopped = supervisor.processes["prefill-0"].pid
        os.kill(stopped, signal.SIGSTOP)
        try:
            long = prompts(LONG, 160, 7)
            answers = [asyncio.create_task(ask(prompt)) for prompt in long]
            done = []
            async with asyncio.timeout(LIMIT_S):
                while len(done) < LONG // 2:
                    await asyncio.wait(
                        [answer for answer in answers if not answer.done()], return_when="FIRST_COMPLETED"
                    )
                    done = [answer.result() for answer in answers if answer.done()]
            # Hand-overs from the other one have ended; those from this one are more than the batches have slots.
            assert {(answer.trace.path, answer.trace.prefill_instance) for answer in done} == {
                (PrefillPath.REMOTE, "prefill-1")
            }
            waiting = LONG - len(done)
            assert waiting > 2 * SLOTS
            short = prompts(SHORT, 20, 3)
            quick = await asyncio.wait_for(asyncio.gather(*map(ask, short)), LIMIT_S)
            assert [answer.token_ids for answer in quick] == hf_greedy(model, short, NEW_TOKENS)
            assert {answer.trace.path for answer in quick} == {PrefillPath.LOCAL}
            assert sum(not answer.done() for answer in answers) == waiting
            assert sum(await metric(supervisor, "baton_engine_num_loading")) == waiting
            # A thread that waits for the stopped one, and one that has just copied from the other, and what gRPC starts
            # where it finds its own busy: not one per load.
            assert all(
                now < before + waiting // 2 for before, now in zip(threads, num_threads(supervisor), strict=True)
            )
        finally:
            os.kill(stopped, signal.SIGCONT)
        late = await asyncio.wait_for(asyncio.gather(*answers), LIMIT_S)
        assert [answer.token_ids for answer in late] == hf_greedy(model, long, NEW_TOKENS)
        assert not any(answer.trace.failed_prefills for answer in late)
