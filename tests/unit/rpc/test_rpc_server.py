from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace

import grpc
import grpc.aio
import pytest
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2
from tests.support.servers.certificates import Authority
from tests.support.servers.tcp_proxy import TcpProxy

from baton.api.v1 import router_pb2, router_pb2_grpc
from baton.errors import (
    BatonError,
    ConfigError,
    FingerprintMismatchError,
    InternalError,
    InvalidRequestError,
    QueueFullError,
    UnauthenticatedError,
    UnavailableError,
    all_errors,
)
from baton.kv_transfer.streams import bind_tcp
from baton.rpc import server as rpc_server
from baton.rpc.addresses import is_loopback
from baton.rpc.channel import check_health, open_channel
from baton.rpc.errors import DETAILS_KEY, from_rpc_error
from baton.rpc.http2.connection import FRAME, PREFACE, SETTINGS
from baton.rpc.server import GrpcServer, _Interceptor, free_port, free_ports
from baton.rpc.service_token import Token, read_token
from baton.rpc.ticket import read_ticket_key
from baton.rpc.tls import Tls
from baton_router.accounts import read_entries, read_secret

SERVICE = "baton.api.v1.RouterService"
TOKEN = Token("secret")
LONG = "3b1f8a64c0de99a75b1f8a64c0de99a7"


class Servicer(router_pb2_grpc.RouterServiceServicer):
    """Raises what it is told to, and counts the clean-ups of its streams."""

    def __init__(self):
        self.error: Exception | None = None
        self.closed = 0

    async def Route(self, request, context):
        if self.error is not None:
            raise self.error
        return router_pb2.RouteResponse()

    async def Generate(self, request, context):
        try:
            yield router_pb2.RouterGenerateResponse(request_id="1")
            if self.error is not None:
                raise self.error
        finally:
            self.closed += 1


@pytest.fixture
async def server():
    servicer = Servicer()
    made = GrpcServer(host="127.0.0.1", port=0, services=[SERVICE], token=TOKEN)
    router_pb2_grpc.add_RouterServiceServicer_to_server(servicer, made.server)
    port = await made.start()
    await made.set_serving(True)
    yield servicer, f"127.0.0.1:{port}", made
    await made.stop(0)


async def call(address: str, token: Token | None = TOKEN) -> BatonError | None:
    async with open_channel(address, token=token) as channel:
        try:
            await router_pb2_grpc.RouterServiceStub(channel).Route(router_pb2.RouteRequest(), timeout=240)
        except grpc.aio.AioRpcError as error:
            return from_rpc_error(error)
    return None


@pytest.mark.parametrize("cls", list(all_errors().values()), ids=lambda c: c.code)
async def test_every_error_comes_through_whole(server, cls):
    servicer, address, _ = server
    servicer.error = cls("what was wrong", field="some.field", retry_after_s=1.5)
    got = await call(address)
    assert type(got) is cls
    assert (got.message, got.field, got.retry_after_s) == ("what was wrong", "some.field", 1.5)


async def test_generic_clients_find_the_field_in_bad_request(server):
    servicer, address, _ = server
    servicer.error = InvalidRequestError("no", field="top_p")
    async with open_channel(address, token=TOKEN) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await router_pb2_grpc.RouterServiceStub(channel).Route(router_pb2.RouteRequest())
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    raw = next(value for key, value in caught.value.trailing_metadata() if key == DETAILS_KEY)
    bad = error_details_pb2.BadRequest()
    found = [detail.Unpack(bad) for detail in status_pb2.Status.FromString(raw).details]
    assert any(found)
    assert bad.field_violations[0].field == "top_p"


async def test_an_error_in_mid_stream_ends_the_stream_and_cleans_up(server):
    servicer, address, _ = server
    servicer.error = QueueFullError("full", retry_after_s=2.0)
    async with open_channel(address, token=TOKEN) as channel:
        stream = router_pb2_grpc.RouterServiceStub(channel).Generate(router_pb2.RouterGenerateRequest())
        assert (await stream.read()).request_id == "1"
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stream.read()
    error = from_rpc_error(caught.value)
    assert isinstance(error, QueueFullError)
    assert error.retry_after_s == 2.0
    assert servicer.closed == 1


async def test_a_bug_in_a_handler_is_internal(server, caplog):
    servicer, address, _ = server
    servicer.error = ZeroDivisionError("oops")
    got = await call(address)
    assert isinstance(got, InternalError)
    assert "oops" not in got.message
    assert "ZeroDivisionError: oops" in caplog.text


@pytest.mark.parametrize("token", [None, Token("wrong")])
async def test_without_the_token_nothing_is_answered_but_health(server, token):
    _, address, _ = server
    assert isinstance(await call(address, token), UnauthenticatedError)
    assert await check_health(address, timeout_s=240)


def frame_types(stream: bytes) -> list[int]:
    """Return the types of the HTTP/2 frames that one end sent (RFC 9113, section 4.1)."""
    at, found = len(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n") if stream.startswith(b"PRI") else 0, []
    while at < len(stream):
        found.append(stream[at + 3])
        at += 9 + int.from_bytes(stream[at : at + 3], "big")
    return found


async def test_messages_are_answered_with_no_pings(server):
    """gRPC measures the link by them, and each message of a quiet stream cost both ends two more to read."""
    data, ping = 0, 6
    proxy = TcpProxy(int(server[1].rpartition(":")[2]))
    sent = {True: b"", False: b""}

    async def record(piece: bytes, to_target: bool) -> bytes:
        sent[to_target] += piece
        return piece

    proxy.disturb = record
    port = await proxy.start()
    began = time.monotonic()
    try:
        async with open_channel(f"127.0.0.1:{port}", token=TOKEN) as channel:
            stub = router_pb2_grpc.RouterServiceStub(channel)
            for _ in range(20):
                await stub.Route(router_pb2.RouteRequest(), timeout=240)
    finally:
        await proxy.stop()
    for end in sent.values():
        types = frame_types(end)
        assert types.count(data) >= 20
        assert ping not in types or time.monotonic() - began > 10  # seconds between two that look for life


async def test_who_does_not_acknowledge_the_settings_is_closed(monkeypatch):
    assert dict(rpc_server._OPTIONS)[rpc_server.SETTINGS_TIMEOUT] <= 5000
    monkeypatch.setattr(rpc_server, "_OPTIONS", [*rpc_server._OPTIONS, (rpc_server.SETTINGS_TIMEOUT, 300)])
    server = rpc_server.GrpcServer(host="127.0.0.1", port=0, services=[])
    reader, writer = await asyncio.open_connection("127.0.0.1", await server.start())
    try:
        writer.write(PREFACE + FRAME.pack(0, 0, SETTINGS, 0, 0))
        async with asyncio.timeout(240):
            while await reader.read(4096):
                pass
    finally:
        writer.close()
        await server.stop(0)


async def test_health_follows_set_serving(server):
    _, address, made = server
    assert await check_health(address, timeout_s=240)
    await made.set_serving(False)
    assert not await check_health(address, timeout_s=240)
    assert await check_health(address, service="liveness", timeout_s=240)


async def test_who_watches_health_is_bounded(server):
    _, address, _ = server
    request = health_pb2.HealthCheckRequest()
    async with open_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        calls = [stub.Watch(request) for _ in range(32)]
        for call in calls:
            assert (await call.read()).status == health_pb2.HealthCheckResponse.SERVING
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await asyncio.wait_for(stub.Watch(request).read(), 240)
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert (await stub.Check(request)).status == health_pb2.HealthCheckResponse.SERVING
        calls.pop().cancel()
        async with asyncio.timeout(240):
            while True:  # room again, as soon as the server has heard of it
                calls.append(stub.Watch(request))
                try:
                    assert (await calls[-1].read()).status == health_pb2.HealthCheckResponse.SERVING
                    break
                except grpc.aio.AioRpcError:
                    await asyncio.sleep(0.01)
        for call in calls:
            call.cancel()


@pytest.mark.parametrize("version", ["v1", "v1alpha"])
async def test_reflection_lists_and_describes_the_service(server, version):
    _, address, _ = server
    kind = reflection_pb2.ServerReflectionRequest
    path = f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo"
    requests = [kind(list_services=""), kind(file_containing_symbol=SERVICE)]
    async with open_channel(address, token=TOKEN) as channel:
        ask = channel.stream_stream(path, kind.SerializeToString, reflection_pb2.ServerReflectionResponse.FromString)
        answers = [x async for x in ask(iter(requests))]
        assert SERVICE in [item.name for item in answers[0].list_services_response.service]
        assert answers[1].file_descriptor_response.file_descriptor_proto
    async with open_channel(address) as channel:
        ask = channel.stream_stream(path, kind.SerializeToString, reflection_pb2.ServerReflectionResponse.FromString)
        with pytest.raises(grpc.aio.AioRpcError, match="UNAUTHENTICATED"):
            await ask().read()  # a request could fail to be sent, before the refusal is read


async def test_nobody_there_is_unavailable():
    port = free_port()
    assert isinstance(await call(f"127.0.0.1:{port}"), UnavailableError)
    assert not await check_health(f"127.0.0.1:{port}")


def test_free_ports_are_none_that_a_connection_could_take():
    ports = free_ports(50)
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    assert len(set(ports)) == 50
    assert max(ports) < first
    for port in ports:
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", port))


async def test_a_port_in_use_is_one_clear_error():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        second = GrpcServer(host="127.0.0.1", port=taken.getsockname()[1], services=[SERVICE])
        with pytest.raises(ConfigError, match="in use"):
            await second.start()


@pytest.mark.parametrize(
    ("host", "loopback"),
    [("127.0.0.1", True), ("::1", True), ("[::1]", True), ("localhost", True), ("0.0.0.0", False), ("::", False)],
)
def test_off_loopback_needs_a_token(host, loopback):
    assert is_loopback(host) is loopback
    try:
        bind_tcp(host, 0, None).close()
        refused = False
    except ConfigError as error:  # of the host: this machine has no IPv6
        refused = error.field == "token"
    assert refused is not loopback
    if not loopback:
        with pytest.raises(ConfigError) as caught:
            GrpcServer(host=host, port=0, services=[SERVICE])
        assert caught.value.field == "host"


def known_as(token: Token | None, text: str) -> bool:
    """Whether a service with a token takes it for the same as one that was given as text."""
    return token is not None and token.verifies(b"test", b"data", Token(text).mac(b"test", b"data"))


def test_token_files(tmp_path):
    assert read_token("") is None
    (tmp_path / "t").write_text(f" {LONG}\n")
    assert known_as(read_token(str(tmp_path / "t")), LONG)
    (tmp_path / "e").write_text("\n")
    for bad in ("e", "missing"):
        with pytest.raises(ConfigError) as caught:
            read_token(str(tmp_path / bad))
        assert caught.value.field == "token_file"


def _read_accounts(path):
    return read_entries(Path(path))


READERS = [read_token, read_ticket_key, read_secret, _read_accounts]


@pytest.mark.parametrize("read", READERS)
@pytest.mark.parametrize("mode", [0o640, 0o604, 0o644, 0o620, 0o666])
def test_files_with_secrets_are_their_owners_alone(tmp_path, read, mode):
    path = tmp_path / "secret"
    path.write_text("a-long-secret-that-nobody-knows")
    assert read(str(path))
    path.chmod(mode)
    with pytest.raises(ConfigError, match=f"mode {mode:04o}.*chmod 600 {path}"):
        read(str(path))


def test_keys_of_certificates_are_their_owners_alone(tmp_path):
    made = Authority(tmp_path / "authority").issue("service")
    Tls(made.cert, made.key, made.ca)
    Path(made.cert).chmod(0o644)
    Path(made.key).chmod(0o644)
    with pytest.raises(ConfigError, match="chmod 600") as caught:
        Tls(made.cert, made.key, made.ca)
    assert caught.value.field == "tls_key"


def test_secrets_that_a_container_mounts_are_taken_as_they_are(tmp_path, monkeypatch, caplog):
    path = tmp_path / "token"
    path.write_text("a-long-secret-that-nobody-knows")
    path.chmod(0o444)
    with pytest.raises(ConfigError, match="mode 0444"):
        read_token(str(path))
    monkeypatch.setattr(os, "fstatvfs", lambda fd: SimpleNamespace(f_flag=os.ST_RDONLY))
    assert read_token(str(path))
    assert not caplog.records


@pytest.mark.skipif(os.geteuid() != 0, reason="gives files away")
def test_secrets_of_another_user_may_be_read_by_its_group(tmp_path, caplog):
    path = tmp_path / "token"
    path.write_text("a-long-secret-that-nobody-knows")
    os.chown(path, 12345, 12345)
    path.chmod(0o640)
    assert read_token(str(path))
    assert not caplog.records
    path.chmod(0o644)
    assert read_token(str(path))
    assert f"all users of this host can read the token file {path}" in caplog.text
    path.chmod(0o660)
    with pytest.raises(ConfigError, match="can write"):
        read_token(str(path))


@pytest.mark.parametrize("token", ["short", "3b1f8a64c0de99a", "aaaaaaaaaaaaaaaaaaaaaaaa", f"{LONG}\n{LONG[:8]}"])
def test_a_token_that_can_be_guessed_is_refused(tmp_path, token):
    path = tmp_path / "token"
    path.write_text(token)
    with pytest.raises(ConfigError, match="can be guessed") as caught:
        read_token(str(path))
    assert caught.value.field == "token_file"
    assert token.splitlines()[-1] not in str(caught.value).replace(str(path), "")
    path.write_text(LONG)
    assert read_token(str(path))


def test_half_a_token_changes_nothing(tmp_path, monkeypatch):
    path = tmp_path / "token"
    path.write_text(f"{LONG}\n")
    token = read_token(str(path))
    for there, expected in ((LONG[::-1][:12], LONG), (f"{LONG[::-1]}\n{LONG}\n", LONG[::-1])):
        path.write_text(there)
        monkeypatch.setattr(token, "_looked", -1e9)  # a second is over
        assert known_as(token, expected)
        assert known_as(token, LONG)


def test_a_fifo_does_not_stop_who_reads_secrets(tmp_path):
    path = tmp_path / "token"
    os.mkfifo(path, 0o600)
    with pytest.raises(ConfigError, match="token file"):  # nobody writes into it
        read_token(str(path))
    read_end, write_end = os.pipe()  # as a shell's <(command)
    os.write(write_end, LONG.encode())
    os.close(write_end)
    try:
        assert known_as(read_token(f"/dev/fd/{read_end}"), LONG)
    finally:
        os.close(read_end)


def test_a_mismatch_keeps_its_status():
    assert FingerprintMismatchError("x", field="kv_dtype").grpc_status == "FAILED_PRECONDITION"


@pytest.mark.parametrize("kind", ["unary_unary", "unary_stream", "stream_unary", "stream_stream"])
async def test_calls_of_every_kind_are_looked_at(kind: str) -> None:
    """One kind that passes unguarded would be neither refused nor answered with a status of ours."""

    async def whole(request: object, context: object) -> bytes:
        raise InvalidRequestError("no", field="x")

    async def stream(request: object, context: object) -> AsyncIterator[bytes]:
        raise InvalidRequestError("no", field="x")
        yield b""

    behavior = stream if kind.endswith("stream") else whole
    handler = getattr(grpc, f"{kind}_rpc_method_handler")(behavior)
    server = grpc.aio.server(interceptors=[_Interceptor(None, None, None, lambda context: None)])
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("baton.Test", {"Call": handler}),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            call = getattr(channel, kind)("/baton.Test/Call")
            # Streams stay empty: a message that is sent to a call which is refused already fails by itself.
            answer = call(iter(()) if kind.startswith("stream") else b"1")
            assert await answer.code() is grpc.StatusCode.INVALID_ARGUMENT
    finally:
        await server.stop(0)
