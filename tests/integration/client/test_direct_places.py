"""Direct mode: a tenant's place is free when its ticket cannot be used any more, whatever its client says before."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from tests.integration.client.test_direct import KEY, MODEL, PROMPT, run_placed
from tests.support.servers.fake_worker import FakeWorker

from baton import AsyncClient
from baton.api.v1 import router_pb2, router_pb2_grpc
from baton.client.request import build_generate
from baton.config.router import RouterConfig
from baton.errors import BatonError
from baton.rpc.channel import open_channel
from baton.rpc.service_token import read_token
from baton.types import Role
from baton_router.app import RouterApp
from baton_router.frontend.grpc import ticket

HEAD = (("authorization", "Bearer sk-one"),)


@contextlib.asynccontextmanager
async def open_world(
    tmp_path: Path, tenants: dict[str, Any], slots: int | None = None
) -> AsyncIterator[tuple[FakeWorker, RouterApp]]:
    """Open a router with tenants, and a decode instance that wants tickets."""
    for name, content in (
        ("key", KEY),
        ("token", b"the services' token"),
        ("keys.json", json.dumps({"tenants": tenants}).encode()),
    ):
        (tmp_path / name).write_bytes(content)
    worker = FakeWorker(Role.DECODE, "d0", ticket_key=KEY, token=read_token(str(tmp_path / "token")))
    worker.state.model_path = MODEL
    await worker.start()
    app = RouterApp(
        RouterConfig(
            port=0,
            grpc_port=0,
            decode=(worker.address,),
            ticket_key_file=str(tmp_path / "key"),
            token_file=str(tmp_path / "token"),
            api_keys=str(tmp_path / "keys.json"),
            instance_slots=slots,
        )
    )
    await app.start()
    try:
        async with asyncio.timeout(240):
            while not app.is_ready():
                await asyncio.sleep(0.01)
        yield worker, app
    finally:
        await app.stop()
        await worker.stop()


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[tuple[FakeWorker, RouterApp]]:
    """A world with a tenant that may run one request."""
    async with open_world(tmp_path, {"one": {"keys": ["sk-one"], "max_in_flight": 1}}) as opened:
        yield opened


async def place(stub: Any, head: Any = HEAD) -> router_pb2.DirectPlacement:
    asked = router_pb2.RouteRequest(direct=build_generate(PROMPT, "", {"max_tokens": 5}))
    return (await stub.Route(asked, metadata=head, timeout=240)).direct


async def is_full(stub: Any) -> bool:
    try:
        await place(stub)
    except grpc.aio.AioRpcError as error:
        if error.code() is not grpc.StatusCode.RESOURCE_EXHAUSTED:
            raise
        return True
    return False


async def note_end(stub: Any, direct: router_pb2.DirectPlacement) -> None:
    notice = router_pb2.NoteDirectRequest(
        request_id=direct.request.request_id, ticket_mac=direct.request.ticket.mac, ended=True, cancelled=True
    )
    assert (await stub.NoteDirect(notice, metadata=HEAD, timeout=240)).known


async def all_ended(app: RouterApp) -> None:
    async with asyncio.timeout(20):  # before the ticket expires
        while app.dispatcher.num_in_flight:
            await asyncio.sleep(0.01)


async def test_an_end_before_the_ticket_is_used_frees_no_place(world: tuple[FakeWorker, RouterApp]) -> None:
    worker, app = world
    worker.state.pause_after = 1
    async with open_channel(f"127.0.0.1:{app.grpc_port}") as channel:
        stub = router_pb2_grpc.RouterServiceStub(channel)
        direct = await place(stub)
        await note_end(stub, direct)
        assert await is_full(stub)
        running = asyncio.create_task(run_placed(direct))
        await worker.wait_until(lambda: bool(worker.state.running))
        assert await is_full(stub), "it runs"
        worker.state.pause_after = None
        worker.changed()
        assert await running == 5
        await all_ended(app)
        assert not await is_full(stub)


async def test_an_unused_tickets_place_is_free_when_it_expires(
    world: tuple[FakeWorker, RouterApp], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, app = world
    monkeypatch.setattr(ticket, "START_S", 0.5)
    async with open_channel(f"127.0.0.1:{app.grpc_port}") as channel:
        stub = router_pb2_grpc.RouterServiceStub(channel)
        await note_end(stub, await place(stub))
        await all_ended(app)
        assert not await is_full(stub)


async def test_clients_that_end_or_cancel_a_request_have_their_place_at_once(
    world: tuple[FakeWorker, RouterApp],
) -> None:
    worker, app = world
    async with AsyncClient(f"127.0.0.1:{app.grpc_port}", token="sk-one", direct=True) as client:
        for _ in range(3):
            await client.generate(PROMPT, max_tokens=5)
            await all_ended(app)
        worker.state.pause_after = 1
        stream = await client.generate(PROMPT, max_tokens=5, stream=True)
        await anext(stream)
        stream.cancel()
        await all_ended(app)
        stream = await client.generate(PROMPT, max_tokens=5, stream=True)
        await anext(stream)
        await worker.stop()  # the router loses the instance, too
        with pytest.raises(BatonError):  # no other instance is there
            async for _ in stream:
                pass
        await all_ended(app)
