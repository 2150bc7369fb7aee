"""How an instance takes leave of its router."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import grpc.aio
import pytest

from baton.api.v1 import router_pb2, router_pb2_grpc
from baton.types import Epoch, InstanceId, Role
from baton.worker.instance import Identity, Registration


class Router(router_pb2_grpc.RouterServiceServicer):
    """Registers instances and refuses their goodbyes."""

    async def Register(self, request: Any, context: Any) -> router_pb2.RegisterResponse:
        return router_pb2.RegisterResponse(lease_id="l", ttl_ms=600_000)

    async def Deregister(self, request: Any, context: Any) -> Any:
        await context.abort(grpc.StatusCode.PERMISSION_DENIED, "no")


@pytest.mark.parametrize("ended", [True, False])
async def test_only_a_router_that_is_there_misses_a_goodbye(ended: bool, caplog: pytest.LogCaptureFixture) -> None:
    """``baton up`` ends its router first: that one has no use for the goodbyes of instances."""
    caplog.set_level(logging.INFO)
    server = grpc.aio.server()
    router_pb2_grpc.add_RouterServiceServicer_to_server(Router(), server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    registration = Registration(address, Identity("127.0.0.1:1", InstanceId("i"), Role.DECODE, Epoch(b"e" * 16)), None)
    registration.start()
    async with asyncio.timeout(240):
        while "registered with router" not in caplog.text:
            await asyncio.sleep(0.01)
    if ended:
        await server.stop(0)
    await registration.stop()
    assert ("did not hear the goodbye" in caplog.text) is not ended
    await server.stop(0)
