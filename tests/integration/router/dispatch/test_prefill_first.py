"""The order ``prefill_first`` as the router sees it: prefill, then choose decode; and what happens when one fails."""

from __future__ import annotations

import asyncio
import contextlib

import grpc.aio
import pytest
from tests.integration.router.test_router_process import generate_request
from tests.integration.router.test_router_process import router as router_process
from tests.support.router.world import Answer, Router, World, assert_right, make_request, read, run
from tests.support.servers.fake_worker import FakeWorker

from baton import AsyncClient, Client
from baton.api.v1 import common_pb2, router_pb2_grpc
from baton.errors import InternalError, QueueFullError
from baton.rpc.channel import open_channel
from baton.token_ids import unpack_ids
from baton.types import Order, Role
from baton_router.types import RoutedRequest

FIRST = {"order": "prefill_first", "remote_prefill_threshold": 1, "policy": "round_robin"}


async def cluster(world: World, prefills: int = 2, decodes: int = 2, **options: object) -> Router:
    """A router in the order ``prefill_first``, which takes instances in turns; p0 and d0 are asked first."""
    return await world.cluster(await world.prefills(prefills), await world.decodes(decodes), **{**FIRST, **options})


def worker(world: World, name: str) -> FakeWorker:
    return next(x for x in world.workers if x.instance_id == name)


def by_role(world: World, role: str) -> list[FakeWorker]:
    return [x for x in world.workers if x.instance_id.startswith(role)]


async def the_one_asked(world: World) -> FakeWorker:
    """The prefill instance that computes a prompt now."""
    prefills = by_role(world, "p")
    async with asyncio.timeout(240):
        while not any(x.state.running for x in prefills):
            await asyncio.sleep(0.001)
    return next(x for x in prefills if x.state.running)


async def test_decode_is_chosen_when_the_prompt_is_computed(world: World) -> None:
    router = await cluster(world)
    for x in by_role(world, "p"):
        x.state.hold_prefills = True
    request = make_request()
    task = asyncio.create_task(run(router, request))
    prefill = await the_one_asked(world)
    assert [router.instance(x).load.requests for x in by_role(world, "d")] == [0, 0], "decode is not chosen yet"
    assert router.instance(prefill).load.tokens == len(request.prompt_token_ids)
    gone = worker(world, "d0")
    gone.set_load(draining=True)
    await router.until(lambda: not router.instance(gone).ready)
    for x in by_role(world, "p"):
        x.state.hold_prefills = False
        x.changed()
    answer = await task
    assert_right(answer, request)
    assert (answer.trace.order, answer.trace.decode_instance) == ("prefill_first", "d1")
    (sent,) = worker(world, "d1").state.requests
    (key,) = prefill.state.unclaimed
    assert (sent.prefilled.address, sent.prefilled.key) == (prefill.address, key)
    other = next(x for x in by_role(world, "p") if x is not prefill)
    assert list(sent.prefill_candidates) == [other.address]
    computed = prefill.state.unclaimed[key]
    assert unpack_ids(computed.prompt_token_ids).tolist() == list(request.prompt_token_ids)
    assert computed.sampling.seed == 5
    assert router.metric("prefill_first_total", outcome="computed") == 1
    router.assert_nothing_held()


@pytest.mark.parametrize(
    ("configured", "asked", "served"),
    [
        ("prefill_first", None, "prefill_first"),
        ("prefill_first", Order.DECODE_FIRST, "decode_first"),
        ("decode_first", Order.PREFILL_FIRST, "prefill_first"),
        ("decode_first", None, "decode_first"),
    ],
)
async def test_a_request_can_say_its_order(world: World, configured: str, asked: Order | None, served: str) -> None:
    router = await cluster(world, order=configured)
    request = make_request()
    request.order = asked
    answer = await run(router, request)
    assert_right(answer, request)
    assert answer.trace.order == served
    assert any(x.state.unclaimed for x in by_role(world, "p")) == (served == "prefill_first")


async def test_the_next_prefill_instance_is_asked_when_one_fails(world: World) -> None:
    router = await cluster(world)
    for x in by_role(world, "p"):
        x.state.hold_prefills = True
    request = make_request()
    task = asyncio.create_task(run(router, request))
    first = await the_one_asked(world)
    first.state.refuse_prefills = InternalError("no")
    for x in by_role(world, "p"):
        x.state.hold_prefills = False
        x.changed()
    answer = await task
    assert_right(answer, request)
    assert answer.trace.order == "prefill_first"
    assert list(answer.trace.failed_prefills) == [f"{first.address}: no"]
    router.assert_nothing_held()


async def test_a_prefill_instance_that_dies_while_it_computes(world: World) -> None:
    router = await cluster(world)
    for x in by_role(world, "p"):
        x.state.hold_prefills = True
    request = make_request()
    task = asyncio.create_task(run(router, request))
    first = await the_one_asked(world)
    await first.stop()
    for x in by_role(world, "p"):
        x.state.hold_prefills = False
        x.changed()
    answer = await task
    assert_right(answer, request)
    assert answer.trace.order == "prefill_first"
    assert answer.trace.failed_prefills[0].startswith(first.address)
    router.assert_nothing_held()


async def test_a_prefill_instance_whose_connection_is_closed_while_it_computes(world: World) -> None:
    """gRPC ends the call as if its caller had cancelled it: the request must go on, not wait for good."""
    router = await cluster(world)
    for x in by_role(world, "p"):
        x.state.hold_prefills = True
    request = make_request()
    task = asyncio.create_task(run(router, request))
    first = await the_one_asked(world)
    await router.instance(first).channel.close(None)
    for x in by_role(world, "p"):
        x.state.hold_prefills = False
        x.changed()
    async with asyncio.timeout(240):
        answer = await task
    assert_right(answer, request)
    assert answer.trace.failed_prefills[0].startswith(first.address)
    router.assert_nothing_held()


async def test_a_prefill_instance_that_hangs_is_found_out_by_probes(world: World) -> None:
    prefill, decode = (await world.prefills(1))[0], (await world.decodes(1))[0]
    proxy = await world.proxy(prefill)
    router = await world.router(
        prefill=(f"127.0.0.1:{proxy.port}",), decode=(decode.address,), probe_timeout_s=1.0, probe_failures=2, **FIRST
    )
    await router.ready(prefill, decode)
    prefill.state.hold_prefills = True
    request = make_request()
    task = asyncio.create_task(run(router, request))
    await the_one_asked(world)
    proxy.freeze()
    answer = await task
    assert_right(answer, request)
    assert answer.trace.order == "decode_first"
    assert router.metric("prefill_first_total", outcome="failed") == 1
    router.assert_nothing_held()


async def test_without_a_prefill_instance_that_can_do_it_decode_comes_first(world: World) -> None:
    router = await cluster(world)
    for x in by_role(world, "p"):
        x.state.refuse_prefills = QueueFullError("full", retry_after_s=1.0)
    request = make_request()
    answer = await run(router, request)
    assert_right(answer, request)
    assert answer.trace.order == "decode_first"
    assert len(answer.trace.failed_prefills) == 2
    sent = next(x for x in by_role(world, "d") if x.state.requests).state.requests[0]
    assert not sent.HasField("prefilled")
    assert router.metric("prefill_first_total", outcome="failed") == 1


async def test_a_prompt_that_decode_computes_by_itself_is_sent_to_decode(world: World) -> None:
    router = await cluster(world, remote_prefill_threshold=1000)
    answer = await run(router, make_request())
    assert answer.trace.order == "decode_first"
    assert router.metric("prefill_first_total", outcome="local") == 1
    assert not any(x.state.unclaimed for x in by_role(world, "p"))


async def test_a_full_decode_instance_leaves_the_kv_to_the_next(world: World) -> None:
    router = await cluster(world)
    full, other = by_role(world, "d")
    full.state.max_running = 0
    for name in ("a", "b"):  # one of them meets the full one
        answer = await run(router, make_request(name))
        assert_right(answer, make_request(name))
        assert (answer.trace.order, answer.trace.decode_instance) == ("prefill_first", "d1")
    assert router.metric("retries_total", reason="resource_exhausted") >= 1
    assert all(request.HasField("prefilled") for request in other.state.requests)
    assert not any(x.state.aborted for x in by_role(world, "p"))


async def test_after_a_decode_instance_died_nothing_counts_on_the_kv(world: World) -> None:
    """It may have claimed it: what is left is dropped, and the prompt goes the other way."""
    router = await cluster(world)
    for x in by_role(world, "d"):
        x.state.pause_after = 0
    request = make_request()
    task = asyncio.create_task(run(router, request))
    async with asyncio.timeout(240):
        while not any(x.state.running for x in by_role(world, "d")):
            await asyncio.sleep(0.001)
    dead = next(x for x in by_role(world, "d") if x.state.running)
    other = next(x for x in by_role(world, "d") if x is not dead)
    other.state.pause_after = None
    await dead.stop()
    answer = await task
    assert_right(answer, request)
    assert answer.trace.order == "decode_first"
    assert not other.state.requests[0].HasField("prefilled")
    assert other.state.requests[0].prefill_candidates
    holder = next(x for x in by_role(world, "p") if x.state.aborted or x.state.unclaimed)
    await holder.wait_until(lambda: not holder.state.unclaimed)
    router.assert_nothing_held()


@pytest.mark.parametrize("when", ["computing", "waiting"])
async def test_a_client_that_leaves_takes_its_prompt_along(world: World, when: str) -> None:
    router = await cluster(world)
    for x in world.workers:
        x.state.hold_prefills = when == "computing"
        x.state.pause_after = 0
    task = asyncio.create_task(run(router, make_request()))
    where = "p" if when == "computing" else "d"
    async with asyncio.timeout(240):
        while not any(x.state.running for x in by_role(world, where)):
            await asyncio.sleep(0.001)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    holder = next(x for x in by_role(world, "p") if x.state.running or x.state.unclaimed)
    await holder.wait_until(lambda: bool(holder.state.aborted) and not holder.state.running)
    assert not holder.state.unclaimed
    router.assert_nothing_held()


async def test_kv_that_decode_does_not_claim_is_dropped(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    router = await cluster(world, decodes=1, prefills=1)
    decode, prefill = worker(world, "d0"), worker(world, "p0")
    from_store = common_pb2.RequestTrace(path=common_pb2.PREFILL_PATH_STORE, decode_instance="d0")
    monkeypatch.setattr(decode, "_trace", lambda request: from_store)
    assert_right(await run(router, make_request()), make_request())
    await prefill.wait_until(lambda: bool(prefill.state.aborted))
    assert not prefill.state.unclaimed


async def test_streams_of_both_orders_go_on_when_decode_dies(world: World) -> None:
    router = await cluster(world)
    for x in by_role(world, "d"):
        x.state.pause_after = 3
    request: RoutedRequest = make_request(n=2)
    answer = Answer()
    stream = router.dispatcher.stream(request)
    await read(stream, answer, 3)
    dead = next(x for x in by_role(world, "d") if x.state.running)
    for x in by_role(world, "d"):
        x.state.pause_after = None
    await dead.stop()
    async for chunk in stream:
        answer.add(chunk)
    assert_right(answer, request)
    assert (answer.trace.order, answer.trace.num_migrations) == ("prefill_first", 1)
    assert not any(x.state.aborted for x in by_role(world, "p")), "the KV was claimed long ago"
    router.assert_nothing_held()


async def test_a_router_that_runs_out_of_decode_instances_waits_with_the_kv(world: World) -> None:
    router = await cluster(world, decodes=1, prefills=1)
    prefill, decode = worker(world, "p0"), worker(world, "d0")
    prefill.state.hold_prefills = True
    task = asyncio.create_task(run(router, make_request()))
    await the_one_asked(world)
    await decode.stop()
    await router.until(lambda: not router.instance(decode).ready)
    prefill.state.hold_prefills = False
    prefill.changed()
    await prefill.wait_until(lambda: bool(prefill.state.unclaimed))
    await decode.restart()
    answer = await task
    assert_right(answer, make_request())
    assert answer.trace.order == "prefill_first"


async def test_a_grpc_call_and_the_sdk_can_say_the_order() -> None:
    """The header of HTTP, as metadata; through a router's process."""
    async with contextlib.AsyncExitStack() as stack:
        workers = [FakeWorker(Role.PREFILL, "p0"), FakeWorker(Role.DECODE, "d0")]
        for x in workers:
            x.state.model_path = "models/baton-tiny"
            await x.start()
            stack.push_async_callback(x.stop)
        flags = ("--prefill", workers[0].address, "--decode", workers[1].address, "--remote-prefill-threshold", "1")
        process = await stack.enter_async_context(router_process(*flags))
        client = await stack.enter_async_context(AsyncClient(process.grpc, timeout=240))
        async with asyncio.timeout(240):
            while [x.healthy for x in await client.list_instances()] != [True, True]:
                await asyncio.sleep(0.02)
        for first, order in ((20, "prefill_first"), (100, "decode_first"), (200, "prefill_first")):
            answer = await client.generate([*range(first, first + 40)], max_tokens=4, seed=5, order=order)
            assert answer.trace is not None
            assert answer.trace.order == order
        assert len(workers[0].state.unclaimed) == 2
        with Client(process.grpc, timeout=240) as sync:
            prompt = [*range(300, 340)]
            stream = await asyncio.to_thread(sync.generate, prompt, max_tokens=4, stream=True, order="prefill_first")
            await asyncio.to_thread(stream.collect)
            assert stream.trace is not None
            assert stream.trace.order == "prefill_first"
        async with open_channel(process.grpc) as channel:
            stub = router_pb2_grpc.RouterServiceStub(channel)
            with pytest.raises(grpc.aio.AioRpcError, match="decode_first or prefill_first") as caught:
                await stub.Generate(generate_request(4), metadata=(("x-baton-order", "both"),), timeout=240).read()
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
