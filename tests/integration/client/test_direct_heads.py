"""Direct mode: a call is refused by the ticket in its head, before its request is read."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from tests.integration.client.test_direct import KEY, MODEL, PROMPT
from tests.support.servers.cluster import LocalCluster
from tests.support.servers.fake_worker import FakeWorker

from baton.api.v1 import common_pb2, worker_pb2, worker_pb2_grpc
from baton.config import EngineConfig
from baton.config.worker import WorkerConfig
from baton.rpc import ticketed_calls
from baton.rpc.auth import HEADER
from baton.rpc.channel import open_channel
from baton.rpc.ticket import Bearer, sign, ticket_header
from baton.token_ids import pack_ids
from baton.types import Role

METHOD = "/baton.api.v1.WorkerService/Generate"


def ticketed(
    bearer: Bearer, name: str = "r", key: bytes = KEY, tenant: str | None = None
) -> worker_pb2.GenerateRequest:
    request = worker_pb2.GenerateRequest(
        request_id=name,
        prompt_token_ids=pack_ids(PROMPT),
        sampling=common_pb2.SamplingParams(max_tokens=4, n=1, temperature=0, ignore_eos=True),
    )
    sign(key, request, bearer, life_s=30, tenant=tenant)
    return request


def head(request: worker_pb2.GenerateRequest) -> tuple[tuple[str, str], ...]:
    return ((HEADER, ticket_header(request.ticket)),)


async def code_of(call: Any) -> Any:
    """Read all responses of a call and return its status."""
    with contextlib.suppress(grpc.aio.AioRpcError):
        async for _ in call:
            pass
    return await call.code()


async def test_a_forged_ticket_is_refused_and_the_message_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    handler = grpc.unary_stream_rpc_method_handler

    def counting(behavior: Any, request_deserializer: Any = None, response_serializer: Any = None) -> Any:
        def read(data: bytes) -> Any:
            if request_deserializer == worker_pb2.GenerateRequest.FromString:
                sizes.append(len(data))
            return request_deserializer(data)

        return handler(behavior, read, response_serializer)

    monkeypatch.setattr(grpc, "unary_stream_rpc_method_handler", counting)
    (tmp_path / "key").write_bytes(KEY)
    engine = EngineConfig(model=MODEL, dtype="float32", kv_blocks=64)
    async with LocalCluster(engine, WorkerConfig(ticket_key_file=str(tmp_path / "key")), num_prefill=0) as cluster:
        (decode,) = cluster.decode
        base = decode.context.base
        bearer = Bearer(base.instance_id, base.model.arena.epoch)
        big = worker_pb2.GenerateRequest(prompt_token_ids=bytes(30_000_000))
        forged = ticketed(bearer, key=KEY[::-1])
        async with open_channel(decode.address) as channel:
            stub: Any = worker_pb2_grpc.WorkerServiceStub(channel)
            for metadata in (head(forged), ((HEADER, "Ticket x"),), ((HEADER, "Ticket " + "A" * 6000),), ()):
                refused = stub.Generate(big, timeout=60, metadata=metadata)
                assert await refused.code() is grpc.StatusCode.PERMISSION_DENIED
            silent = channel.stream_stream(METHOD)(timeout=60, metadata=head(forged))
            assert await silent.code() is grpc.StatusCode.PERMISSION_DENIED, "it sent no message"
            assert not sizes
            loads = stub.StreamLoad(worker_pb2.StreamLoadRequest(), timeout=60)
            assert not (await loads.read()).ended_tickets
            right = ticketed(bearer)
            assert len([t async for x in stub.Generate(right, timeout=60, metadata=head(right)) for t in x.deltas]) == 4
            assert sizes == [right.ByteSize()]
            begun: list[bytes] = []
            ended: list[bytes] = []
            while not ended:
                load = await loads.read()
                begun += load.begun_tickets
                ended += load.ended_tickets
            assert begun == ended == [worker_pb2.TicketBody.FromString(right.ticket.body).nonce]
            loads.cancel()
        assert (
            base.metrics.registry.get_sample_value(
                "baton_worker_requests_total", {"method": "generate", "code": "permission_denied"}
            )
            == 5
        )


@pytest.fixture
async def worker() -> Any:
    worker = FakeWorker(Role.DECODE, "d0", ticket_key=KEY)
    await worker.start()
    yield worker
    await worker.stop()


async def test_a_ticket_that_is_used_twice_at_once_is_served_once(worker: FakeWorker) -> None:
    request = ticketed(Bearer("d0", worker.epoch))
    async with open_channel(worker.address) as channel:
        stub: Any = worker_pb2_grpc.WorkerServiceStub(channel)
        calls = [stub.Generate(request, timeout=60, metadata=head(request)) for _ in range(4)]
        codes = await asyncio.gather(*map(code_of, calls))
    assert sorted(codes, key=str) == [grpc.StatusCode.OK, *[grpc.StatusCode.PERMISSION_DENIED] * 3]
    assert len(worker.state.requests) == 1


async def test_few_messages_of_an_address_are_read_at_once(worker: FakeWorker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ticketed_calls, "_WAIT_S", 0.2)
    monkeypatch.setattr(ticketed_calls, "READ_S", 2.0)
    requests = [ticketed(Bearer("d0", worker.epoch), str(number)) for number in range(4)]
    async with open_channel(worker.address) as channel:
        open_call = channel.stream_stream(METHOD)
        silent = [open_call(timeout=60, metadata=head(request)) for request in requests[:3]]
        codes = await asyncio.gather(*(call.code() for call in silent))
        assert sorted(codes, key=str) == [
            grpc.StatusCode.DEADLINE_EXCEEDED,
            grpc.StatusCode.DEADLINE_EXCEEDED,
            grpc.StatusCode.RESOURCE_EXHAUSTED,
        ]
        stub: Any = worker_pb2_grpc.WorkerServiceStub(channel)
        last = stub.Generate(requests[3], timeout=60, metadata=head(requests[3]))
        assert await code_of(last) is grpc.StatusCode.OK


async def test_one_tenants_silent_heads_keep_no_other_tenant_waiting(
    worker: FakeWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ticketed_calls, "READ_S", 200.0)
    monkeypatch.setattr(ticketed_calls, "_WAIT_S", 0.2)
    bearer = Bearer("d0", worker.epoch)
    async with open_channel(worker.address) as channel:
        open_call = channel.stream_stream(METHOD)
        requests = [ticketed(bearer, f"a{number}", tenant="a") for number in range(8)]
        silent = [open_call(timeout=240, metadata=head(request)) for request in requests]
        holding = {asyncio.create_task(call.code()) for call in silent}
        done: set[asyncio.Task[Any]] = set()
        while len(holding) > ticketed_calls.MAX_READS_PER_TENANT:
            refused, holding = await asyncio.wait(holding, timeout=240, return_when=asyncio.FIRST_COMPLETED)
            done |= refused
        assert {x.result() for x in done} == {grpc.StatusCode.RESOURCE_EXHAUSTED}
        assert len(holding) == ticketed_calls.MAX_READS_PER_TENANT
        stub: Any = worker_pb2_grpc.WorkerServiceStub(channel)
        for name in ("b", "c"):
            request = ticketed(bearer, name, tenant=name)
            assert await code_of(stub.Generate(request, timeout=60, metadata=head(request))) is grpc.StatusCode.OK
        assert not any(x.done() for x in holding), "they are still being read"
        for call in silent:
            call.cancel()
        await asyncio.wait(holding)


async def test_a_long_request_has_more_time_to_come(worker: FakeWorker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ticketed_calls, "READ_S", 0.0)
    request = ticketed(Bearer("d0", worker.epoch), tenant="a")
    body = worker_pb2.TicketBody.FromString(request.ticket.body)
    other = worker_pb2.TicketBody.FromString(ticketed(Bearer("d0", worker.epoch), tenant="b").ticket.body)
    assert len(body.tenant_tag) == 8
    assert body.tenant_tag != other.tenant_tag
    assert body.request_bytes > len(request.prompt_token_ids)
    async with open_channel(worker.address) as channel:
        silent = channel.stream_stream(METHOD)(timeout=60, metadata=head(request))
        assert await silent.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        monkeypatch.setattr(ticketed_calls, "READ_BYTES_PER_S", 1)
        request = ticketed(Bearer("d0", worker.epoch), tenant="a")
        stub: Any = worker_pb2_grpc.WorkerServiceStub(channel)
        assert await code_of(stub.Generate(request, timeout=60, metadata=head(request))) is grpc.StatusCode.OK
