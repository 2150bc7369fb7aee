"""Workers that are scripted and routers over them, over real sockets; what routers answer, and what is right."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry
from tests.support.servers.fake_tokens import expected_tokens
from tests.support.servers.fake_worker import FakeWorker
from tests.support.servers.tcp_proxy import TcpProxy

from baton.api.v1 import common_pb2, router_pb2
from baton.config.router import RouterConfig
from baton.rpc.convert import role_to_pb
from baton.rpc.service_token import Token
from baton.token_ids import token_ids
from baton.types import FinishReason, RequestId, Role, SamplingParams
from baton_router.dispatch.dispatcher import PlacingDispatcher
from baton_router.dispatch.interface import RoutedChunk
from baton_router.indexer.events import IndexState
from baton_router.registry.instance import Instance
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


def registration(worker: FakeWorker) -> router_pb2.RegisterRequest:
    return router_pb2.RegisterRequest(
        address=worker.address, instance_id=worker.instance_id, role=role_to_pb(worker.role), epoch=worker.epoch
    )
