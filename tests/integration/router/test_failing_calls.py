"""An error over gRPC whose handling fails: the call ends all the same, and nothing of it stays behind."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import grpc
import pytest
from tests.support.router.limited_app import app_with_limits

from baton.api.v1 import router_pb2, router_pb2_grpc
from baton.errors import InvalidRequestError
from baton_router.app import RouterApp
from baton_router.frontend.grpc import ticket
from baton_router.processor.input_processor import InputProcessor

FREE = (("authorization", "Bearer sk-free"),)


class UnanswerableError(InvalidRequestError):
    """An error that no status can be made of."""

    @property
    def grpc_status(self) -> str:  # type: ignore[override]
        raise ZeroDivisionError("in the handler")


async def fail(app: RouterApp, call: Any) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as failed:
        await call
    assert failed.value.code() in (grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL)
    async with asyncio.timeout(60):
        while app.dispatcher.num_in_flight:
            await asyncio.sleep(0.01)
    (instance,) = app.registry.instances()
    assert (instance.load.requests, instance.load.tokens) == (0, 0)


async def test_a_call_ends_whatever_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    key = tmp_path / "key"
    key.write_bytes(b"0123456789abcdef")
    request = router_pb2.RouterGenerateRequest(text="x")
    async with (
        app_with_limits(tmp_path, ticket_key_file=str(key)) as app,
        grpc.aio.insecure_channel(f"127.0.0.1:{app.grpc_port}") as channel,
    ):
        stub: Any = router_pb2_grpc.RouterServiceStub(channel)

        async def prepare(*args: Any, **fields: Any) -> None:
            raise UnanswerableError("x")

        with monkeypatch.context() as patch:
            patch.setattr(InputProcessor, "prepare", prepare)
            await fail(app, anext(aiter(stub.Generate(request, metadata=FREE, timeout=60))))

        def sign(*args: Any, **fields: Any) -> None:
            raise ZeroDivisionError("no ticket")

        with monkeypatch.context() as patch:
            patch.setattr(ticket, "sign", sign)
            direct = router_pb2.RouteRequest(direct=request)
            await fail(app, stub.Route(direct, metadata=FREE, timeout=60))
        assert len([answer async for answer in stub.Generate(request, metadata=FREE, timeout=240)]) > 0
