"""The event stream of a real worker process is cut: the metrics say so, and afterwards the index is exact again.

Truth is the worker's own: a snapshot that it gives to somebody else, past the network that was cut.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import re
import signal
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

import grpc.aio
import pytest
from prometheus_client import CollectorRegistry, generate_latest
from tests.support.child_env import child_env
from tests.support.models.checkpoints import make_checkpoint
from tests.support.servers.tcp_proxy import TcpProxy
from tests.support.servers.warm import WarmStarter

from baton.api.v1 import worker_pb2, worker_pb2_grpc
from baton.cli.supervisor import ManagedProcess, ProcessSpec
from baton.config.router import RouterConfig
from baton.hashing import HashChain, hash_chain, root_hash
from baton.rpc.channel import open_channel
from baton.rpc.convert import sampling_to_pb
from baton.rpc.server import free_port
from baton.token_ids import pack_ids
from baton.types import SamplingParams
from baton_router.registry.instance import Instance
from baton_router.registry.registry import Registry

CUT_S = 10.0
STALE: dict[str, object] = {"index_stale_limit_s": 3600.0}
"""However long a cut takes: what is known is not given up for its age."""
SAMPLING = sampling_to_pb(SamplingParams(temperature=0.0, max_tokens=2))


@dataclass
class Worker:
    """A decode process; its pool holds a few prompts only, so that it evicts."""

    path: str
    starter: WarmStarter
    flags: tuple[str, ...] = ()
    port: int = field(default_factory=free_port)
    asked: list[list[int]] = field(default_factory=list)
    process: ManagedProcess | None = None
    num_requests: int = 0

    async def start(self) -> None:
        args = ("--model", self.path, "--port", str(self.port), "--dtype", "float32", "--kv-blocks", "40")
        args += ("--threads", "1", "--instance-id", "d0", *self.flags)
        listens: asyncio.Future[int] = asyncio.get_running_loop().create_future()

        lines: list[str] = []

        def on_line(_: str, line: str) -> None:
            lines.append(line)
            if (found := re.search(r"listening on 127\.0\.0\.1:(\d+)", line)) and not listens.done():
                listens.set_result(int(found[1]))

        spec = ProcessSpec("d0", "baton_decode.main", args, "", "decode")
        self.process = ManagedProcess(spec, on_line, child_env(), start=self.starter.spawn)
        ended = asyncio.ensure_future(self.process.wait_closed())
        await asyncio.wait([listens, ended], timeout=240, return_when=asyncio.FIRST_COMPLETED)
        ended.cancel()
        assert listens.done(), lines[-20:]
        self.port = listens.result()

    async def kill(self) -> None:
        if self.process is not None:
            self.process.send_signal(signal.SIGKILL)
            await self.process.wait_closed()

    @contextlib.asynccontextmanager
    async def stub(self) -> AsyncIterator[worker_pb2_grpc.WorkerServiceAsyncStub]:
        async with open_channel(f"127.0.0.1:{self.port}") as channel:
            yield worker_pb2_grpc.WorkerServiceStub(channel)

    async def generate(self, prompts: list[list[int]]) -> None:
        """Ask for something directly, as another router would."""
        async with self.stub() as stub:
            for prompt in prompts:
                self.num_requests += 1
                request = worker_pb2.GenerateRequest(
                    request_id=str(self.num_requests), prompt_token_ids=pack_ids(prompt), sampling=SAMPLING
                )
                async for _ in stub.Generate(request, timeout=240):
                    pass
                self.asked.append(prompt)

    async def truth(self) -> set[bytes]:
        """Return what it holds."""
        async with self.stub() as stub:
            async for answer in stub.StreamKvEvents(worker_pb2.StreamKvEventsRequest(), timeout=240):
                assert answer.batch.snapshot
                return {item for event in answer.batch.events for item in event.stored.block_hashes}
        raise AssertionError("no snapshot came")


class Router:
    """The router's registry, and what its metrics tell."""

    def __init__(self, port: int, **options: object) -> None:
        self.metrics = CollectorRegistry()
        values: dict[str, object] = {"decode": (f"127.0.0.1:{port}",), "reconnect_max_s": 0.2, **STALE, **options}
        self.registry = Registry(RouterConfig(**values), self.metrics)  # type: ignore[arg-type]
        self.registry.start()

    @property
    def instance(self) -> Instance:
        return self.registry.instances()[0]

    def text(self) -> str:
        return generate_latest(self.metrics).decode()

    def states(self) -> set[str]:
        text = self.text()
        return set(re.findall(r'^baton_router_index_state\{.*instance="d0".*state="(\w+)"\} 1\.0$', text, re.MULTILINE))

    def age_s(self) -> float:
        found = re.search(
            r'^baton_router_index_age_seconds\{.*instance="d0".*\} (\S+)$',
            self.text(),
            re.MULTILINE,
        )
        return float(found[1]) if found else 0.0

    async def until(self, condition: Callable[[], bool], seconds: float = 240.0) -> None:
        async with asyncio.timeout(seconds):
            while not condition():
                await self.registry.wait_changed(0.02)

    def chain(self, prompt: list[int]) -> HashChain:
        info = self.instance.info
        assert info is not None
        return hash_chain(prompt, info.fingerprint.block_size, root_hash(info.content_key))

    async def until_equal(self, worker: Worker) -> None:
        """Wait until the index holds what the worker holds, block by block, and no other."""
        index, feed, truth = self.registry.index, self.instance.events, await worker.truth()
        assert truth

        def equal() -> bool:
            slots = 1 << feed.slot
            return feed.num_blocks == len(truth) and all(index.match(HashChain(item), slots) for item in truth)

        await self.until(lambda: self.states() == {"exact"} and equal())
        for prompt in worker.asked:
            chain = self.chain(prompt)
            held = next((at for at, item in enumerate(chain) if item not in truth), len(chain))
            assert index.match(chain, 1 << feed.slot).get(feed.slot, 0) == held


def some_prompts(count: int, seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    shared = [rng.randrange(10, 400) for _ in range(64)]
    return [shared + [rng.randrange(10, 400) for _ in range(rng.randrange(20, 200))] for _ in range(count)]


@dataclass
class Rig:
    worker: Worker
    proxy: TcpProxy
    stack: contextlib.AsyncExitStack

    def router(self, proxy: TcpProxy | None = None) -> Router:
        router = Router((proxy or self.proxy).port)
        self.stack.push_async_callback(router.registry.close)
        return router

    async def another_proxy(self) -> TcpProxy:
        proxy = TcpProxy(self.worker.port)
        await proxy.start()
        self.stack.push_async_callback(proxy.stop)
        return proxy


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_checkpoint(tmp_path_factory.mktemp("model"), "llama"))


@contextlib.asynccontextmanager
async def rig_for(path: str, starter: WarmStarter, *flags: str) -> AsyncIterator[Rig]:
    async with contextlib.AsyncExitStack() as stack:
        worker = Worker(path, starter, flags)
        stack.push_async_callback(worker.kill)
        await worker.start()
        rig = Rig(worker, TcpProxy(worker.port), stack)
        await rig.proxy.start()
        stack.push_async_callback(rig.proxy.stop)
        yield rig


async def test_a_cut_is_seen_and_made_up_for(path: str, starter: WarmStarter) -> None:
    """One router's connections break, another's fall silent; both wait for the same ten seconds."""
    async with rig_for(path, starter) as rig:
        worker, silent = rig.worker, await rig.another_proxy()
        routers = [rig.router(), rig.router(silent)]
        await worker.generate(some_prompts(4, seed=1))
        for router in routers:
            await router.until_equal(worker)
        before = set(routers[0].chain(worker.asked[0]))

        await rig.proxy.cut()
        silent.freeze()
        for router in routers:
            await router.until(lambda router=router: router.states() == {"stale"})
        feeds = [router.instance.events for router in routers]
        known = [(feed.slot, feed.num_events) for feed in feeds]
        await worker.generate(some_prompts(6, seed=2))
        assert not before <= await worker.truth(), "nothing was evicted meanwhile"
        for router, feed, (_, num_events) in zip(routers, feeds, known, strict=True):
            await router.until(lambda router=router: router.age_s() >= CUT_S)
            assert router.states() == {"stale"}
            assert feed.num_events == num_events

        await rig.proxy.start()
        silent.thaw()
        for router, feed, (slot, num_events) in zip(routers, feeds, known, strict=True):
            await router.until_equal(worker)
            assert feed.slot == slot, "a snapshot came where the ring buffer reached back"
            assert feed.num_events > num_events
        await worker.generate(some_prompts(3, seed=3))
        for router in routers:
            await router.until_equal(worker)


async def test_a_restarted_worker_is_another_one(path: str, starter: WarmStarter) -> None:
    async with rig_for(path, starter) as rig:
        router, worker = rig.router(), rig.worker
        await worker.generate(some_prompts(3, seed=1))
        await router.until_equal(worker)
        old = await worker.truth()
        await worker.kill()
        await router.until(lambda: router.states() == {"stale"})
        await rig.proxy.cut()  # else it might connect to itself, from the very port that the next process needs
        await worker.start()
        await rig.proxy.start()
        await worker.generate(some_prompts(2, seed=4))
        await router.until_equal(worker)
        assert not old <= await worker.truth()


async def test_a_worker_without_events_is_known_by_what_was_sent_there(path: str, starter: WarmStarter) -> None:
    async with rig_for(path, starter, "--no-kv-events") as rig:
        router = rig.router()
        await router.until(lambda: bool(router.registry.ready(router.instance.role)))
        async with rig.worker.stub() as stub:
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await stub.StreamKvEvents(worker_pb2.StreamKvEventsRequest()).read()
            assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED
        assert router.states() == {"off"}
        feed, chain = router.instance.events, router.chain(some_prompts(1, seed=5)[0])
        expectation = feed.add_pending(chain)
        assert expectation is not None
        expectation.release()
        assert router.registry.index.match(chain, 1 << feed.slot) == {feed.slot: len(chain)}
        assert 'baton_router_index_decided_prompts{instance="d0",role="decode"} 1.0' in router.text()
