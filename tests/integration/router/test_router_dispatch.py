"""The router's core over real sockets: placement, fail-over, migration in mid-stream, registration, index recovery."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field, replace

import msgspec
import pytest
from prometheus_client import CollectorRegistry, generate_latest
from tests.support.servers.fake_tokens import expected_tokens
from tests.support.servers.fake_worker import FINGERPRINT, FakeWorker
from tests.support.servers.tcp_proxy import TcpProxy

from baton.api.v1 import common_pb2, router_pb2
from baton.errors import (
    CancelledError,
    DeadlineError,
    InternalError,
    InvalidRequestError,
    QueueFullError,
    UnavailableError,
)
from baton.rpc.convert import role_to_pb
from baton.rpc.service_token import Token
from baton.token_ids import token_ids
from baton.types import FinishReason, RequestId, Role, SamplingParams
from baton_router.config import RouterConfig
from baton_router.dispatch.dispatcher import PlacingDispatcher
from baton_router.dispatch.interface import RoutedChunk
from baton_router.indexer.event_applier import IndexState
from baton_router.registry.instance import Instance, Status
from baton_router.registry.registry import Registry
from baton_router.types import RoutedRequest

PROMPT = list(range(100, 132))


class Clock:
    """A clock that moves when it is told to."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Router:
    registry: Registry
    dispatcher: PlacingDispatcher
    metrics: CollectorRegistry
    clock: Clock

    def instance(self, worker: FakeWorker) -> Instance:
        return next(x for x in self.registry.instances() if x.instance_id == worker.instance_id)

    def metric(self, name: str, **labels: str) -> float:
        return self.metrics.get_sample_value("baton_router_" + name, labels) or 0.0

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(240):
            while not condition():
                await self.registry.wait_changed(0.005)

    async def ready(self, *workers: FakeWorker) -> None:
        """Wait until the workers are ready and their caches known."""
        names = {w.instance_id for w in workers}
        await self.until(
            lambda: (
                names
                <= {x.instance_id for x in self.registry.instances() if x.ready and x.events.state is IndexState.EXACT}
            )
        )

    def assert_nothing_held(self) -> None:
        assert self.dispatcher.num_in_flight == 0
        for x in self.registry.instances():
            assert (x.load.requests, x.load.tokens) == (0, 0), x.instance_id
            assert x.load.prompts == 0, x.instance_id
            assert x._idle.is_set()
            assert self.registry.index.num_pending(x.events.slot) == 0, x.instance_id


@dataclass
class World:
    """Workers and routers of one test."""

    stack: contextlib.AsyncExitStack
    workers: list[FakeWorker] = field(default_factory=list)

    async def worker(self, role: Role, name: str, **options: object) -> FakeWorker:
        worker = FakeWorker(role, name, **options)  # type: ignore[arg-type]
        await worker.start()
        self.stack.push_async_callback(worker.stop)
        self.workers.append(worker)
        return worker

    async def decodes(self, count: int, **options: object) -> list[FakeWorker]:
        return [await self.worker(Role.DECODE, f"d{i}", **options) for i in range(count)]

    async def prefills(self, count: int, **options: object) -> list[FakeWorker]:
        return [await self.worker(Role.PREFILL, f"p{i}", **options) for i in range(count)]

    async def proxy(self, worker: FakeWorker) -> TcpProxy:
        proxy = TcpProxy(worker.port)
        await proxy.start()
        self.stack.push_async_callback(proxy.stop)
        return proxy

    async def router(
        self, *, token: Token | None = None, clock: Callable[[], float] | None = None, **options: object
    ) -> Router:
        defaults: dict[str, object] = {
            "policy_seed": 7,
            "probe_interval_s": 0.1,
            "probe_timeout_s": 2.0,
            "reconnect_max_s": 0.2,
            "no_instance_wait_s": 240.0,
            "request_timeout_s": 480.0,
            "index_heartbeat_ms": 0,  # fake instances gather no events: nothing counts beyond its request's end
        }
        config = RouterConfig(**{**defaults, **options})  # type: ignore[arg-type]
        metrics, fake = CollectorRegistry(), Clock()
        registry = Registry(config, metrics, token=token, now=clock or fake)
        registry.start()
        self.stack.push_async_callback(registry.close)
        return Router(registry, PlacingDispatcher(config, registry, metrics), metrics, fake)

    async def cluster(self, prefills: list[FakeWorker], decodes: list[FakeWorker], **options: object) -> Router:
        router = await self.router(
            prefill=tuple(w.address for w in prefills), decode=tuple(w.address for w in decodes), **options
        )
        await router.ready(*prefills, *decodes)
        return router


@pytest.fixture
async def world() -> AsyncIterator[World]:
    async with contextlib.AsyncExitStack() as stack:
        yield World(stack)


def make_request(name: str = "r", prompt: list[int] | None = None, **sampling: object) -> RoutedRequest:
    values: dict[str, object] = {"max_tokens": 8, "seed": 5, **sampling}
    return RoutedRequest(RequestId(name), token_ids(prompt or PROMPT), SamplingParams(**values))  # type: ignore[arg-type]


@dataclass
class Answer:
    tokens: dict[int, list[int]] = field(default_factory=dict)
    finish: dict[int, FinishReason] = field(default_factory=dict)
    logprobs: dict[int, list[float]] = field(default_factory=dict)
    chunks: list[RoutedChunk] = field(default_factory=list)

    def add(self, chunk: RoutedChunk) -> None:
        self.chunks.append(chunk)
        for delta in chunk.deltas:
            assert delta.index not in self.finish, "tokens after the end"
            self.tokens.setdefault(delta.index, []).extend(delta.token_ids)
            self.logprobs.setdefault(delta.index, []).extend(x.logprob for x in delta.logprobs)
            if delta.finish_reason is not None:
                self.finish[delta.index] = delta.finish_reason

    @property
    def trace(self) -> common_pb2.RequestTrace:
        trace = self.chunks[-1].trace
        assert trace is not None
        return trace


async def run(router: Router, request: RoutedRequest) -> Answer:
    answer = Answer()
    async for chunk in router.dispatcher.stream(request):
        answer.add(chunk)
    return answer


async def read(stream: AsyncIterator[RoutedChunk], answer: Answer, count: int) -> None:
    """Read until every sequence has so many tokens; steps that came together are one chunk."""
    while not answer.tokens or min(map(len, answer.tokens.values())) < count:
        answer.add(await anext(stream))


def assert_right(answer: Answer, request: RoutedRequest) -> None:
    sampling = request.sampling
    for index in range(sampling.n):
        expected = expected_tokens(
            request.prompt_token_ids, sampling.max_tokens or 0, seed=sampling.seed or 0, index=index
        )
        assert answer.tokens[index] == expected
        assert answer.finish[index] is FinishReason.LENGTH
    with_trace = [i for i, chunk in enumerate(answer.chunks) if chunk.trace is not None]
    assert with_trace[0] == 0
    assert with_trace[-1] == len(answer.chunks) - 1
    assert [chunk.decision is not None for chunk in answer.chunks] == [True] + [False] * (len(answer.chunks) - 1)


# --- placement ---


async def test_goes_where_the_kv_is(world: World) -> None:
    prefills, decodes = await world.prefills(2), await world.decodes(3)
    router = await world.cluster(prefills, decodes)
    decodes[2].store(PROMPT)
    prefills[1].store(PROMPT[:16])
    await router.until(lambda: router.instance(decodes[2]).events.num_blocks == 8)
    await router.until(lambda: router.instance(prefills[1]).events.num_blocks == 4)

    answer = await run(router, make_request())

    assert_right(answer, make_request())
    decision = answer.chunks[0].decision
    assert decision is not None
    assert (decision.prefill_instance, decision.decode_instance) == ("p1", "d2")
    assert list(decision.prefill_addresses) == [prefills[1].address, prefills[0].address]
    assert list(decodes[2].state.requests[0].prefill_candidates) == list(decision.prefill_addresses)
    assert decision.index_state == "exact"
    rates = {c.instance_id: c.match_rate for c in decision.candidates}
    assert rates == {"p0": 0.0, "p1": 0.5, "d0": 0.0, "d1": 0.0, "d2": 1.0}
    assert router.metric("decisions_total", policy="match_minus_load") == 1
    assert router.metric("prefill_path_total", path="remote", pipe="tcp", reason="") == 1
    router.assert_nothing_held()


async def test_route_says_the_same_and_reserves_nothing(world: World) -> None:
    prefills, decodes = await world.prefills(1), await world.decodes(2)
    router = await world.cluster(prefills, decodes)
    decodes[1].store(PROMPT)
    await router.until(lambda: router.instance(decodes[1]).events.num_blocks == 8)
    decision = await router.dispatcher.route(make_request())
    assert decision.decode_instance == "d1"
    router.assert_nothing_held()
    assert decodes[1].state.requests == []


async def test_route_knows_that_prompt_logprobs_are_computed_by_decode(world: World) -> None:
    prefills, decodes = await world.prefills(1), await world.decodes(1)
    router = await world.cluster(prefills, decodes)
    assert (await router.dispatcher.route(make_request())).prefill_instance
    request = make_request(prompt_logprobs=0)
    assert not (await router.dispatcher.route(request)).prefill_instance
    answer = await run(router, request)
    assert answer.chunks[0].decision is not None
    assert not answer.chunks[0].decision.prefill_instance


async def test_tenants_do_not_share_matches(world: World) -> None:
    decodes = await world.decodes(2)
    router = await world.cluster([], decodes)
    decodes[0].store(PROMPT, "tenant a")
    await router.until(lambda: router.instance(decodes[0]).events.num_blocks == 8)
    for salt, rate in (("tenant a", 1.0), ("tenant b", 0.0), ("", 0.0)):
        decision = await router.dispatcher.route(msgspec.structs.replace(make_request(), cache_salt=salt))
        assert max(c.match_rate for c in decision.candidates) == rate


async def test_a_burst_of_one_prompt_counts_before_events_confirm_it(world: World) -> None:
    decodes = await world.decodes(2, caches=False)
    router = await world.cluster([], decodes)
    for worker in decodes:
        worker.state.pause_after = 0
    first = router.dispatcher.stream(make_request("a"))
    reading = asyncio.ensure_future(anext(first))
    await router.until(lambda: any(w.state.running for w in decodes))
    where = next(w for w in decodes if w.state.running)
    decision = await router.dispatcher.route(make_request("b"))
    rates = {c.instance_id: c.match_rate for c in decision.candidates}
    assert rates.pop(where.instance_id) == 1.0
    assert set(rates.values()) == {0.0}
    reading.cancel()
    await asyncio.gather(reading, return_exceptions=True)
    await first.aclose()
    decision = await router.dispatcher.route(make_request("b"))
    assert {c.match_rate for c in decision.candidates} == {0.0}


async def test_without_prefill_instances_none_are_named(world: World) -> None:
    decodes = await world.decodes(1)
    router = await world.cluster([], decodes, remote_prefill_threshold=77)
    answer = await run(router, make_request())
    assert list(decodes[0].state.requests[0].prefill_candidates) == []
    assert decodes[0].state.requests[0].remote_prefill_threshold == 77
    assert answer.trace.path == common_pb2.PREFILL_PATH_LOCAL


async def test_prompt_logprobs_are_computed_where_they_are_wanted(world: World) -> None:
    prefills, decodes = await world.prefills(1), await world.decodes(1)
    router = await world.cluster(prefills, decodes)
    await run(router, make_request(prompt_logprobs=1))
    assert list(decodes[0].state.requests[0].prefill_candidates) == []


async def test_load_of_others_is_seen(world: World) -> None:
    decodes = await world.decodes(2)
    router = await world.cluster([], decodes)
    decodes[0].set_load(num_running=10, blocks_active=500)
    await router.until(lambda: router.instance(decodes[0]).load.foreign > 0)
    for i in range(5):
        decision = await router.dispatcher.route(make_request(f"r{i}"))
        assert decision.decode_instance == "d1"


# --- failures ---


@pytest.mark.parametrize("delivered", [1, 3, 7])
@pytest.mark.parametrize("n", [1, 3])
async def test_stream_goes_on_after_a_reset_connection(world: World, delivered: int, n: int) -> None:
    prefills, decodes = await world.prefills(1), await world.decodes(3)
    proxies = {w.instance_id: await world.proxy(w) for w in decodes}
    router = await world.router(
        prefill=(prefills[0].address,), decode=tuple(f"127.0.0.1:{p.port}" for p in proxies.values())
    )
    await router.ready(*prefills, *decodes)
    for worker in decodes:
        worker.state.pause_after = delivered
    request, answer = make_request(n=n, logprobs=0), Answer()
    stream = router.dispatcher.stream(request)
    await read(stream, answer, delivered)
    victim = next(w for w in decodes if w.state.running)
    for worker in decodes:
        worker.state.pause_after = None
    await proxies[victim.instance_id].cut()
    async for chunk in stream:
        answer.add(chunk)

    assert_right(answer, request)
    assert all(values == [-float(i) for i in range(1, 9)] for values in answer.logprobs.values())
    assert answer.trace.num_migrations == 1
    assert answer.trace.decode_instance != victim.instance_id
    moved = [r for w in decodes if w is not victim for r in w.state.requests]
    assert sorted(len(r.output_token_ids) for r in moved) == [delivered] * n
    assert all(r.sampling.n == 1 for r in moved)
    assert router.metric("migrations_total", reason="unavailable") == 1
    await victim.wait_until(lambda: not victim.state.running)
    await router.until(lambda: router.instance(victim).status is Status.DOWN)
    router.assert_nothing_held()


async def test_two_instances_die_one_after_the_other(world: World) -> None:
    decodes = await world.decodes(3)
    router = await world.cluster([], decodes)
    request, answer = make_request(max_tokens=12), Answer()
    stream = router.dispatcher.stream(request)
    for stop_at in (2, 5):
        for worker in decodes:
            worker.state.pause_after = stop_at
            worker.changed()
        await read(stream, answer, stop_at)
        victim = next(w for w in decodes if w.state.running)
        await victim.stop()
        await victim.wait_until(lambda victim=victim: not victim.state.running)  # type: ignore[misc]
    for worker in decodes:
        worker.state.pause_after = None
        worker.changed()
    async for chunk in stream:
        answer.add(chunk)
    assert_right(answer, request)
    assert answer.trace.num_migrations == 2
    router.assert_nothing_held()


@pytest.mark.parametrize("seed", [0, 1])
async def test_right_answers_while_instances_die_and_come_back(world: World, seed: int) -> None:
    rng = random.Random(seed)
    decodes = await world.decodes(3)
    router = await world.cluster([], decodes, max_retries=1000, retry_budget=1000.0)
    requests = [
        make_request(f"r{i}", prompt=[*range(i % 7, i % 7 + rng.randint(8, 40))], max_tokens=rng.randint(200, 900))
        for i in range(40)
    ]
    requests = [
        msgspec.structs.replace(r, sampling=r.sampling.replace(n=rng.choice([1, 1, 3]), seed=i))
        for i, r in enumerate(requests)
    ]
    jobs = [asyncio.create_task(run(router, r)) for r in requests]
    kills = 0
    while not all(job.done() for job in jobs) and kills < 25:
        victim = rng.choice(decodes)
        await asyncio.wait(jobs, timeout=rng.random() * 0.03)
        if victim.state.running:
            await victim.restart()
            kills += 1
    answers = await asyncio.gather(*jobs)
    for request, answer in zip(requests, answers, strict=True):
        assert_right(answer, request)
    assert sum(a.trace.num_migrations for a in answers) > 10
    router.assert_nothing_held()
    for worker in decodes:
        await worker.wait_until(lambda worker=worker: not worker.state.running)  # type: ignore[misc]


async def test_the_only_instance_restarts_in_mid_stream(world: World) -> None:
    (decode,) = await world.decodes(1)
    router = await world.cluster([], [decode])
    decode.state.pause_after = 3
    request, answer = make_request(), Answer()
    stream = router.dispatcher.stream(request)
    await read(stream, answer, 3)
    decode.state.pause_after = None
    await decode.restart()
    async for chunk in stream:
        answer.add(chunk)
    assert_right(answer, request)
    router.assert_nothing_held()


async def test_a_hung_instance_is_found_out_by_probes(world: World) -> None:
    decodes = await world.decodes(2)
    proxies = {w.instance_id: await world.proxy(w) for w in decodes}
    router = await world.router(
        decode=tuple(f"127.0.0.1:{p.port}" for p in proxies.values()), probe_timeout_s=1.0, probe_failures=2
    )
    await router.ready(*decodes)
    for worker in decodes:
        worker.state.pause_after = 2
    request, answer = make_request(), Answer()
    stream = router.dispatcher.stream(request)
    await read(stream, answer, 2)
    victim = next(w for w in decodes if w.state.running)
    proxies[victim.instance_id].freeze()
    for worker in decodes:
        worker.state.pause_after = None
        worker.changed()
    async for chunk in stream:
        answer.add(chunk)
    assert_right(answer, request)
    assert router.metric("migrations_total", reason="lost") == 1
    router.assert_nothing_held()


async def test_decode_instances_hear_which_prefill_instances_are_silent(world: World) -> None:
    (decode,), prefills = await world.decodes(1), await world.prefills(2)
    proxy = await world.proxy(prefills[0])
    hung, well = f"127.0.0.1:{proxy.port}", prefills[1].address
    router = await world.router(
        prefill=(hung, well), decode=(decode.address,), probe_interval_s=0.2, probe_timeout_s=60.0
    )
    await router.ready(decode, *prefills)
    request = make_request()
    assert_right(await run(router, request), request)
    proxy.freeze()
    async with asyncio.timeout(240):
        while decode.state.silent_prefills != {hung}:
            await asyncio.sleep(0.01)
    # No new prompt is sent there, as long as there is another; a stream that is opened now hears of it too.
    await router.until(lambda: [x.address for x in router.registry.ready(Role.PREFILL)] == [well])
    await decode.restart()
    decode.state.silent_prefills = frozenset()
    request = make_request("again", prompt=[*range(30)])
    assert_right(await run(router, request), request)
    async with asyncio.timeout(240):
        while decode.state.silent_prefills != {hung}:
            await asyncio.sleep(0.01)
    proxy.thaw()
    async with asyncio.timeout(240):
        while decode.state.silent_prefills:
            await asyncio.sleep(0.01)
    await router.until(lambda: {x.address for x in router.registry.ready(Role.PREFILL)} == {hung, well})
    router.assert_nothing_held()


@pytest.mark.parametrize("error", [InternalError("engine failed"), UnavailableError("shutting down")])
async def test_an_instance_that_gives_up_a_stream_is_replaced(world: World, error: Exception) -> None:
    decodes = await world.decodes(2)
    router = await world.cluster([], decodes)
    for worker in decodes:
        worker.state.pause_after = 4
    request, answer = make_request(), Answer()
    stream = router.dispatcher.stream(request)
    await read(stream, answer, 4)
    victim = next(w for w in decodes if w.state.running)
    for worker in decodes:
        worker.state.pause_after = None
    victim.state.abort_all = error  # type: ignore[assignment]
    victim.changed()
    async for chunk in stream:
        answer.add(chunk)
    assert_right(answer, request)


async def test_a_stream_that_just_ends_is_not_taken_for_complete(world: World) -> None:
    decodes = await world.decodes(2)
    router = await world.cluster([], decodes)
    decodes[0].state.silent_end = True
    for i in range(6):
        request = make_request(f"r{i}", prompt=[*range(i, i + 20)])
        assert_right(await run(router, request), request)
    assert decodes[0].state.requests, "the test never met the instance that ends early"


async def test_what_instances_cancel_themselves_is_no_cancellation_of_the_clients(world: World) -> None:
    workers = await world.decodes(2)
    router = await world.cluster([], workers)
    workers[0].state.refuse = CancelledError("the call was cancelled")  # as a server that is stopped says
    for number in range(4):
        assert await run(router, make_request(f"r{number}"))
    workers[1].state.refuse = workers[0].state.refuse
    with pytest.raises(UnavailableError, match="ended the call itself"):
        await run(router, make_request("last"))


async def test_a_request_that_fails_everywhere_ends_with_its_error(world: World) -> None:
    decodes = await world.decodes(2)
    router = await world.cluster([], decodes)
    for worker in decodes:
        worker.state.abort_all = InternalError("poisoned")
    async with asyncio.timeout(200):  # it does not wait for others: nobody new could come
        with pytest.raises(InternalError, match="poisoned"):
            await run(router, make_request())
    assert [len(w.state.requests) for w in decodes] == [1, 1]
    assert router.metric("request_failures_total", code="internal") == 1
    router.assert_nothing_held()


@pytest.mark.parametrize("retries", [0, 3])
async def test_a_stream_whose_instances_are_all_dead_says_so(world: World, retries: int) -> None:
    decodes = await world.decodes(2)
    router = await world.cluster([], decodes, no_instance_wait_s=0.5, max_retries=retries)
    for worker in decodes:
        worker.state.pause_after = 3
    answer, stream = Answer(), router.dispatcher.stream(make_request())
    await read(stream, answer, 3)
    idle, busy = sorted(decodes, key=lambda worker: len(worker.state.running))
    await idle.stop()
    await router.until(lambda: not router.instance(idle).ready)
    await busy.stop()
    with pytest.raises(UnavailableError, match="no decode instance is left that could go on: ") as caught:
        await anext(stream)
    assert caught.value.retry_after_s
    router.assert_nothing_held()


async def test_retries_are_bounded(world: World) -> None:
    decodes = await world.decodes(4)
    router = await world.cluster([], decodes, max_retries=2)
    for worker in decodes:
        worker.state.abort_all = UnavailableError("no")
    with pytest.raises(UnavailableError, match="no"):
        await run(router, make_request())
    assert sum(len(w.state.requests) for w in decodes) == 3


async def test_a_wrong_request_is_not_tried_again(world: World) -> None:
    decodes = await world.decodes(2)
    router = await world.cluster([], decodes)
    for worker in decodes:
        worker.state.refuse = InvalidRequestError("too long", field="prompt")
    with pytest.raises(InvalidRequestError) as caught:
        await run(router, make_request())
    assert caught.value.field == "prompt"
    assert router.metric("retries_total", reason="invalid_argument") == 0
    router.assert_nothing_held()


async def test_full_instances_pass_it_on_and_then_refuse(world: World) -> None:
    decodes = await world.decodes(2)
    router = await world.cluster([], decodes)
    decodes[0].state.max_running = 0
    for i in range(4):
        answer = await run(router, make_request(f"r{i}", prompt=[*range(i, i + 20)]))
        assert answer.trace.decode_instance == "d1"
    decodes[1].state.max_running = 0
    with pytest.raises(QueueFullError) as caught:
        await run(router, make_request("last"))
    assert caught.value.retry_after_s == 2.0
    router.assert_nothing_held()


async def test_the_router_itself_is_bounded(world: World) -> None:
    (decode,) = await world.decodes(1)
    router = await world.cluster([], [decode], max_in_flight=1)
    decode.state.pause_after = 0
    first = router.dispatcher.stream(make_request("a"))
    reading = asyncio.ensure_future(anext(first))
    await decode.wait_until(lambda: bool(decode.state.running))
    with pytest.raises(QueueFullError):
        await run(router, make_request("b"))
    reading.cancel()
    await asyncio.gather(reading, return_exceptions=True)
    await first.aclose()
    router.assert_nothing_held()


async def test_deadline(world: World) -> None:
    (decode,) = await world.decodes(1)
    router = await world.cluster([], [decode], request_timeout_s=0.3)
    decode.state.pause_after = 2
    with pytest.raises(DeadlineError):
        await run(router, make_request())
    await decode.wait_until(lambda: not decode.state.running)
    router.assert_nothing_held()


@pytest.mark.parametrize("n", [1, 2])
async def test_closing_the_stream_cancels_at_once(world: World, n: int) -> None:
    (decode,) = await world.decodes(1)
    router = await world.cluster([], [decode])
    decode.state.pause_after = 2
    stream = router.dispatcher.stream(make_request(n=n))
    await anext(stream)
    assert router.instance(decode).load.requests == n
    await stream.aclose()
    router.assert_nothing_held()
    await decode.wait_until(lambda: decode.state.cancelled == ["r"])
    assert router.metric("streams_closed_early_total") == 1


async def test_closing_a_migrated_stream_of_many_cancels_all(world: World) -> None:
    decodes = await world.decodes(2)
    router = await world.cluster([], decodes)
    for worker in decodes:
        worker.state.pause_after = 2
    stream, answer = router.dispatcher.stream(make_request(n=3)), Answer()
    await read(stream, answer, 2)
    victim, other = sorted(decodes, key=lambda w: not w.state.running)
    other.state.pause_after = 3
    await victim.stop()
    answer.add(await anext(stream))
    await other.wait_until(lambda: len(other.state.running) == 3)
    await stream.aclose()
    await other.wait_until(lambda: len(other.state.cancelled) == 3)
    router.assert_nothing_held()


async def test_cancelling_the_reader_cancels_the_call(world: World) -> None:
    (decode,) = await world.decodes(1)
    router = await world.cluster([], [decode])
    decode.state.pause_after = 0
    task = asyncio.create_task(run(router, make_request()))
    await decode.wait_until(lambda: bool(decode.state.running))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await decode.wait_until(lambda: decode.state.cancelled == ["r"])
    await router.until(lambda: router.dispatcher.num_in_flight == 0)
    router.assert_nothing_held()


# --- instances come and go ---


async def test_a_draining_instance_gets_nothing_new(world: World) -> None:
    decodes = await world.decodes(2)
    router = await world.cluster([], decodes)
    decodes[0].state.pause_after = decodes[1].state.pause_after = 1
    request, answer = make_request("running"), Answer()
    stream = router.dispatcher.stream(request)
    answer.add(await anext(stream))
    draining, other = sorted(decodes, key=lambda w: not w.state.running)
    draining.set_load(draining=True)
    await router.until(lambda: not router.instance(draining).ready)
    for worker in decodes:
        worker.state.pause_after = None
        worker.changed()
    for i in range(3):
        assert (await run(router, make_request(f"r{i}"))).trace.decode_instance == other.instance_id
    async for chunk in stream:
        answer.add(chunk)
    assert_right(answer, request)
    assert answer.trace.decode_instance == draining.instance_id, "a draining instance ends what it has begun"


async def test_requests_wait_for_the_first_instance(world: World) -> None:
    router = await world.router()
    with pytest.raises(UnavailableError):
        router.dispatcher.model_info()
    waiting = asyncio.create_task(run(router, make_request()))
    (decode,) = await world.decodes(1)
    router.registry.register(registration(decode))
    assert_right(await waiting, make_request())
    assert router.dispatcher.model_info().vocab_size == 1000


async def test_nobody_comes(world: World) -> None:
    router = await world.router(no_instance_wait_s=0.1)
    with pytest.raises(UnavailableError) as caught:
        await run(router, make_request())
    assert caught.value.retry_after_s
    router.assert_nothing_held()


def registration(worker: FakeWorker) -> router_pb2.RegisterRequest:
    return router_pb2.RegisterRequest(
        address=worker.address, instance_id=worker.instance_id, role=role_to_pb(worker.role), epoch=worker.epoch
    )


async def test_lease(world: World) -> None:
    (decode,) = await world.decodes(1)
    router = await world.router(lease_ttl_s=10.0)
    lease = router.registry.register(registration(decode))
    assert lease.ttl_ms == 10_000
    await router.ready(decode)
    router.clock.now += 9
    assert router.registry.heartbeat(lease.lease_id)
    router.clock.now += 9
    router.registry.expire()
    assert router.registry.ready(Role.DECODE)
    router.clock.now += 2
    assert not router.registry.heartbeat(lease.lease_id)
    await router.until(lambda: router.registry.instances() == [])
    assert router.metric("registrations_total", change="expired") == 1
    again = router.registry.register(registration(decode))
    await router.ready(decode)
    router.registry.deregister(again.lease_id)
    assert router.registry.instances() == []
    router.registry.deregister(again.lease_id)
    await router.until(lambda: len(router.registry.index) == 0)


async def test_nobody_loses_a_lease_for_a_standstill_of_the_router(world: World) -> None:
    (decode,) = await world.decodes(1)
    router = await world.router(lease_ttl_s=0.8)
    router.registry.register(registration(decode))
    await router.ready(decode)
    time.sleep(1.5)  # noqa: ASYNC251 - nothing of this process runs, as after SIGSTOP or under far too much load
    router.clock.now += 1.2
    await asyncio.sleep(0.4)  # it looks for leases that have ended, and would end this one
    assert router.registry.ready(Role.DECODE)
    router.clock.now += 1000
    await router.until(lambda: router.registry.instances() == [])  # and the lease still ends


async def test_a_running_request_outlives_its_instances_registration(world: World) -> None:
    (decode,) = await world.decodes(1)
    router = await world.router()
    lease = router.registry.register(registration(decode))
    await router.ready(decode)
    decode.state.pause_after = 2
    request, answer = make_request(), Answer()
    stream = router.dispatcher.stream(request)
    answer.add(await anext(stream))
    router.registry.deregister(lease.lease_id)
    decode.state.pause_after = None
    decode.changed()
    async for chunk in stream:
        answer.add(chunk)
    assert_right(answer, request)
    await router.until(lambda: not router.registry._retired)


@pytest.mark.parametrize("expires", [True, False])
async def test_an_instance_that_left_and_hangs_keeps_no_request(world: World, expires: bool) -> None:
    """Leases may run out before enough probes are missed; nobody probed the instance then, and its streams stood."""
    decodes = await world.decodes(2)
    router = await world.router(lease_ttl_s=10.0, probe_timeout_s=1.0)
    proxies = {w.instance_id: await world.proxy(w) for w in decodes}
    leases = {}
    for worker in decodes:
        message = registration(worker)
        message.address = f"127.0.0.1:{proxies[worker.instance_id].port}"
        leases[worker.instance_id] = router.registry.register(message)
        worker.state.pause_after = 2
    await router.ready(*decodes)
    request, answer = make_request(), Answer()
    stream = router.dispatcher.stream(request)
    await read(stream, answer, 2)
    victim, other = sorted(decodes, key=lambda w: not w.state.running)
    proxies[victim.instance_id].freeze()
    if expires:
        router.clock.now += 9
        router.registry.heartbeat(leases[other.instance_id].lease_id)
        router.clock.now += 2
    else:
        router.registry.deregister(leases[victim.instance_id].lease_id)
    await router.until(lambda: [x.instance_id for x in router.registry.instances()] == [other.instance_id])
    other.state.pause_after = None
    async with asyncio.timeout(240):
        async for chunk in stream:
            answer.add(chunk)
    assert_right(answer, request)
    assert router.metric("migrations_total", reason="lost") == 1
    await router.until(lambda: not router.registry._retired)
    router.assert_nothing_held()


async def test_an_instance_moves_to_another_port(world: World) -> None:
    (decode,) = await world.decodes(1)
    router = await world.router()
    router.registry.register(registration(decode))
    await router.ready(decode)
    await decode.stop()
    await decode.start()
    router.registry.register(registration(decode))  # the same process: its epoch says so
    assert [x.address for x in router.registry.instances()] == [decode.address]
    await router.ready(decode)


async def test_two_live_instances_cannot_have_one_name(world: World) -> None:
    first, second = await world.worker(Role.DECODE, "d"), await world.worker(Role.DECODE, "d")
    router = await world.router()
    lease = router.registry.register(registration(first))
    await router.ready(first)
    with pytest.raises(InvalidRequestError, match=first.address) as caught:
        router.registry.register(registration(second))
    assert caught.value.field == "instance_id"
    assert router.registry.heartbeat(lease.lease_id)
    await first.stop()
    await router.until(lambda: not router.registry.ready(Role.DECODE))
    router.registry.register(registration(second))
    await router.ready(second)
    assert [x.address for x in router.registry.instances()] == [second.address]


async def test_a_static_instance_that_registers_under_another_name_is_one_instance(world: World) -> None:
    (decode,) = await world.decodes(1)
    router = await world.router(decode=(f"localhost:{decode.port}",))
    await router.ready(decode)
    lease = router.registry.register(registration(decode))
    assert [x.address for x in router.registry.instances()] == [f"localhost:{decode.port}"]
    router.clock.now += 100
    router.registry.expire()
    assert not router.registry.heartbeat(lease.lease_id)
    assert router.registry.ready(Role.DECODE), "a static instance needs no lease"


@pytest.mark.parametrize(
    ("changes", "field_name"),
    [({"address": "nowhere"}, "address"), ({"instance_id": ""}, "instance_id"), ({"role": 0}, "role")],
)
async def test_bad_registrations(world: World, changes: dict[str, object], field_name: str) -> None:
    router = await world.router()
    message = router_pb2.RegisterRequest(address="127.0.0.1:1", instance_id="x", role=common_pb2.ROLE_DECODE)
    for name, value in changes.items():
        setattr(message, name, value)
    with pytest.raises(InvalidRequestError) as caught:
        router.registry.register(message)
    assert caught.value.field == field_name


async def test_other_kv_is_refused_until_the_others_are_gone(world: World) -> None:
    (decode,) = await world.decodes(1)
    router = await world.cluster([], [decode])
    other = await world.worker(Role.DECODE, "other", fingerprint=replace(FINGERPRINT, kv_dtype="bfloat16"))
    lease = router.registry.register(registration(other))
    await router.until(lambda: any(x.status is Status.REFUSED for x in router.registry.instances()))
    refused = next(x for x in router.registry.instances() if x.status is Status.REFUSED)
    assert "kv_dtype" in refused.reason
    assert not refused.describe().healthy
    assert router.metric("instance_refusals_total", field="kv_dtype") == 1
    assert [x.instance_id for x in router.registry.ready(Role.DECODE)] == ["d0"]
    await decode.stop()
    await router.until(lambda: [x.instance_id for x in router.registry.ready(Role.DECODE)] == ["other"])
    assert_right(await run(router, make_request()), make_request())
    assert router.registry.heartbeat(lease.lease_id)


@pytest.mark.parametrize(
    "changes",
    [
        {"block_size": 8, "block_bytes": 256},
        {"tp_size": 2},
        {"pp_size": 2},
        {"block_size": 2, "block_bytes": 64, "tp_size": 2, "pp_size": 2},
    ],
)
async def test_instances_of_another_shape_serve_together(world: World, changes: dict[str, int]) -> None:
    """Blocks may be cut otherwise; a stream goes on where they are, and each index knows its own."""
    prefills, (first,) = await world.prefills(1), await world.decodes(1)
    other = await world.worker(Role.DECODE, "other", fingerprint=replace(FINGERPRINT, **changes))  # type: ignore[arg-type]
    router = await world.cluster(prefills, [first, other])
    for worker in (first, other, *prefills):
        worker.store(PROMPT[:16])
        num_blocks = 16 // worker.fingerprint.block_size
        await router.until(lambda x=worker, n=num_blocks: router.instance(x).events.num_blocks == n)  # type: ignore[misc]
    decision = await router.dispatcher.route(make_request())
    assert {c.match_rate for c in decision.candidates} == {0.5}
    first.state.pause_after = other.state.pause_after = 3
    running = asyncio.create_task(run(router, make_request()))
    await router.until(lambda: bool(first.state.running or other.state.running))
    owner, rest = (first, other) if first.state.running else (other, first)
    rest.state.pause_after = None
    await owner.stop()
    answer = await running
    assert_right(answer, make_request())
    assert answer.trace.decode_instance == rest.instance_id
    router.assert_nothing_held()


@pytest.mark.parametrize("field_name", ["model_digest", "adapter", "kv_scales", "rope", "hash_scheme"])
async def test_other_content_is_refused_by_name(world: World, field_name: str) -> None:
    decodes = await world.decodes(1)
    router = await world.cluster([], decodes)
    changes = {field_name: "other", "block_size": 8, "tp_size": 2}
    other = await world.worker(Role.PREFILL, "other", fingerprint=replace(FINGERPRINT, **changes))  # type: ignore[arg-type]
    router.registry.register(registration(other))
    await router.until(lambda: router.metric("instance_refusals_total", field=field_name) == 1)
    (refused,) = [x for x in router.registry.instances() if x.status is Status.REFUSED]
    assert f"differs in {field_name}" in refused.reason


async def test_the_longest_request_fits_on_whoever_may_get_it(world: World) -> None:
    decodes = await world.decodes(2)
    decodes[1].state.max_model_len = 100
    router = await world.cluster([], decodes)
    assert router.dispatcher.model_info().max_model_len == 100
    await decodes[1].stop()
    await router.until(lambda: len(router.registry.ready(Role.DECODE)) == 1)
    assert router.dispatcher.model_info().max_model_len == 4096


async def test_another_role_than_promised_is_refused(world: World) -> None:
    (prefill,) = await world.prefills(1)
    router = await world.router(decode=(prefill.address,))
    await router.until(lambda: any(x.status is Status.REFUSED for x in router.registry.instances()))
    assert router.metric("instance_refusals_total", field="role") == 1


async def test_token(world: World) -> None:
    decode = await world.worker(Role.DECODE, "d0", token=Token("secret"))
    good = await world.router(token=Token("secret"), decode=(decode.address,))
    await good.ready(decode)
    assert_right(await run(good, make_request()), make_request())
    bad = await world.router(token=Token("wrong"), decode=(decode.address,), no_instance_wait_s=0.1)
    await bad.until(lambda: bad.registry.instances()[0].status is Status.REFUSED)
    assert "another token" in bad.registry.instances()[0].describe().refused
    with pytest.raises(UnavailableError):
        await run(bad, make_request())


async def test_cancel_and_migration_with_a_token(world: World) -> None:
    """Channels with interceptors have calls of another class."""
    decodes = await world.decodes(2, token=Token("secret"))
    router = await world.cluster([], decodes, token=Token("secret"))
    for worker in decodes:
        worker.state.pause_after = 2
    request, answer = make_request(), Answer()
    stream = router.dispatcher.stream(request)
    await read(stream, answer, 2)
    victim, other = sorted(decodes, key=lambda w: not w.state.running)
    other.state.pause_after = 5
    await victim.stop()
    await read(stream, answer, 5)
    assert answer.tokens[0] == expected_tokens(PROMPT, 5, seed=5)
    await stream.aclose()
    await other.wait_until(lambda: bool(other.state.cancelled))
    router.assert_nothing_held()


# --- the index ---


async def test_gap_in_the_events(world: World) -> None:
    (decode,) = await world.decodes(1)
    router = await world.cluster([], [decode])
    decode.store(PROMPT[:16])
    feed = router.instance(decode).events
    await router.until(lambda: feed.num_blocks == 4)
    decode.state.mute_events = True
    decode.store(PROMPT[:24])
    before = len(decode.state.event_subscriptions)
    await router.until(lambda: decode.state.event_position == 2)
    decode.state.mute_events = False
    decode.store(PROMPT)
    await router.until(lambda: feed.num_blocks == 8)
    assert feed.num_gaps == 1
    assert feed.state is IndexState.EXACT
    assert decode.state.event_subscriptions[before:] == [1], "it asked for the batch it had last"
    assert router.metric("index_sequence_gaps_total", instance="d0") == 1


async def test_gap_longer_than_the_history(world: World) -> None:
    (decode,) = await world.decodes(1)
    router = await world.cluster([], [decode])
    feed = router.instance(decode).events
    for end in (8, 16):
        decode.store(PROMPT[:end])
    await router.until(lambda: feed.num_blocks == 4)
    decode.evict(decode.hashes(PROMPT)[3:4])
    decode.forget_history()
    decode.store(PROMPT)
    await router.until(lambda: feed.state is IndexState.EXACT and feed.num_blocks == 8)
    decision = await router.dispatcher.route(make_request())
    assert decision.candidates[0].match_rate == 1.0


async def test_restart_forgets_the_cache(world: World) -> None:
    decodes = await world.decodes(2)
    router = await world.cluster([], decodes)
    decodes[0].store(PROMPT)
    await router.until(lambda: router.instance(decodes[0]).events.num_blocks == 8)
    old = router.instance(decodes[0]).generation
    await decodes[0].restart()
    await router.until(lambda: router.instance(decodes[0]).generation > old)
    await router.ready(*decodes)
    decision = await router.dispatcher.route(make_request())
    assert {c.match_rate for c in decision.candidates} == {0.0}


async def test_a_stale_index_is_used_for_a_while(world: World) -> None:
    (decode,) = await world.decodes(1)
    proxy = await world.proxy(decode)
    router = await world.router(decode=(f"127.0.0.1:{proxy.port}",), index_stale_limit_s=30.0)
    await router.ready(decode)
    decode.store(PROMPT)
    feed = router.instance(decode).events
    await router.until(lambda: feed.num_blocks == 8)
    await proxy.cut()
    await router.until(lambda: feed.state is IndexState.STALE)
    router.clock.now += 20
    assert feed.state is IndexState.STALE
    assert feed.age_s == 20
    assert feed.usable
    router.clock.now += 20
    assert feed.state is IndexState.OFF
    assert not feed.usable
    await proxy.start()
    await router.until(lambda: feed.state is IndexState.EXACT)
    assert feed.num_blocks == 8


async def test_eviction_and_clear(world: World) -> None:
    (decode,) = await world.decodes(1)
    router = await world.cluster([], [decode])
    feed = router.instance(decode).events
    decode.store(PROMPT)
    decode.evict(decode.hashes(PROMPT)[6:])
    await router.until(lambda: feed.num_blocks == 6)
    assert (await router.dispatcher.route(make_request())).candidates[0].match_rate == 0.75
    decode.clear()
    await router.until(lambda: feed.num_blocks == 0)


async def test_events_switched_off(world: World) -> None:
    (decode,) = await world.decodes(1)
    router = await world.router(decode=(decode.address,), kv_events=False)
    await router.until(lambda: bool(router.registry.ready(Role.DECODE)))
    answer = await run(router, make_request())
    decision = answer.chunks[0].decision
    assert decision is not None
    assert decision.index_state == "off"
    assert decode.state.event_subscriptions == []


async def test_two_routers_side_by_side(world: World) -> None:
    prefills, decodes = await world.prefills(1), await world.decodes(2)
    routers = [await world.cluster(prefills, decodes) for _ in range(2)]
    requests = [make_request(f"r{i}", prompt=[*range(i, i + 24)], max_tokens=6) for i in range(16)]
    answers = await asyncio.gather(*(run(routers[i % 2], r) for i, r in enumerate(requests)))
    for request, answer in zip(requests, answers, strict=True):
        assert_right(answer, request)
    for router in routers:
        await router.until(lambda r=router: all(r.instance(w).events.num_blocks == len(w.cached) for w in decodes))  # type: ignore[misc]
    one, two = [await r.dispatcher.route(requests[3]) for r in routers]
    assert {c.instance_id: c.match_rate for c in one.candidates} == {
        c.instance_id: c.match_rate for c in two.candidates
    }
    assert max(c.match_rate for c in one.candidates) == 1.0
    for router in routers:
        router.assert_nothing_held()


async def test_metrics_render(world: World) -> None:
    decodes = await world.decodes(2)
    router = await world.cluster([], decodes)
    await run(router, make_request())
    text = generate_latest(router.metrics).decode()
    assert 'baton_router_index_state{instance="d0",role="decode",state="exact"} 1.0' in text
    assert 'baton_router_instance_healthy{instance="d1",role="decode"} 1.0' in text
    assert "baton_router_match_rate_bucket" in text
