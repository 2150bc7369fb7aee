"""Direct mode: unused tickets do not delay other tenants, whatever notices their client sends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from tests.integration.client.test_direct import PROMPT, run_placed
from tests.integration.client.test_direct_places import all_ended, open_world, place
from tests.support.router.world import Clock
from tests.support.servers.fake_tokens import expected_tokens
from tests.support.servers.fake_worker import FakeWorker

from baton import AsyncClient
from baton.api.v1 import router_pb2, router_pb2_grpc
from baton.errors import QueueFullError
from baton.rpc import ticketed_calls
from baton.rpc.channel import open_channel
from baton.rpc.errors import from_rpc_error
from baton_router.app import RouterApp
from baton_router.frontend.grpc import ticket
from baton_router.frontend.grpc.ticket import TicketDesk

ALICE = (("authorization", "Bearer sk-alice"),)
TENANTS = {"alice": {"keys": ["sk-alice"], "max_in_flight": 2}, "bob": {"keys": ["sk-bob"]}}


@pytest.fixture
def desks(monkeypatch: pytest.MonkeyPatch) -> list[TicketDesk]:
    """The desks that are made, with a clock that stands still and no ticks of their own."""
    made: list[TicketDesk] = []
    init = TicketDesk.__init__

    def begin(self: TicketDesk, *args: Any) -> None:
        init(self, *args, now=Clock())
        made.append(self)

    monkeypatch.setattr(TicketDesk, "__init__", begin)
    monkeypatch.setattr(TicketDesk, "start", lambda self: None)
    return made


@pytest.fixture
async def world(tmp_path: Path, desks: list[TicketDesk]) -> AsyncIterator[tuple[FakeWorker, RouterApp]]:
    """A world with room for two sequences."""
    async with open_world(tmp_path, TENANTS, slots=2) as opened:
        yield opened


def let_pass(desk: TicketDesk, seconds: float) -> None:
    clock: Any = desk._now
    clock.now += seconds
    desk.expire()


async def note(stub: Any, direct: router_pb2.DirectPlacement, tokens: int) -> bool:
    notice = router_pb2.NoteDirectRequest(
        request_id=direct.request.request_id, ticket_mac=direct.request.ticket.mac, num_tokens=tokens
    )
    return bool((await stub.NoteDirect(notice, metadata=ALICE, timeout=240)).known)


async def test_notices_of_tokens_keep_no_room_and_no_reservation_of_unused_tickets(
    world: tuple[FakeWorker, RouterApp], desks: list[TicketDesk]
) -> None:
    _, app = world
    (desk,) = desks
    async with open_channel(f"127.0.0.1:{app.grpc_port}") as channel:
        stub = router_pb2_grpc.RouterServiceStub(channel)
        placed = [await place(stub, ALICE) for _ in range(2)]
        async with AsyncClient(f"127.0.0.1:{app.grpc_port}", token="sk-bob") as bob:
            answer = asyncio.create_task(bob.generate(PROMPT, max_tokens=3, seed=5))
            async with asyncio.timeout(240):
                while not len(app.dispatcher.admission.queue):
                    await asyncio.sleep(0.01)
            assert all([await note(stub, direct, 1) for direct in placed])
            let_pass(desk, ticket.ROOM_S)
            assert (await answer).choices[0].token_ids == expected_tokens(PROMPT, 3, seed=5)
        assert all([await note(stub, direct, 2) for direct in placed])
        with pytest.raises(grpc.aio.AioRpcError, match="as many as it may have"):
            await place(stub, ALICE)  # the tickets can still be used
        let_pass(desk, ticket.START_S - ticket.ROOM_S)
        assert not any([await note(stub, direct, 3) for direct in placed])
        assert not app.dispatcher.num_in_flight
        (instance,) = app.registry.instances()
        assert (instance.load.requests, instance.load.tokens) == (0, 0)
        await place(stub, ALICE)


async def test_a_ticket_that_is_used_late_keeps_its_reservation(
    world: tuple[FakeWorker, RouterApp], desks: list[TicketDesk]
) -> None:
    worker, app = world
    (desk,) = desks
    worker.state.pause_after = 1
    async with open_channel(f"127.0.0.1:{app.grpc_port}") as channel:
        stub = router_pb2_grpc.RouterServiceStub(channel)
        used, unused = [await place(stub, ALICE) for _ in range(2)]
        let_pass(desk, ticket.ROOM_S)
        running = asyncio.create_task(run_placed(used))
        (instance,) = app.registry.instances()
        async with asyncio.timeout(240):
            while sum(desk._unused.values()) != 1:
                await asyncio.sleep(0.01)
        assert all([await note(stub, direct, 1) for direct in (used, unused)])
        let_pass(desk, ticket.START_S - ticket.ROOM_S)
        assert await note(stub, used, 2), "it runs"
        assert not await note(stub, unused, 2)
        worker.state.pause_after = None
        worker.changed()
        assert await running == 5
        notice = router_pb2.NoteDirectRequest(
            request_id=used.request.request_id, ticket_mac=used.request.ticket.mac, num_tokens=5, ended=True
        )
        assert (await stub.NoteDirect(notice, metadata=ALICE, timeout=240)).known
        await all_ended(app)
        assert (instance.load.requests, instance.load.tokens) == (0, 0)
        assert not desk._unused


async def test_unused_tickets_of_a_tenant_leave_room_and_its_client_goes_through_the_router(
    tmp_path: Path, desks: list[TicketDesk]
) -> None:
    tenants = {name: {"keys": [f"sk-{name}"]} for name in ("alice", "bob")}
    async with open_world(tmp_path, tenants, slots=24) as (worker, app):
        (desk,) = desks
        address = f"127.0.0.1:{app.grpc_port}"
        async with open_channel(address) as channel:
            stub = router_pb2_grpc.RouterServiceStub(channel)
            placed: list[router_pb2.DirectPlacement] = []

            async def place_all() -> None:
                while True:
                    placed.append(await place(stub, ALICE))

            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await place_all()
            error = from_rpc_error(refused.value)
            assert (type(error), error.field) == (QueueFullError, "direct")
            assert ticket.MIN_UNUSED <= len(placed) <= 12, "half of the room"
            async with AsyncClient(address, token="sk-alice", direct=True, retries=0) as alice:
                answer = await alice.generate(PROMPT, max_tokens=3, seed=5)
                assert answer.choices[0].token_ids == expected_tokens(PROMPT, 3, seed=5)
            assert len(worker.state.requests) == 1
            assert not worker.state.requests[0].HasField("ticket"), "it came through the router"
            await run_placed(placed[0])
            async with asyncio.timeout(240):
                while desk._unused["alice"] == len(placed):
                    await asyncio.sleep(0.01)
            await place(stub, ALICE)
            await place(stub, (("authorization", "Bearer sk-bob"),))
            let_pass(desk, ticket.START_S)
            assert not desk._unused
            await place(stub, ALICE)


async def test_a_request_that_comes_too_slowly_goes_through_the_router(
    world: tuple[FakeWorker, RouterApp], monkeypatch: pytest.MonkeyPatch
) -> None:
    worker, app = world
    monkeypatch.setattr(ticketed_calls, "READ_S", 0.0)
    monkeypatch.setattr(ticketed_calls, "READ_BYTES_PER_S", 10**12)
    async with AsyncClient(f"127.0.0.1:{app.grpc_port}", token="sk-bob", direct=True, retries=0) as bob:
        answer = await bob.generate(PROMPT, max_tokens=3, seed=5)
        assert answer.choices[0].token_ids == expected_tokens(PROMPT, 3, seed=5)
    assert len(worker.state.requests) == 1
