"""Calls that the event loop reads itself, against gRPC's own server as every instance runs it."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from tests.support.http2_peer import Sink
from tests.support.servers.certificates import Authority, Certificate

from baton.api.v1 import auth_pb2, auth_pb2_grpc, worker_pb2, worker_pb2_grpc
from baton.errors import QueueFullError
from baton.rpc import audit as audits
from baton.rpc import proof
from baton.rpc.http2.message_stream import Dialer, StreamEnded
from baton.rpc.multiplex import CallStream
from baton.rpc.server import GrpcServer
from baton.rpc.service_token import Token
from baton.rpc.tls import Tls

SERVICE = "baton.api.v1.WorkerService"
OLD, NEW = "the-old-token-0123456789", "the-new-token-9876543210"


class Servicer(worker_pb2_grpc.WorkerServiceServicer):
    """Answers each message with one whose text is as long as the caller says."""

    def __init__(self) -> None:
        self.got: list[worker_pb2.GenerateManyRequest] = []
        self.ended = asyncio.Event()

    async def GenerateMany(
        self, requests: AsyncIterator[worker_pb2.GenerateManyRequest], context: Any
    ) -> AsyncIterator[worker_pb2.GenerateManyResponse]:
        try:
            async for request in requests:
                self.got.append(request)
                for start in request.starts:
                    if start.request.request_id == "full":
                        raise QueueFullError("no room ä", retry_after_s=3.0)
                    text = "x" * start.request.sampling.max_tokens
                    yield worker_pb2.GenerateManyResponse(ends=[worker_pb2.CallEnd(call=start.call, message=text)])
        finally:
            self.ended.set()


@contextlib.asynccontextmanager
async def service(token: Token | None = None, tls: Tls | None = None) -> AsyncIterator[tuple[Servicer, str]]:
    servicer = Servicer()
    server = GrpcServer(host="127.0.0.1", port=0, services=[SERVICE], token=token, tls=tls)
    worker_pb2_grpc.add_WorkerServiceServicer_to_server(servicer, server.server)
    try:
        yield servicer, f"127.0.0.1:{await server.start()}"
    finally:
        await server.stop(0)


def asked(call: int, size: int, *, name: str = "", prompt: int = 0) -> bytes:
    """Return a message that is answered with so many characters."""
    message = worker_pb2.GenerateManyRequest()
    request = message.starts.add(call=call).request
    request.request_id, request.prompt_token_ids, request.sampling.max_tokens = name, bytes(prompt), size
    return message.SerializeToString()


async def converse(dialer: Dialer, sizes: list[int], prompt: int = 0) -> list[int]:
    """Send messages and return the lengths of what they are answered with."""
    sink = Sink()
    call = await dialer.open(CallStream.METHOD, sink)
    for at, size in enumerate(sizes):
        call.send(asked(at, size, prompt=prompt))
    await sink.until(lambda: len(sink.messages) == len(sizes))
    call.close()
    answers = [worker_pb2.GenerateManyResponse.FromString(message) for message in sink.messages]
    assert [answer.ends[0].call for answer in answers] == [*range(len(sizes))]
    return [len(answer.ends[0].message) for answer in answers]


async def refused(dialer: Dialer) -> StreamEnded:
    """Return why nothing could be asked."""
    sink = Sink()
    try:
        call = await dialer.open(CallStream.METHOD, sink)
    except StreamEnded as end:
        return end
    call.send(asked(1, 1))
    return await sink.end()


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("ours"))


@pytest.fixture(scope="module")
def ours(authority: Authority) -> Certificate:
    return authority.issue("ours")


def tls(certificate: Certificate, **more: Any) -> Tls:
    return Tls(certificate.cert, certificate.key, certificate.ca, **more)


SIZES = [0, 1, 16_000, 16_384, 70_000, 3_000_000, 5]


@pytest.mark.parametrize("secured", ["clear", "token", "tls", "tls and token"])
async def test_messages_go_both_ways_whatever_their_size(secured: str, ours: Certificate) -> None:
    token = Token(OLD) if "token" in secured else None
    shown = tls(ours) if "tls" in secured else None
    async with service(token, shown) as (servicer, address):
        dialer = Dialer(address, token=token, tls=shown)
        assert await converse(dialer, SIZES, prompt=300_000) == SIZES
        await servicer.ended.wait()  # closed by the caller
        assert await converse(dialer, [3]) == [3]
        dialer.close()


async def test_an_error_of_the_server_comes_with_its_details() -> None:
    async with service() as (_, address):
        sink = Sink()
        call = await Dialer(address).open(CallStream.METHOD, sink)
        call.send(asked(1, 1, name="full"))
        end = await sink.end()
    assert end.code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert isinstance(end.error, QueueFullError)
    assert (end.error.message, end.error.retry_after_s) == ("no room ä", 3.0)


async def test_a_method_that_is_not_there_and_a_server_that_stops() -> None:
    async with service() as (_, address):
        sink = Sink()
        await Dialer(address).open(f"/{SERVICE}/Nothing", sink)
        assert (await sink.end()).code is grpc.StatusCode.UNIMPLEMENTED
        running = Sink()
        call = await Dialer(address).open(CallStream.METHOD, running)
        call.send(asked(1, 1))
        await running.until(lambda: bool(running.messages))
    assert (await running.end()).code in {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED}


# --- who is believed ---


class Liar(auth_pb2_grpc.AuthServiceServicer):
    """Answers as if it knew the token."""

    async def Challenge(self, request: auth_pb2.ChallengeRequest, context: Any) -> auth_pb2.ChallengeResponse:
        return auth_pb2.ChallengeResponse(nonce=bytes(40))

    async def Prove(self, request: auth_pb2.ProveRequest, context: Any) -> auth_pb2.ProveResponse:
        return auth_pb2.ProveResponse(proof=request.proof)  # reflected


async def test_a_server_that_does_not_know_the_token_gets_no_call() -> None:
    for token in (None, Token(NEW)):
        async with service(token) as (servicer, address):
            end = await refused(Dialer(address, token=Token(OLD)))
            assert end.code is grpc.StatusCode.UNAUTHENTICATED
            assert servicer.got == []
    servicer, server = Servicer(), grpc.aio.server()
    auth_pb2_grpc.add_AuthServiceServicer_to_server(Liar(), server)
    worker_pb2_grpc.add_WorkerServiceServicer_to_server(servicer, server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    end = await refused(Dialer(address, token=Token(OLD)))
    await server.stop(0)
    assert end.code is grpc.StatusCode.UNAUTHENTICATED
    assert "does not know the shared token" in end.message
    assert servicer.got == []


async def test_a_caller_that_proves_nothing_or_another_token_gets_no_call_and_is_noted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lines: list[dict[str, Any]] = []
    monkeypatch.setattr(audits, "_log", audits.AuditLog(lambda line: lines.append(json.loads(line))))
    async with service(Token(OLD)) as (servicer, address):
        assert (await refused(Dialer(address))).code is grpc.StatusCode.UNAUTHENTICATED
        assert (await refused(Dialer(address, token=Token(NEW)))).code is grpc.StatusCode.UNAUTHENTICATED
        assert servicer.got == []
    assert [(line["event"], line["method"]) for line in lines] == [
        ("authentication_failed", CallStream.METHOD),
        ("authentication_failed", "/baton.api.v1.AuthService/Prove"),
    ]


async def test_a_token_is_replaced_while_calls_run() -> None:
    async with service(Token(NEW, OLD)) as (_, address):
        assert await converse(Dialer(address, token=Token(OLD)), [3]) == [3]
        assert await converse(Dialer(address, token=Token(NEW, OLD)), [3]) == [3]


async def test_a_call_goes_on_when_its_credential_counts_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    async with service(Token(OLD)) as (_, address):
        sink = Sink()
        call = await Dialer(address, token=Token(OLD)).open(CallStream.METHOD, sink)
        call.send(asked(1, 1))
        await sink.until(lambda: len(sink.messages) == 1)
        monkeypatch.setattr(proof, "_LIFE_S", 0.0)
        call.send(asked(2, 1))
        await sink.until(lambda: len(sink.messages) == 2)
        assert (await refused(Dialer(address, token=Token(OLD)))).code is grpc.StatusCode.UNAVAILABLE
        call.close()


async def test_certificates_of_another_authority_and_another_name_are_refused_on_either_side(
    authority: Authority, ours: Certificate, tmp_path: Path
) -> None:
    theirs = Authority(tmp_path / "theirs").issue("theirs")
    elsewhere = authority.issue("elsewhere", names="DNS:other.example")
    async with service(tls=tls(ours)) as (servicer, address):
        for shown in (None, tls(theirs)):
            assert (await refused(Dialer(address, tls=shown))).code is grpc.StatusCode.UNAVAILABLE
        rogue = tls(ours)
        own = tls(theirs)._material
        rogue._material = dataclasses.replace(rogue._material, cert=own.cert, key=own.key)  # believes the server
        end = await refused(Dialer(address, tls=rogue))
        assert end.code is grpc.StatusCode.UNAVAILABLE
        assert servicer.got == []
    async with service(tls=tls(elsewhere)) as (servicer, address):
        end = await refused(Dialer(address, tls=tls(ours)))
        assert "certificate" in end.message.lower()
        assert servicer.got == []
        assert await converse(Dialer(address, tls=tls(ours, name="other.example")), [3]) == [3]


async def test_a_certificate_of_another_role_may_not_generate(authority: Authority) -> None:
    pattern = "spiffe://example.org/baton/{role}"
    names = "IP:127.0.0.1,URI:spiffe://example.org/baton/"
    store, router = authority.issue("store", names=names + "kvstore"), authority.issue("router", names=names + "router")
    async with service(tls=tls(router, roles=pattern)) as (servicer, address):
        end = await refused(Dialer(address, tls=tls(store, roles=pattern)))
        assert end.code is grpc.StatusCode.PERMISSION_DENIED
        assert "may not call GenerateMany" in end.message
        assert servicer.got == []
        assert await converse(Dialer(address, tls=tls(router, roles=pattern)), [3]) == [3]


async def test_renewed_certificates_are_shown_by_new_calls(authority: Authority, tmp_path: Path) -> None:
    first, second = authority.issue("first"), authority.issue("second")
    files = Certificate(*(str(tmp_path / name) for name in ("cert", "key", "ca")))

    def show(certificate: Certificate) -> None:
        for source, target in zip(
            (certificate.cert, certificate.key, certificate.ca), (files.cert, files.key, files.ca), strict=True
        ):
            fresh = Path(target + ".new")
            fresh.write_bytes(Path(source).read_bytes())
            fresh.chmod(0o600)
            fresh.replace(target)

    show(first)
    shown = tls(files)
    async with service(Token(OLD), tls=tls(first)) as (_, address):
        dialer = Dialer(address, token=Token(OLD), tls=shown)
        assert await converse(dialer, [3]) == [3]
        show(second)
        assert await converse(dialer, [3]) == [3]  # whose proof is bound to the second
        assert shown.generation == 1
