"""Instances are killed while they work. Every answer must be right to the last token, and nothing may leak."""

from __future__ import annotations

import asyncio
import os
import random
import re
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import httpx
import pytest
import pytest_asyncio
from tests.support.equality import hf_greedy
from tests.support.servers.supervised import supervised

from baton.cli.plan import ExtraArgs, Ratio, make_plan
from baton.cli.supervisor import Supervisor
from baton.client import AsyncClient
from baton.errors import UnavailableError
from baton.tokenizer.tokenizer import Tokenizer
from baton.types import Role

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(1200)]

ROUNDS = 20
NEW_TOKENS = 80
LONG = 500
SETTLED_S = 240.0
LEASE_S = 40.0
SEED = int(os.environ.get("BATON_TEST_FAULTS_SEED") or 7)
"""Of victims and moments: the same each time; the variable gives others."""


@pytest.fixture(scope="module")
def prompts(model, texts) -> list[list[int]]:
    tokenizer = Tokenizer.load(model)
    return [tokenizer.encode(text)[:1500] for text in texts]


@pytest.fixture(scope="module")
def expected(model, prompts) -> list[list[int]]:
    return hf_greedy(model, prompts, NEW_TOKENS)


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def deployment(model, starter):
    worker = ("--model", model, "--dtype", "float32", "--kv-blocks", "1200", "--prefill-chunk", "128")
    decode = ("--remote-prefill-threshold", "32", "--prefill-stall-s", "4")
    # What is stopped on purpose is not to be taken for lost before its test is over, however slow the machine is.
    router = ("--probe-failures", "40")
    extra = ExtraArgs(worker=worker, prefill=("--lease-s", f"{LEASE_S:g}"), decode=decode, router=router)
    plan = make_plan(ratio=Ratio(2, 3), extra=extra)
    async with supervised(plan, starter) as supervisor:
        yield supervisor


@dataclass
class Progress:
    """How far the streamed answers of a round have come: faults strike at a point of the work, not of the clock."""

    begun: int = 0
    tokens: int = 0
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    async def until(self, reached: Callable[[], bool]) -> None:
        while not reached():
            self.changed.clear()
            await self.changed.wait()


class Round:
    """Every prompt twice at once, once as a stream; one prefill and one decode instance are killed meanwhile."""

    def __init__(self, supervisor: Supervisor, prompts, expected, number: int) -> None:
        self.supervisor, self.prompts, self.expected = supervisor, prompts, expected
        self.rng = random.Random(f"{SEED} {number}")
        self.at_once = number % 4 == 3
        self.name = f"seed {SEED}, round {number}"
        self.progress = Progress()
        self.traces: list = []
        self.dead: dict[str, int] = {}

    async def run(self) -> None:
        jobs = [(i, streamed) for i in range(len(self.prompts)) for streamed in (True, False)]
        self.rng.shuffle(jobs)
        # Half of them ignore the cache, so that there is always something to transfer.
        salts = [f"{self.rng.random()}" if self.rng.random() < 0.5 else "" for _ in jobs]
        begun = self.rng.randrange(len(self.prompts))
        tokens = self.rng.randrange(9 * sum(map(len, self.expected)) // 10)
        async with (
            AsyncClient(self.supervisor.plan.grpc_address, timeout=400.0, retries=0) as client,
            asyncio.TaskGroup() as group,
        ):
            for (i, streamed), salt in zip(jobs, salts, strict=True):
                group.create_task(self.answer(client, i, streamed, salt))
            if self.at_once:  # requests lose both the instances that work for them
                group.create_task(self.kill((Role.PREFILL, Role.DECODE), lambda: self.progress.begun >= begun))
            else:
                group.create_task(self.kill((Role.PREFILL,), lambda: self.progress.begun >= begun))
                group.create_task(self.kill((Role.DECODE,), lambda: self.progress.tokens >= tokens))

    def options(self, i: int) -> dict:
        return {"temperature": 0.0, "max_tokens": NEW_TOKENS}

    async def answer(self, client: AsyncClient, i: int, streamed: bool, salt: str) -> None:
        options = {**self.options(i), "cache_salt": salt}
        if not streamed:
            result = await client.generate(self.prompts[i], **options)
            token_ids, trace = result.token_ids, result.trace
        else:
            stream, token_ids = await client.generate(self.prompts[i], stream=True, **options), []
            async for chunk in stream:
                self.progress.begun += not token_ids
                self.progress.tokens += len(chunk.token_ids)
                self.progress.changed.set()
                token_ids += chunk.token_ids
            trace = stream.trace
        assert token_ids == self.expected[i], f"{self.name}: prompt {i}, streamed {streamed}: {trace}"
        self.traces.append(trace)

    async def kill(self, roles: tuple[Role, ...], reached: Callable[[], bool]) -> None:
        workers = self.supervisor.plan.workers
        names = [self.rng.choice([spec.name for spec in workers if spec.role == role.value]) for role in roles]
        delay = self.rng.uniform(0.0, 0.05)  # into the steps between two answers
        await self.progress.until(reached)
        await asyncio.sleep(delay)
        for name in names:
            self.dead[name] = self.supervisor.processes[name].pid
            self.supervisor.kill(name)

    async def recover(self) -> None:
        """Wait until other processes stand where the killed ones stood, and everybody is idle."""
        async with asyncio.timeout(SETTLED_S):
            while any(self.supervisor.processes[name].pid == pid for name, pid in self.dead.items()):
                await asyncio.sleep(0.02)
        await settle(self.supervisor, self.name)


async def settle(supervisor: Supervisor, what: str = "") -> None:
    """Wait until everybody is back and every pool is empty but for cached blocks."""
    names = {spec.name for spec in supervisor.plan.workers}
    last: list = []
    async with AsyncClient(supervisor.plan.grpc_address) as client:
        try:
            async with asyncio.timeout(SETTLED_S):
                while True:
                    last = [item for item in await client.list_instances() if item.healthy]
                    idle = all(item.load.blocks_total and not item.load.blocks_active for item in last)
                    busy = [
                        item
                        for item in last
                        if item.in_flight or item.load.num_running or item.load.num_waiting or item.load.num_loading
                    ]
                    if {item.instance_id for item in last} == names and idle and not busy:
                        return
                    await asyncio.sleep(0.05)
        except TimeoutError:
            pytest.fail(f"{what} not settled: {last}")


async def test_killed_instances_cost_no_token(deployment, prompts, expected):
    """A prefill and a decode instance per round: at moments that have nothing to do with each other, or at one."""
    print(f"BATON_TEST_FAULTS_SEED={SEED}")  # noqa: T201
    traces = []
    for number in range(ROUNDS):
        one = Round(deployment, prompts, expected, number)
        started = time.monotonic()
        await one.run()
        answered = time.monotonic()
        await one.recover()
        traces += one.traces
        print(  # noqa: T201
            f"{time.monotonic():.3f} {one.name}: {sorted(one.dead)}, answered {answered - started:.1f} s, "
            f"back {time.monotonic() - answered:.1f} s, migrations {sum(t.num_migrations for t in one.traces)}, "
            f"failed prefills {sum(len(t.failed_prefills) for t in one.traces)}"
        )
    assert len(traces) == ROUNDS * 2 * len(prompts)
    assert sum(trace.num_migrations for trace in traces) > 0
    assert sum(len(trace.failed_prefills) for trace in traces) > 0


async def test_a_frozen_prefill_instance_delays_but_does_not_stop_an_answer(deployment, prompts, expected):
    """SIGSTOP: the process is there, its sockets too, but nothing moves. It is struck while prompts are there."""
    process = deployment.processes["prefill-0"]
    async with AsyncClient(deployment.plan.grpc_address, timeout=400.0) as client:

        async def freeze(answers: list[asyncio.Task]) -> None:
            while not all(task.done() for task in answers):
                instances = await client.list_instances()
                if any(item.in_flight for item in instances if item.instance_id == "prefill-0"):
                    break
            os.kill(process.pid, signal.SIGSTOP)

        # Where prompts go is the router's choice, and one may be done before the signal: until it met one.
        for attempt in range(20):
            answers = [
                asyncio.create_task(
                    client.generate(prompt, temperature=0.0, max_tokens=NEW_TOKENS, cache_salt=f"{salt} {attempt}")
                )
                for salt in ("one", "two")
                for prompt in prompts
            ]
            try:
                await freeze(answers)
                results = await asyncio.gather(*answers)
            finally:
                os.kill(process.pid, signal.SIGCONT)
            assert [result.token_ids for result in results] == expected * 2
            await settle(deployment)
            if any(result.trace.failed_prefills for result in results):
                return
    pytest.fail("no prompt was at the instance when it was frozen")


async def measured(supervisor: Supervisor, role: Role, metric: str) -> dict[str, float]:
    """Return a metric of all instances of a role, by their names."""
    values = {}
    async with httpx.AsyncClient(timeout=240) as client:
        for spec in supervisor.plan.workers:
            if spec.role == role.value:
                text = (await client.get(f"http://{dict(spec.listens)['metrics']}")).text
                (value,) = re.findall(rf"^{metric} (\S+)$", text, re.MULTILINE)
                values[spec.name] = float(value)
    return values


async def num_generated(supervisor: Supervisor) -> float:
    """Return how many tokens the instances have generated."""
    return sum((await measured(supervisor, Role.DECODE, "baton_engine_decode_tokens_total")).values())


class Waiting:
    """Prompts that were computed first and wait for decode instances, all of which are stopped: nobody claims them.

    Attributes:
        holders: How many wait at each prefill instance.
        chosen: How many of the requests each decode instance has.
    """

    def __init__(self, supervisor: Supervisor, prompts: list[list[int]], salt: str) -> None:
        self.supervisor, self.prompts, self.salt = supervisor, prompts, salt
        self.client = AsyncClient(supervisor.plan.grpc_address, timeout=400.0, retries=0)
        decodes = [spec.name for spec in supervisor.plan.workers if spec.role == Role.DECODE.value]
        self.stopped = {name: supervisor.processes[name].pid for name in decodes}

    async def __aenter__(self) -> Waiting:
        for pid in self.stopped.values():
            os.kill(pid, signal.SIGSTOP)
        options = {"temperature": 0.0, "max_tokens": NEW_TOKENS, "cache_salt": self.salt, "order": "prefill_first"}
        self.answers = [asyncio.create_task(self.client.generate(prompt, **options)) for prompt in self.prompts]
        async with asyncio.timeout(SETTLED_S):
            while True:
                self.holders = await self.num_leases()
                instances = await self.client.list_instances()
                self.chosen = {item.instance_id: item.in_flight for item in instances if item.role is Role.DECODE}
                if sum(self.holders.values()) == sum(self.chosen.values()) == len(self.prompts):
                    return self
                await asyncio.sleep(0.02)

    async def __aexit__(self, *_: object) -> None:
        self.go_on()
        await asyncio.gather(*self.answers, return_exceptions=True)
        await self.client.close()

    async def num_leases(self) -> dict[str, float]:
        return await measured(self.supervisor, Role.PREFILL, "baton_worker_leases")

    async def kill(self, name: str) -> None:
        process = self.supervisor.processes[name]
        self.stopped.pop(name, None)
        self.supervisor.kill(name)
        async with asyncio.timeout(SETTLED_S):
            while process.returncode is None:
                await asyncio.sleep(0.005)

    def go_on(self) -> None:
        while self.stopped:
            os.kill(self.stopped.popitem()[1], signal.SIGCONT)


@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
async def test_an_instance_is_killed_while_prompts_wait_to_be_claimed(deployment, prompts, expected, role):
    """The prefill instance that keeps most of them, or the decode instance that was chosen for most of them."""
    long = [i for i, prompt in enumerate(prompts) if len(prompt) > 100]
    async with Waiting(deployment, [prompts[i] for i in long], f"{role} dies") as waiting:
        where = waiting.holders if role is Role.PREFILL else waiting.chosen
        await waiting.kill(max(where, key=where.__getitem__))
        waiting.go_on()
        answers = await asyncio.gather(*waiting.answers)
    assert [answer.token_ids for answer in answers] == [expected[i] for i in long]
    traces = [answer.trace for answer in answers]
    if role is Role.PREFILL:
        assert any(trace.failed_prefills or trace.local_reason == "lease_over" for trace in traces)
    else:
        assert any(trace.order == "decode_first" for trace in traces), "it may have claimed: nothing counts on the KV"
    await settle(deployment)


async def test_prompts_that_nobody_claims_go_by_their_lease(deployment, prompts, expected):
    """The router dies too, which would have withdrawn them; what it had begun ends with it."""
    async with Waiting(deployment, prompts[3:5], "router dies") as waiting:
        await waiting.kill("router")
        for result in await asyncio.gather(*waiting.answers, return_exceptions=True):
            assert isinstance(result, UnavailableError)
        assert sum((await waiting.num_leases()).values()) == len(waiting.prompts)
        async with asyncio.timeout(LEASE_S + SETTLED_S):
            while sum((await waiting.num_leases()).values()):
                await asyncio.sleep(0.1)
    await settle(deployment)
    async with AsyncClient(deployment.plan.grpc_address, timeout=400.0) as client:
        again = await client.generate(prompts[3], temperature=0.0, max_tokens=NEW_TOKENS, order="prefill_first")
    assert again.token_ids == expected[3]


async def test_a_client_that_goes_away_leaves_nothing(deployment, prompts):
    before = await num_generated(deployment)
    async with AsyncClient(deployment.plan.grpc_address) as client:
        streams = [
            await client.generate(
                prompt, temperature=0.0, max_tokens=LONG, ignore_eos=True, stream=True, cache_salt="leaves"
            )
            for prompt in prompts
        ]
        await asyncio.gather(*(anext(stream) for stream in streams))
        for stream in streams:
            stream.cancel()
    await settle(deployment)
    assert await num_generated(deployment) - before < LONG * len(prompts), "they ran to their end"
