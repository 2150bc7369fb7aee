"""Direct mode: a router process places and signs, the SDK has its tokens from the decode instance itself."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import httpx
import pytest
from tests.integration.router.test_router_process import router
from tests.support.servers.cluster import LocalCluster
from tests.support.servers.fake_tokens import expected_tokens
from tests.support.servers.fake_worker import FakeWorker

from baton import AsyncClient, Client
from baton.api.v1 import common_pb2, router_pb2, router_pb2_grpc, worker_pb2, worker_pb2_grpc
from baton.client.request import build_generate
from baton.config import EngineConfig
from baton.config.router import RouterConfig
from baton.config.worker import WorkerConfig
from baton.errors import ConfigError, InvalidRequestError, PermissionDeniedError, QueueFullError
from baton.rpc.auth import HEADER
from baton.rpc.channel import open_channel
from baton.rpc.errors import from_rpc_error
from baton.rpc.service_token import Token
from baton.rpc.ticket import Bearer, TicketCheck, read_ticket_key, request_digest, sign, ticket_header
from baton.token_ids import pack_ids
from baton.tokenizer import Tokenizer
from baton.types import Role
from baton_router.app import RouterApp
from baton_router.frontend.grpc import ticket

MODEL = "models/baton-tiny"
KEY = b"0123456789abcdef"
PROMPT = list(range(20, 44))


@dataclass
class World:
    workers: list[FakeWorker]
    grpc: str
    http: httpx.AsyncClient

    async def metric(self, name: str) -> float:
        lines = (await self.http.get("/metrics")).text.splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(f"baton_router_{name}"))

    async def of_requests(self, name: str) -> float:
        lines = (await self.http.get("/metrics")).text.splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(f"baton_request_{name}"))

    async def nothing_held(self) -> bool:
        return await self.metric("instance_in_flight{") == 0 and await self.metric("direct_open") == 0


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(240):
        while not await condition():
            await asyncio.sleep(0.02)


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    key = tmp_path / "key"
    key.write_bytes(KEY)
    async with contextlib.AsyncExitStack() as stack:
        workers = [FakeWorker(Role.DECODE, f"d{number}", ticket_key=KEY) for number in range(2)]
        for worker in workers:
            worker.state.model_path = MODEL
            await worker.start()
            stack.push_async_callback(worker.stop)
        addresses = ",".join(x.address for x in workers)
        process = await stack.enter_async_context(
            router("--decode", addresses, "--ticket-key-file", str(key), "--reconnect-max-s", "0.2")
        )
        http = await stack.enter_async_context(httpx.AsyncClient(base_url=f"http://{process.http}", timeout=240))
        found = World(workers, process.grpc, http)

        async def ready() -> bool:
            return await found.metric("instance_healthy{") == 2

        await until(ready)
        yield found


async def test_tokens_come_from_the_instance_and_the_reservation_ends(world: World) -> None:
    tokenizer = Tokenizer.load(MODEL)

    def use() -> None:
        with Client(world.grpc, direct=True) as client:
            answer = client.generate(PROMPT, max_tokens=9, seed=5, n=2)
            for index, choice in enumerate(answer.choices):
                assert choice.token_ids == expected_tokens(PROMPT, 9, seed=5, index=index)
                assert choice.text == tokenizer.decode(choice.token_ids)
                assert choice.finish_reason == "length"
            assert answer.decision is not None
            assert answer.trace is not None
            assert answer.trace.decode_instance == answer.decision.decode_instance
            assert answer.trace.order == "decode_first"
            tokens = expected_tokens(PROMPT, 9, seed=5)
            stop = tokenizer.decode(tokens[:6])[-2:]
            stopped = client.generate(PROMPT, max_tokens=9, seed=5, stop=stop)
            assert stopped.text == tokenizer.decode(tokens)[: len(stopped.text)]
            assert stop not in stopped.text
            assert (stopped.finish_reason, stopped.choices[0].stop_reason) == ("stop", stop)

    await asyncio.to_thread(use)
    await until(world.nothing_held)
    assert await world.metric('direct_requests_total{outcome="done"}') == 2
    assert await world.metric("decision_seconds_count") == 2, "the router placed them, and saw no token"


async def test_the_router_explains_them_and_counts_their_times(world: World) -> None:
    def use() -> None:
        with Client(world.grpc, direct=True) as client:
            client.generate(PROMPT, max_tokens=9, seed=5, request_id="asked-directly")

    await asyncio.to_thread(use)
    await until(world.nothing_held)
    told = (await world.http.get("/debug/decisions/asked-directly")).json()
    assert (told["outcome"], told["direct"], told["generated_tokens"]) == ("done", True, 9)
    assert told["placements"][0]["candidates"]
    assert told["trace"]["decode"] == told["decode"]
    assert "direct mode" in " ".join(told["why"])
    assert told["ttft_ms"] > 0
    assert told["duration_ms"] > 0
    assert await world.of_requests("ttft_seconds_count") == 1
    assert await world.of_requests("itl_seconds_count") == 8, "the fake worker sends a message per token"
    assert await world.of_requests("generated_tokens_total") == 9
    assert await world.of_requests("prompt_tokens_total") == len(PROMPT)
    assert await world.of_requests('finished_total{outcome="done"}') == 1


async def run_placed(direct: router_pb2.DirectPlacement) -> int:
    """Use a ticket, and return the number of the answer's messages."""
    async with open_channel(direct.address) as channel:
        head = ((HEADER, ticket_header(direct.request.ticket)),)
        stub = worker_pb2_grpc.WorkerServiceStub(channel)
        return len([x async for x in stub.Generate(direct.request, timeout=240, metadata=head)])


async def test_a_client_cannot_tell_of_more_tokens_than_its_request_may_have(world: World) -> None:
    async with contextlib.AsyncExitStack() as stack:
        channel = await stack.enter_async_context(open_channel(world.grpc))
        router_stub = router_pb2_grpc.RouterServiceStub(channel)
        asked = build_generate(PROMPT, "", {"max_tokens": 3, "n": 2})
        route = await router_stub.Route(router_pb2.RouteRequest(direct=asked))
        placed = route.direct.request
        await run_placed(route.direct)
        notice = router_pb2.NoteDirectRequest(
            request_id=placed.request_id, ticket_mac=placed.ticket.mac, num_tokens=10**9, ended=True
        )
        assert (await router_stub.NoteDirect(notice)).known
        assert not (await router_stub.NoteDirect(notice)).known
    await until(world.nothing_held)
    assert await world.of_requests("generated_tokens_total") == 6


async def test_a_clients_trace_counts_no_more_than_its_request_can_have(world: World) -> None:
    async with contextlib.AsyncExitStack() as stack:
        channel = await stack.enter_async_context(open_channel(world.grpc))
        router_stub = router_pb2_grpc.RouterServiceStub(channel)
        asked = build_generate(PROMPT, "", {"max_tokens": 3})
        placed = (await router_stub.Route(router_pb2.RouteRequest(direct=asked))).direct.request
        most = 2**32 - 1
        trace = common_pb2.RequestTrace(
            path=common_pb2.PREFILL_PATH_REMOTE,
            pipe="tcp",
            cached_tokens=most,
            transferred_tokens=most,
            recomputed_tokens=most,
            kv_bytes=10**18,
            transfer_us=10**15,
            failed_prefills=["x"] * 10_000,
        )
        notice = router_pb2.NoteDirectRequest(
            request_id=placed.request_id, ticket_mac=placed.ticket.mac, num_tokens=3, ended=True, trace=trace
        )
        assert (await router_stub.NoteDirect(notice)).known
        placed = (await router_stub.Route(router_pb2.RouteRequest(direct=asked))).direct.request
        trace = common_pb2.RequestTrace(path=77, pipe="invented", local_reason="invented: x", kv_bytes=1)  # type: ignore[arg-type]
        notice = router_pb2.NoteDirectRequest(
            request_id=placed.request_id, ticket_mac=placed.ticket.mac, ended=True, trace=trace
        )
        assert (await router_stub.NoteDirect(notice)).known
    assert "invented" not in (await world.http.get("/metrics")).text
    assert await world.metric('kv_bytes_total{pipe="other"}') == 1
    assert await world.metric('prefill_path_total{path="unknown",pipe="other",reason="other"}') == 1
    for source in ("cached", "transferred", "recomputed"):
        assert await world.metric(f'prompt_tokens_total{{source="{source}"}}') <= len(PROMPT)
    assert 0 < await world.metric('kv_bytes_total{pipe="tcp"}') < 10**6
    assert await world.metric('transfer_seconds_sum{pipe="tcp"}') < 600
    assert await world.metric("failed_prefills_total") <= 16


def test_the_documented_reasons_are_known() -> None:
    table = Path("docs/metrics.md").read_text().partition("### local_reason")[2]
    rows = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    names = {name for row in rows for name in re.findall(r"`(\w+)", row)}
    assert len(names) > 5
    assert names <= ticket.LOCAL_REASONS


async def test_a_ticket_in_another_tenants_hands_ends_nothing(tmp_path: Path) -> None:
    for name, text in (("key", KEY.decode()), ("token", "the services' token"), ("keys", "one-key\ntwo-key\n")):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o600)
    token = Token("the services' token")
    flags = ("--ticket-key-file", str(tmp_path / "key"), "--token-file", str(tmp_path / "token"))
    worker = FakeWorker(Role.DECODE, "d0", ticket_key=KEY, token=token)
    worker.state.model_path = MODEL
    await worker.start()
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(worker.stop)
        process = await stack.enter_async_context(
            router("--decode", worker.address, "--api-keys", str(tmp_path / "keys"), *flags)
        )
        stub = router_pb2_grpc.RouterServiceStub(await stack.enter_async_context(open_channel(process.grpc)))
        one, two = ((("authorization", f"Bearer {key}-key"),) for key in ("one", "two"))
        asked = router_pb2.RouteRequest(direct=build_generate(PROMPT, "", {"max_tokens": 5}))
        async with asyncio.timeout(240):
            while True:
                with contextlib.suppress(grpc.aio.AioRpcError):  # its instance is not known yet
                    placed = (await stub.Route(asked, metadata=one)).direct.request
                    break
                await asyncio.sleep(0.05)
        notice = router_pb2.NoteDirectRequest(request_id=placed.request_id, ticket_mac=placed.ticket.mac, ended=True)
        assert not (await stub.NoteDirect(notice, metadata=two)).known
        assert (await stub.NoteDirect(notice, metadata=one)).known


async def test_notices_without_progress_keep_no_reservation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("START_S", "LEASE_S"):
        monkeypatch.setattr(ticket, name, 0.5)
    (tmp_path / "key").write_bytes(KEY)
    worker = FakeWorker(Role.DECODE, "d0", ticket_key=KEY)
    worker.state.model_path = MODEL
    await worker.start()
    config = RouterConfig(port=0, grpc_port=0, decode=(worker.address,), ticket_key_file=str(tmp_path / "key"))
    app = RouterApp(config)
    await app.start()
    try:
        async with asyncio.timeout(240), open_channel(f"127.0.0.1:{app.grpc_port}") as channel:
            while not app.is_ready():
                await asyncio.sleep(0.01)
            stub = router_pb2_grpc.RouterServiceStub(channel)
            asked = router_pb2.RouteRequest(direct=build_generate(PROMPT, "", {"max_tokens": 5}))
            placed = (await stub.Route(asked)).direct.request
            notice = router_pb2.NoteDirectRequest(request_id=placed.request_id, ticket_mac=placed.ticket.mac)
            assert (await stub.NoteDirect(notice)).known
            while (await stub.NoteDirect(notice)).known:
                await asyncio.sleep(0.1)
            assert not app.dispatcher.num_in_flight
    finally:
        await app.stop()
        await worker.stop()


async def test_a_notice_about_anothers_request_has_no_effect(world: World) -> None:
    async with contextlib.AsyncExitStack() as stack:
        channel = await stack.enter_async_context(open_channel(world.grpc))
        router_stub = router_pb2_grpc.RouterServiceStub(channel)
        asked = build_generate(PROMPT, "", {"max_tokens": 5})
        placements = [(await router_stub.Route(router_pb2.RouteRequest(direct=asked))).direct for _ in range(2)]
        mine, others = [x.request for x in placements]
        for mac in (b"", bytes(32), mine.ticket.mac):
            forged = router_pb2.NoteDirectRequest(
                request_id=others.request_id, ticket_mac=mac, num_tokens=5, ended=True, failed=True
            )
            assert not (await router_stub.NoteDirect(forged)).known
        assert await world.metric("direct_open") == 2
        for direct in placements:
            await run_placed(direct)
            placed = direct.request
            own = router_pb2.NoteDirectRequest(
                request_id=placed.request_id, ticket_mac=placed.ticket.mac, num_tokens=2, ended=True, cancelled=True
            )
            assert (await router_stub.NoteDirect(own)).known
    await until(world.nothing_held)
    assert await world.metric('direct_requests_total{outcome="cancelled"}') == 2
    assert await world.of_requests("generated_tokens_total") == 4


async def test_notices_open_and_close_no_breaker(world: World, tmp_path: Path) -> None:
    """A client that says of every request that its instance broke off takes no instance from others."""
    addresses = ",".join(x.address for x in world.workers)
    async with contextlib.AsyncExitStack() as stack:
        flags = ("--decode", addresses, "--ticket-key-file", str(tmp_path / "key"), "--breaker-failures", "1")
        process = await stack.enter_async_context(router(*flags))
        http = await stack.enter_async_context(httpx.AsyncClient(base_url=f"http://{process.http}", timeout=240))
        strict = World(world.workers, process.grpc, http)

        async def ready() -> bool:
            return await strict.metric("instance_healthy{") == 2

        await until(ready)
        router_stub = router_pb2_grpc.RouterServiceStub(await stack.enter_async_context(open_channel(process.grpc)))
        asked = build_generate(PROMPT, "", {"max_tokens": 5})
        for _ in range(8):
            direct = (await router_stub.Route(router_pb2.RouteRequest(direct=asked))).direct
            await run_placed(direct)
            placed = direct.request
            notice = router_pb2.NoteDirectRequest(
                request_id=placed.request_id, ticket_mac=placed.ticket.mac, ended=True, failed=True
            )
            assert (await router_stub.NoteDirect(notice)).known
        await until(strict.nothing_held)
        assert await strict.metric('direct_requests_total{outcome="failed"}') == 8
        assert await strict.metric("breaker_opened_total") == 0


async def test_one_that_cannot_be_placed_is_explained_too(world: World, tmp_path: Path) -> None:
    addresses = ",".join(x.address for x in world.workers)
    world.workers[0].state.pause_after = world.workers[1].state.pause_after = 1
    async with contextlib.AsyncExitStack() as stack:
        flags = ("--decode", addresses, "--ticket-key-file", str(tmp_path / "key"), "--max-in-flight", "1")
        narrow = await stack.enter_async_context(router(*flags))
        http = await stack.enter_async_context(httpx.AsyncClient(base_url=f"http://{narrow.http}", timeout=240))

        async def ready() -> bool:
            return (await http.get("/readyz")).status_code == 200

        await until(ready)
        client = await stack.enter_async_context(AsyncClient(narrow.grpc, direct=True))
        stream = await stack.enter_async_context(
            await client.generate(PROMPT, max_tokens=5, stream=True, request_id="first")
        )
        await anext(stream)
        with pytest.raises(QueueFullError):
            await client.generate(PROMPT, max_tokens=3, request_id="second")
        refused = (await http.get("/debug/decisions/second")).json()
        assert (refused["outcome"], refused["direct"], refused["placements"]) == (QueueFullError.code, True, [])
        assert (await http.get("/debug/decisions/first")).json()["outcome"] == "running"
        stream.cancel()

        async def cancelled() -> bool:
            return (await http.get("/debug/decisions/first")).json()["outcome"] == "cancelled"

        await until(cancelled)


async def broken_stream(world: World, break_off: Callable[[FakeWorker], Awaitable[None]], n: int) -> Any:
    for worker in world.workers:
        worker.state.pause_after = 4
    async with AsyncClient(world.grpc, direct=True) as client:
        stream = await client.generate(PROMPT, max_tokens=12, seed=8, n=n, stream=True)
        chunks = [await anext(stream) for _ in range(4 * n)]
        (first,) = [x for x in world.workers if x.state.running]
        assert await world.metric("direct_open") == 1
        for worker in world.workers:
            worker.state.pause_after = None
        await break_off(first)
        async with asyncio.timeout(240):
            chunks += [chunk async for chunk in stream]
        for index in range(n):
            own = [chunk for chunk in chunks if chunk.index == index]
            tokens = [token for chunk in own for token in chunk.token_ids]
            assert tokens == expected_tokens(PROMPT, 12, seed=8, index=index)
            assert "".join(x.text for x in own) == Tokenizer.load(MODEL).decode(tokens)
            assert [x.finish_reason for x in own if x.finish_reason] == ["length"]
    await until(world.nothing_held)
    return stream.trace


@pytest.mark.parametrize("n", [1, 2])
async def test_a_stream_that_breaks_goes_on_through_the_router_with_the_right_tokens(world: World, n: int) -> None:
    trace = await broken_stream(world, lambda worker: worker.stop(), n)
    assert trace.num_migrations >= 1
    assert await world.metric('direct_requests_total{outcome="failed"}') == 1


async def test_cancelling_ends_the_request_on_the_instance(world: World) -> None:
    for worker in world.workers:
        worker.state.pause_after = 1
    async with AsyncClient(world.grpc, direct=True) as client:
        async with await client.generate(PROMPT, max_tokens=12, stream=True) as stream:
            await anext(stream)
            (running,) = [x for x in world.workers if x.state.running]
        await running.wait_until(lambda: not running.state.running)
        await until(world.nothing_held)


async def test_instances_refuse_what_the_ticket_is_not_for(world: World) -> None:
    async with contextlib.AsyncExitStack() as stack:
        channel = await stack.enter_async_context(open_channel(world.grpc))
        asked = build_generate(PROMPT, "", {"max_tokens": 3, "seed": 1})
        router_stub = router_pb2_grpc.RouterServiceStub(channel)

        async def placed() -> tuple[worker_pb2.GenerateRequest, str]:
            route = await router_stub.Route(router_pb2.RouteRequest(direct=asked))
            return route.direct.request, route.direct.address

        request, address = await placed()
        (other,) = [x.address for x in world.workers if x.address != address]

        async def send(changed: worker_pb2.GenerateRequest, to: str, *, ticket: bool = True) -> int:
            stub = worker_pb2_grpc.WorkerServiceStub(await stack.enter_async_context(open_channel(to)))
            head = ((HEADER, ticket_header(changed.ticket)),) if ticket else ()
            try:
                return len([x async for x in stub.Generate(changed, timeout=240, metadata=head)])
            except Exception as error:
                raise from_rpc_error(error) from error  # type: ignore[arg-type]

        forged = worker_pb2.GenerateRequest()
        forged.CopyFrom(request)
        forged.ticket.mac = bytes(32)
        for changed, to, reason in ((forged, address, "forged"), (request, other, "another instance")):
            with pytest.raises(PermissionDeniedError, match=reason):
                await send(changed, to)
        with pytest.raises(PermissionDeniedError, match="wants a placement ticket"):
            await send(request, address, ticket=False)  # the one in the message counts for nothing
        assert await send(request, address) == 3
        with pytest.raises(PermissionDeniedError, match="used before"):
            await send(request, address)
        for name, value in (("priority", -5), ("cache_salt", "x")):
            changed, to = await placed()
            setattr(changed, name, value)
            with pytest.raises(PermissionDeniedError, match="another request"):
                await send(changed, to)


def use(check: TicketCheck, request: worker_pb2.GenerateRequest) -> None:
    head = ticket_header(request.ticket)
    check.admit(head)
    check.require(head, request_digest(request))


def test_a_ticket_has_an_end_and_belongs_to_one_process() -> None:
    clock = [1000.0]
    request = worker_pb2.GenerateRequest(request_id="r", prompt_token_ids=pack_ids([1, 2]))
    sign(KEY, request, Bearer("d0", b"epoch"), life_s=30, now=lambda: clock[0])
    with pytest.raises(PermissionDeniedError, match="another instance or process"):
        use(TicketCheck(KEY, Bearer("d0", b"restarted"), lambda: clock[0]), request)
    with pytest.raises(PermissionDeniedError, match="another key"):
        use(TicketCheck(KEY[::-1], Bearer("d0", b"epoch"), lambda: clock[0]), request)
    clock[0] += 31
    with pytest.raises(PermissionDeniedError, match=r"expired 1\.0 s ago"):
        use(TicketCheck(KEY, Bearer("d0", b"epoch"), lambda: clock[0]), request)


@pytest.mark.parametrize("jump_s", [-86400.0, -31.0, 31.0, 86400.0])
def test_a_clock_that_jumps_makes_no_ticket_count_twice_nor_for_ever(jump_s: float) -> None:
    clock = [1e9]
    check = TicketCheck(KEY, Bearer("d0", b"epoch"), lambda: clock[0])

    def ticket(name: str) -> worker_pb2.GenerateRequest:
        request = worker_pb2.GenerateRequest(request_id=name, prompt_token_ids=pack_ids([1, 2]))
        sign(KEY, request, Bearer("d0", b"epoch"), life_s=30, now=lambda: clock[0])
        return request

    used, unused = ticket("used"), ticket("unused")
    use(check, used)
    clock[0] += jump_s
    with pytest.raises(PermissionDeniedError):
        use(check, used)
    if jump_s > 0:
        with pytest.raises(PermissionDeniedError, match="expired"):
            use(check, unused)
    clock[0] = 1e9 + 29  # back again, and the ticket not yet over: still used once
    for number in range(100):
        use(check, ticket(str(number)))
    with pytest.raises(PermissionDeniedError, match="used before"):
        use(check, used)


def test_a_key_must_be_there_and_long_enough(tmp_path: Path) -> None:
    assert read_ticket_key("") is None
    for name, content in (("missing", None), ("short", b"secret\n"), ("same", b"k" * 32)):
        if content is not None:
            (tmp_path / name).write_bytes(content)
        with pytest.raises(ConfigError) as refused:
            read_ticket_key(str(tmp_path / name))
        assert refused.value.field == "ticket_key_file"


async def test_without_a_key_a_router_says_so() -> None:
    async with contextlib.AsyncExitStack() as stack:
        process = await stack.enter_async_context(router())
        async with AsyncClient(process.grpc, direct=True) as client:
            with pytest.raises(InvalidRequestError, match="ticket-key-file") as refused:
                await client.generate(PROMPT, max_tokens=2)
            assert refused.value.field == "direct"


async def test_a_real_decode_instance_wants_tickets_of_clients_and_none_of_routers(tmp_path: Path) -> None:
    (tmp_path / "key").write_bytes(KEY)
    engine = EngineConfig(model=MODEL, dtype="float32", kv_blocks=64)
    config = WorkerConfig(ticket_key_file=str(tmp_path / "key"))
    async with LocalCluster(engine, config, num_prefill=0) as cluster:
        (decode,) = cluster.decode
        request = worker_pb2.GenerateRequest(
            request_id="r",
            prompt_token_ids=pack_ids(PROMPT),
            sampling=common_pb2.SamplingParams(max_tokens=4, n=1, temperature=0, ignore_eos=True),
        )
        async with open_channel(decode.address) as channel:
            stub = worker_pb2_grpc.WorkerServiceStub(channel)

            async def generate() -> list[int]:
                head = ((HEADER, ticket_header(request.ticket)),) if request.HasField("ticket") else ()
                stream = stub.Generate(request, timeout=240, metadata=head)
                return [t async for x in stream for d in x.deltas for t in d.token_ids]

            with pytest.raises(grpc.aio.AioRpcError, match="wants a placement ticket") as refused:
                await generate()
            assert refused.value.code() is grpc.StatusCode.PERMISSION_DENIED
            many = stub.GenerateMany()
            await many.write(worker_pb2.GenerateManyRequest(starts=[worker_pb2.CallStart(call=1, request=request)]))
            tokens: list[int] = []
            ends: list[worker_pb2.CallEnd] = []
            while not ends:
                message = await many.read()
                tokens += message.token_ids
                tokens += [t for x in message.messages for d in x.response.deltas for t in d.token_ids]
                ends += message.ends
            assert ends[0].code == 0
            many.cancel()
            info = await stub.GetInfo(worker_pb2.GetInfoRequest())
            sign(KEY, request, Bearer(info.instance_id, info.epoch, decode.address), life_s=30)
            assert len(tokens) == 4
            assert await generate() == tokens
