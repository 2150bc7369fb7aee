"""The access log of calls over gRPC, whose clients may be gone when the line is written."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import grpc
import pytest
from tests.support.router.limited_app import app_with_limits

from baton.api.v1 import router_pb2, router_pb2_grpc

STREAMS = 40
HEADERS = (("authorization", "Bearer sk-free"),)


def leave_unread(port: int) -> None:
    """Begin streams, read next to nothing of them, and close the connection: gRPC has no address for them then."""
    channel = grpc.insecure_channel(f"127.0.0.1:{port}", options=[("grpc.use_local_subchannel_pool", 1)])
    stub = router_pb2_grpc.RouterServiceStub(channel)
    streams = []
    for number in range(STREAMS):
        request = router_pb2.RouterGenerateRequest(token_ids=router_pb2.TokenIds(ids=[5, 6, 7, number]))
        request.sampling.max_tokens = 900
        request.sampling.ignore_eos = True
        streams.append(stub.Generate(request, metadata=HEADERS, timeout=240))
    for stream in streams[: STREAMS // 4]:
        next(stream)  # it has begun
    channel.close()


async def test_clients_that_leave_unread_streams_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    async with app_with_limits(tmp_path, access_log=True) as app:
        await asyncio.to_thread(leave_unread, app.grpc_port)

        def lines() -> list[str]:
            return [record.getMessage() for record in caplog.records if "Generate" in record.getMessage()]

        async with asyncio.timeout(240):
            while len(lines()) < STREAMS // 4:  # some had not begun
                await asyncio.sleep(0.05)
        assert all("127.0.0.1" in line for line in lines())
