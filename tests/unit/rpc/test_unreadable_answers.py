"""A peer whose answers are no messages: gRPC's asyncio API hands out ``None`` then, which is nobody's answer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import pytest
from prometheus_client import CollectorRegistry

from baton.api.v1 import kvstore_pb2, worker_pb2, worker_pb2_grpc
from baton.client.async_client import AsyncClient
from baton.errors import BatonError, InternalError
from baton.kv_transfer.connector.store.client import StoreCalls
from baton.rpc.channel import open_channel
from baton.rpc.proof import Prover
from baton.rpc.service_token import Token
from baton.types import Epoch, InstanceId, Role
from baton.worker.instance import Identity, Registration
from baton_router.indexer.events import EventApplier, EventSubscriber, IndexMetrics
from baton_router.indexer.prefix_index import PrefixIndex

GARBAGE = b"\xff\xff\xff"
STREAMS = frozenset({"Generate", "StreamKvEvents", "StreamLoad"})


class _Garbage(grpc.GenericRpcHandler):
    """Answers every call with what is no message."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def service(self, details: grpc.HandlerCallDetails) -> Any:
        name = details.method.rpartition("/")[2]
        self.calls.append(name)

        async def answer(request: bytes, context: Any) -> bytes:
            return GARBAGE

        async def stream(request: bytes, context: Any) -> AsyncIterator[bytes]:
            yield GARBAGE

        if name in STREAMS:
            return grpc.unary_stream_rpc_method_handler(stream)
        return grpc.unary_unary_rpc_method_handler(answer)


@pytest.fixture
async def peer() -> AsyncIterator[tuple[str, _Garbage]]:
    server, handler = grpc.aio.server(), _Garbage()
    server.add_generic_rpc_handlers((handler,))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield f"127.0.0.1:{port}", handler
    await server.stop(0)


async def test_the_sdk_says_so(peer: tuple[str, _Garbage]) -> None:
    for direct in (False, True):
        async with AsyncClient(peer[0], direct=direct) as client:
            for call in (client.generate("x"), client.route("x"), client.models(), client.list_instances()):
                with pytest.raises(InternalError, match="cannot be read"):
                    await call


async def test_the_index_goes_on_asking_for_events(peer: tuple[str, _Garbage]) -> None:
    applier = EventApplier(PrefixIndex(), now=time.monotonic)
    subscriber = EventSubscriber(applier, IndexMetrics(CollectorRegistry()), 1.0)
    async with open_channel(peer[0]) as channel:
        call = worker_pb2_grpc.WorkerServiceStub(channel).StreamKvEvents(worker_pb2.StreamKvEventsRequest())
        assert await subscriber.follow("i", call)
    assert not subscriber.heard


async def test_an_instance_goes_on_registering(peer: tuple[str, _Garbage]) -> None:
    identity = Identity("127.0.0.1:1", InstanceId("i"), Role.DECODE, Epoch(b"e" * 16))
    registration = Registration(peer[0], identity, None)
    registration.start()
    async with asyncio.timeout(240):
        while peer[1].calls.count("Register") < 2:
            await asyncio.sleep(0.01)
    await registration.stop()


async def test_a_store_and_a_proof_fail_as_they_do_otherwise(peer: tuple[str, _Garbage]) -> None:
    calls = StoreCalls(peer[0], token=None, tls=None)
    with pytest.raises(BatonError, match="cannot be read"):
        await calls.begin("Contains", kvstore_pb2.ContainsRequest(), 60.0)
    await calls.close()
    async with open_channel(peer[0]) as channel:
        prover = Prover(Token("a token of some length"), peer[0], b"")
        prover.attach(channel)
        with pytest.raises(grpc.aio.AioRpcError, match="cannot be read"):
            await prover.header("/x/Y", 60.0, True)
