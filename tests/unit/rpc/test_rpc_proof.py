"""The shared token: proved on both ends of a channel, never sent, replaced while everything runs."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.servers.certificates import Authority

from baton.api.v1 import auth_pb2, auth_pb2_grpc, router_pb2, router_pb2_grpc
from baton.errors import BatonError, ConfigError, UnauthenticatedError, UnavailableError
from baton.rpc import proof, service_token
from baton.rpc.auth import HEADER
from baton.rpc.channel import open_channel
from baton.rpc.errors import from_rpc_error
from baton.rpc.proof import REQUEST_KEY
from baton.rpc.redis import read_registration, sign_registration
from baton.rpc.server import GrpcServer, free_port
from baton.rpc.service_token import Token, read_token
from baton.rpc.tls import Tls

SERVICE = "baton.api.v1.RouterService"
OLD, NEW = "the-old-token-0123456789", "the-new-token-9876543210"


class Servicer(router_pb2_grpc.RouterServiceServicer):
    """Keeps what its calls show."""

    def __init__(self) -> None:
        self.shown: list[str] = []

    async def Route(self, request: router_pb2.RouteRequest, context: Any) -> router_pb2.RouteResponse:
        self.shown.append(dict(context.invocation_metadata())[HEADER])
        return router_pb2.RouteResponse()

    async def ListModels(self, request: router_pb2.ListModelsRequest, context: Any) -> router_pb2.ListModelsResponse:
        return router_pb2.ListModelsResponse()


@contextlib.asynccontextmanager
async def service(token: Token | None, port: int = 0, tls: Tls | None = None) -> AsyncIterator[tuple[Servicer, str]]:
    servicer = Servicer()
    server = GrpcServer(host="127.0.0.1", port=port, services=[SERVICE], token=token, tls=tls)
    router_pb2_grpc.add_RouterServiceServicer_to_server(servicer, server.server)
    try:
        yield servicer, f"127.0.0.1:{await server.start()}"
    finally:
        await server.stop(0)


async def route(channel: grpc.aio.Channel, method: str = "Route", **options: Any) -> BatonError | None:
    stub: Any = router_pb2_grpc.RouterServiceStub(channel)
    request = router_pb2.RouteRequest() if method == "Route" else router_pb2.ListModelsRequest()
    try:
        await getattr(stub, method)(request, timeout=240, **options)
    except grpc.aio.AioRpcError as error:
        return from_rpc_error(error)
    return None


async def test_neither_end_shows_the_token_and_a_channel_proves_it_once() -> None:
    async with service(Token(OLD)) as (servicer, address), open_channel(address, token=Token(OLD)) as channel:
        assert [await route(channel) for _ in range(3)] == [None, None, None]
    assert len(set(servicer.shown)) == 1
    assert OLD not in servicer.shown[0]


async def test_a_service_without_the_token_gets_no_call() -> None:
    class Liar(auth_pb2_grpc.AuthServiceServicer):
        """Answers as if it knew the token."""

        proof = b""

        async def Challenge(self, request: auth_pb2.ChallengeRequest, context: Any) -> auth_pb2.ChallengeResponse:
            return auth_pb2.ChallengeResponse(nonce=bytes(40))

        async def Prove(self, request: auth_pb2.ProveRequest, context: Any) -> auth_pb2.ProveResponse:
            return auth_pb2.ProveResponse(proof=request.proof)  # reflected

    for token in (None, Token(NEW)):
        async with service(token) as (servicer, address), open_channel(address, token=Token(OLD)) as channel:
            assert isinstance(await route(channel), UnauthenticatedError)
            assert servicer.shown == []
    servicer, server = Servicer(), grpc.aio.server()
    auth_pb2_grpc.add_AuthServiceServicer_to_server(Liar(), server)
    router_pb2_grpc.add_RouterServiceServicer_to_server(servicer, server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    async with open_channel(address, token=Token(OLD)) as channel:
        error = await route(channel)
    await server.stop(0)
    assert isinstance(error, UnauthenticatedError)
    assert error.field == "token"
    assert address in error.message
    assert servicer.shown == []


async def test_a_credential_counts_for_its_method_its_process_and_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    async with service(Token(OLD)) as (servicer, address), open_channel(address, token=Token(OLD)) as channel:
        await route(channel)
        copied = ((HEADER, servicer.shown[0]),)
        async with open_channel(address) as other:
            assert await route(other, metadata=copied) is None  # of this host, for this method: see docs/security.md
            assert isinstance(await route(other, "ListModels", metadata=copied), UnavailableError)
            for cut in (6, 30, -1):
                cut_short = ((HEADER, servicer.shown[0][:cut]),)
                assert isinstance(await route(other, metadata=cut_short), UnavailableError)
            bearer = ((HEADER, f"Bearer {OLD}"),)
            assert isinstance(await route(other, metadata=bearer), UnauthenticatedError)
            monkeypatch.setattr(proof, "_LIFE_S", 0.0)
            assert isinstance(await route(other, metadata=copied), UnavailableError)
            monkeypatch.undo()
        async with service(Token(OLD)) as (_, second), open_channel(second) as other:
            assert isinstance(await route(other, metadata=copied), UnavailableError)


async def test_a_service_that_comes_back_without_the_token_gets_no_call() -> None:
    port = free_port()  # none that a connection could take meanwhile
    async with service(Token(OLD), port) as (_, address):
        channel = open_channel(address, token=Token(OLD))
        assert await route(channel) is None
    async with asyncio.timeout(240):
        while channel.get_state() is grpc.ChannelConnectivity.READY:
            await asyncio.sleep(0.01)
    async with service(None, port) as (servicer, _):
        assert isinstance(await route(channel, wait_for_ready=True), UnauthenticatedError)
        assert servicer.shown == []
    async with service(Token(OLD), port):
        assert await route(channel, wait_for_ready=True) is None
    await channel.close()


async def test_a_service_in_the_middle_cannot_pass_a_proof_on_under_tls(tmp_path: Path) -> None:
    """It has a certificate of the authority, and so passes for any service, but it is not the caller's."""
    authority = Authority(tmp_path)
    mine, its, theirs = (authority.issue(name) for name in ("caller", "middle", "service"))

    def tls(issued: Any) -> Tls:
        return Tls(issued.cert, issued.key, issued.ca)

    async with service(Token(OLD), tls=tls(theirs)) as (_, address):
        async with open_channel(address, token=Token(OLD), tls=tls(mine)) as channel:
            assert await route(channel) is None
        onward = open_channel(address, tls=tls(its))
        auth: Any = auth_pb2_grpc.AuthServiceStub(onward)
        refused: list[grpc.StatusCode] = []

        def asked_in(context: Any) -> list[tuple[str, Any]]:
            return [each for each in context.invocation_metadata() if each[0] == REQUEST_KEY]

        class Middle(auth_pb2_grpc.AuthServiceServicer):
            async def Challenge(self, request: Any, context: Any) -> auth_pb2.ChallengeResponse:
                return await auth.Challenge(request, metadata=asked_in(context))

            async def Prove(self, request: Any, context: Any) -> auth_pb2.ProveResponse:
                try:
                    return await auth.Prove(request, metadata=asked_in(context))
                except grpc.aio.AioRpcError as error:
                    refused.append(error.code())
                    raise

        server = grpc.aio.server()
        auth_pb2_grpc.add_AuthServiceServicer_to_server(Middle(), server)
        between = f"127.0.0.1:{server.add_secure_port('127.0.0.1:0', tls(its).server_credentials())}"
        await server.start()
        async with open_channel(between, token=Token(OLD), tls=tls(mine)) as channel:
            assert await route(channel) is not None
        await server.stop(0)
        await onward.close()
        assert refused == [grpc.StatusCode.UNAUTHENTICATED]


def write(path: Path, *tokens: str) -> None:
    """Replace a token file, as a mounted secret is."""
    fresh = path.with_suffix(".new")
    fresh.write_text("\n".join(tokens) + "\n")
    fresh.chmod(0o600)
    fresh.replace(path)


async def test_a_token_is_replaced_while_calls_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service_token, "_LOOK_S", 0.0)
    here, there = tmp_path / "here", tmp_path / "there"
    write(here, OLD)
    write(there, OLD)
    async with (
        service(read_token(str(there))) as (_, address),
        open_channel(address, token=read_token(str(here))) as channel,
    ):
        assert await route(channel) is None
        for tokens in ((OLD, NEW), (NEW, OLD), (NEW,)):
            for file in (there, here) if len(tokens) == 2 else (here, there):
                write(file, *tokens)
                assert await route(channel) is None
        async with open_channel(address, token=Token(OLD)) as late:
            assert isinstance(await route(late), UnauthenticatedError)


def test_a_token_file_that_cannot_be_read_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(service_token, "_LOOK_S", 0.0)
    path = tmp_path / "token"
    write(path, OLD)
    token = read_token(str(path))
    assert token is not None
    before = token.mac(b"p", b"d")
    path.write_text("")
    assert token.mac(b"p", b"d") == before
    path.unlink()
    assert token.mac(b"p", b"d") == before
    assert "the token stays as it was" in caplog.text
    assert token.generation == 0
    write(path, NEW, OLD)
    assert token.generation == 1
    assert token.mac(b"p", b"d") == Token(NEW).mac(b"p", b"d")
    assert token.verifies(b"p", b"d", before)
    assert not token.verifies(b"another purpose", b"d", before)
    write(path, *"abcde")
    assert token.generation == 1
    assert OLD not in repr(token) + caplog.text
    with pytest.raises(ConfigError, match="more than 4"):
        read_token(str(path))


FIELDS = {"address": "10.0.0.1:9000", "role": "decode", "epoch": "00"}


def test_a_registration_counts_where_and_as_long_as_it_was_signed_for() -> None:
    token, key, now = Token(OLD), "baton:instance:d0", 1_000_000
    value = sign_registration(token, key, FIELDS, now)
    for later in (0, 5_000, 12_000):
        found, until = read_registration(token, key, value, now + later)
        assert {name: found[name] for name in FIELDS} == FIELDS
        assert until == now + 12_000
    assert read_registration(Token(NEW, OLD), key, value, now)[0]["address"] == FIELDS["address"]
    moved = json.loads(value)
    moved["body"] = moved["body"].replace("10.0.0.1", "10.6.6.6")
    rogue = json.dumps(FIELDS)
    for wrong, where, when, why in (
        (value, "baton:instance:d1", now, "signed for baton:instance:d0"),
        (value, "baton:kvstore:d0", now, "signed for"),
        (value, key, now + 12_001, "old one"),
        (value, key, now - 60_000, "old one"),
        (json.dumps(moved), key, now, "changed"),
        (sign_registration(Token(NEW), key, FIELDS, now), key, now, "another token"),
        (rogue, key, now, "not signed"),
        ('{"body": {}, "mac": 1}', key, now, "not signed"),
    ):
        with pytest.raises(UnauthenticatedError, match=why):
            read_registration(token, where, wrong, when)
    assert read_registration(None, key, rogue, 0) == (FIELDS, 0)
    with pytest.raises(UnauthenticatedError, match="none here"):
        read_registration(None, key, value, now)
    for wrong in ("[]", "x", '{"body": "{}", "mac": "zz"}'):
        with pytest.raises(ValueError, match=r".*"):
            read_registration(token, key, wrong, now)


@given(st.one_of(st.binary(max_size=200), st.text(max_size=200)))
def test_whatever_is_written_where_a_registration_should_be_is_refused(value: bytes | str) -> None:
    with pytest.raises((UnauthenticatedError, ValueError)):
        read_registration(Token(OLD), "baton:instance:d0", value, 0)


@given(st.one_of(st.text(max_size=200), st.binary(max_size=200).map(lambda x: base64.urlsafe_b64encode(x).decode())))
def test_whatever_comes_as_a_credential_is_refused(text: str) -> None:
    with pytest.raises(UnavailableError):
        proof.ProofServicer(Token(OLD)).check("/x/Y", proof.SCHEME + text)


async def test_calls_that_begin_together_are_all_proved() -> None:
    async with service(Token(OLD)) as (servicer, address), open_channel(address, token=Token(OLD)) as channel:
        assert await asyncio.gather(*(route(channel) for _ in range(32))) == [None] * 32
    assert len(servicer.shown) == 32
