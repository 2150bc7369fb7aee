"""Certificates between services: who is let in, who is told what is wrong, and what happens when they are renewed."""

from __future__ import annotations

import os
import shutil
import socket
import ssl
import subprocess
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from tests.support.servers.certificates import Authority, Certificate

from baton.api.v1 import kvstore_pb2, kvstore_pb2_grpc
from baton.cli.main import main
from baton.config.kvstore import KVStoreConfig
from baton.config.router import RouterConfig
from baton.config.worker import WorkerConfig
from baton.errors import BatonError, ConfigError, UnauthenticatedError, UnavailableError
from baton.rpc.auth import require_clear_pipes, require_safe_bind
from baton.rpc.channel import check_health, open_channel
from baton.rpc.errors import from_rpc_error
from baton.rpc.server import GrpcServer
from baton.rpc.service_token import Token
from baton.rpc.tls import Tls, read_tls
from baton_kvstore.server import KVStoreServer
from baton_router.app import RouterApp

LONG_AGO, LATER = "20200101000000Z", "20210101000000Z"


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("ours"))


@pytest.fixture(scope="module")
def ours(authority: Authority) -> Certificate:
    return authority.issue("ours")


@pytest.fixture(scope="module")
def expired(authority: Authority) -> Certificate:
    return authority.issue("expired", begins=LONG_AGO, ends=LATER)


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Certificate:
    return Authority(tmp_path_factory.mktemp("theirs")).issue("theirs")


def tls(certificate: Certificate, **more: Any) -> Tls:
    return Tls(certificate.cert, certificate.key, certificate.ca, **more)


def content(path: str) -> bytes:
    return Path(path).read_bytes()


def spoil(path: str) -> None:
    Path(path).write_text("broken")


async def ask(port: int, credentials: grpc.ChannelCredentials | None) -> None:
    """Call a server; raises what Baton makes of a failure."""
    address = f"127.0.0.1:{port}"
    insecure = credentials is None
    channel = grpc.aio.insecure_channel(address) if insecure else grpc.aio.secure_channel(address, credentials)
    async with channel:
        try:
            await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=240)
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from error


def show(certificate: Certificate, ca: str) -> grpc.ChannelCredentials:
    """What a client shows that never looked at its own certificate."""
    files = [content(path) for path in (ca, certificate.key, certificate.cert)]
    return grpc.ssl_channel_credentials(*files)


async def test_only_those_with_a_certificate_of_the_authority_get_through(
    ours: Certificate, theirs: Certificate, expired: Certificate
) -> None:
    server = GrpcServer(host="127.0.0.1", port=0, services=["x"], tls=tls(ours))
    port = await server.start()
    await server.set_serving(True)
    try:
        assert await check_health(f"127.0.0.1:{port}", tls=tls(ours), timeout_s=240)
        assert not await check_health(f"127.0.0.1:{port}", timeout_s=10)
        for credentials, reason in (
            (None, "does it want a certificate"),
            (grpc.ssl_channel_credentials(content(ours.ca)), "certificate"),
            (show(theirs, ours.ca), "certificate"),
            (show(expired, ours.ca), "certificate"),
            (show(theirs, theirs.ca), "CERTIFICATE_VERIFY_FAILED"),
        ):
            with pytest.raises(UnavailableError, match=reason):
                await ask(port, credentials)
    finally:
        await server.stop(0)


async def test_a_server_whose_certificate_ran_out_is_not_believed(ours: Certificate, expired: Certificate) -> None:
    pair = [(content(expired.key), content(expired.cert))]
    server = grpc.aio.server()
    port = server.add_secure_port("127.0.0.1:0", grpc.ssl_server_credentials(pair))
    await server.start()
    try:
        with pytest.raises(UnavailableError, match="expired"):
            await ask(port, tls(ours).channel_credentials()[1])
    finally:
        await server.stop(0)


async def test_one_name_for_all_hosts(authority: Authority, ours: Certificate) -> None:
    named = authority.issue("named", names="DNS:baton")
    server = GrpcServer(host="127.0.0.1", port=0, services=["x"], tls=tls(named))
    port = await server.start()
    await server.set_serving(True)
    try:
        assert await check_health(f"127.0.0.1:{port}", tls=tls(ours, name="baton"), timeout_s=240)
        with pytest.raises(UnavailableError, match=r"[Hh]ostname|127\.0\.0\.1|verif"):
            await ask(port, tls(ours).channel_credentials()[1])
    finally:
        await server.stop(0)


def test_what_others_would_refuse_ends_the_start(
    ours: Certificate, theirs: Certificate, expired: Certificate, tmp_path: Path
) -> None:
    empty = tmp_path / "empty"
    empty.write_text("")
    for files, reason, field in (
        ((expired.cert, expired.key, expired.ca), "expired", "tls_cert"),
        ((theirs.cert, theirs.key, ours.ca), "issuer", "tls_cert"),
        ((ours.cert, theirs.key, ours.ca), "MISMATCH", "tls_cert"),
        ((str(empty), ours.key, ours.ca), "certificate", "tls_cert"),
        ((ours.cert, str(tmp_path / "absent"), ours.ca), "cannot read", "tls_key"),
        ((ours.cert, ours.key, str(tmp_path / "absent")), "cannot read", "tls_ca"),
    ):
        with pytest.raises(ConfigError, match=reason) as caught:
            Tls(*files)
        assert caught.value.field == field
    for name in ("tls_cert", "tls_key", "tls_ca", "tls_name"):
        with pytest.raises(ConfigError, match=r"TLS needs|needs --tls-cert"):
            read_tls(WorkerConfig(**{name: "file"}))
    assert read_tls(WorkerConfig()) is None


def test_a_pipe_in_the_place_of_a_file_is_not_waited_for(ours: Certificate, tmp_path: Path) -> None:
    files = [str(tmp_path / name) for name in ("cert", "key", "ca")]
    for source, target in zip((ours.cert, ours.key, ours.ca), files, strict=True):
        shutil.copy(source, target)
    shown = Tls(*files)
    context = shown.http_context()
    for path, field in zip(files, ("tls_cert", "tls_key", "tls_ca"), strict=True):
        kept = Path(path).rename(f"{path}.kept")
        os.mkfifo(path, 0o600)
        silent = os.open(path, os.O_RDWR)
        try:
            assert not shown.refresh()
            shown.renew(context)
            shown.pipe_context(server_side=True)
            with pytest.raises(ConfigError, match="no regular file") as caught:
                Tls(*files)
            assert caught.value.field == field
        finally:
            os.close(silent)
            kept.replace(path)
    assert shown.refresh(), "it is taken over again"


def test_a_key_with_a_password_is_refused_and_nobody_is_asked_for_it(ours: Certificate, tmp_path: Path) -> None:
    key = tmp_path / "key"
    command = ("openssl", "pkey", "-in", ours.key, "-aes256", "-passout", "pass:secret", "-out", str(key))
    subprocess.run(command, check=True, timeout=240)
    with pytest.raises(ConfigError, match="key"):
        Tls(ours.cert, str(key), ours.ca)


def test_nobody_listens_off_loopback_where_anybody_could_call(ours: Certificate) -> None:
    require_safe_bind("0.0.0.0", None, tls(ours))
    with pytest.raises(ConfigError, match="--tls-cert"):
        require_safe_bind("0.0.0.0", None)
    flags = {"tls_cert": ours.cert, "tls_key": ours.key, "tls_ca": ours.ca}
    for config in (
        WorkerConfig(host="10.0.0.1", pipes=("nixl",), **flags),
        WorkerConfig(host="10.0.0.1", pipes=("shm", "tcp"), **flags),
        KVStoreConfig(host="10.0.0.1", pipes=("tls", "gloo"), **flags),
    ):
        with pytest.raises(ConfigError) as caught:
            require_clear_pipes(config, read_tls(config))
        assert caught.value.field == "clear_kv"
    for config in (
        WorkerConfig(host="10.0.0.1", **flags),
        WorkerConfig(host="10.0.0.1", clear_kv=True, pipes=("tcp",), **flags),
        WorkerConfig(host="10.0.0.1", pipes=("shm", "tls"), **flags),
        WorkerConfig(**flags),
    ):
        require_clear_pipes(config, read_tls(config))


async def test_a_renewed_certificate_is_shown_to_new_connections(authority: Authority, tmp_path: Path) -> None:
    first, second = authority.issue("first"), authority.issue("second")
    files = Certificate(str(tmp_path / "cert"), str(tmp_path / "key"), first.ca)

    def put(certificate: Certificate) -> None:
        for source, target in ((certificate.cert, files.cert), (certificate.key, files.key)):
            shutil.copy(source, f"{target}.new")
            Path(f"{target}.new").replace(target)

    put(first)
    shown = tls(files)
    context = shown.http_context()
    server = GrpcServer(host="127.0.0.1", port=0, services=["x"], tls=shown)
    port = await server.start()
    await server.set_serving(True)

    def subject() -> bytes:
        return ssl.DER_cert_to_PEM_cert(peer_certificate(port, first)).encode()

    try:
        assert subject() == content(first.cert)
        put(second)
        assert await check_health(f"127.0.0.1:{port}", tls=tls(first), timeout_s=240)
        assert subject() == content(second.cert)
        assert shown.generation == 1
        shown.renew(context)
        spoil(files.cert)
        assert not shown.refresh()
        assert await check_health(f"127.0.0.1:{port}", tls=tls(first), timeout_s=240)
    finally:
        await server.stop(0)


def peer_certificate(port: int, certificate: Certificate) -> bytes:
    """Return what a server shows to a new connection."""
    context = ssl.create_default_context(cafile=certificate.ca)
    context.load_cert_chain(certificate.cert, certificate.key)
    with (
        socket.create_connection(("127.0.0.1", port), timeout=240) as plain,
        context.wrap_socket(plain, server_hostname="localhost") as secure,
    ):
        shown = secure.getpeercert(binary_form=True)
    assert shown is not None
    return shown


async def test_token_and_certificate_go_together(ours: Certificate, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("secret, of the services")
    flags = {"tls_cert": ours.cert, "tls_key": ours.key, "tls_ca": ours.ca}
    server = KVStoreServer(KVStoreConfig(capacity_bytes=1 << 20, token_file=str(token), **flags))
    await server.start()

    async def info(**access: Any) -> None:
        async with open_channel(server.address, **access) as channel:
            stub: Any = kvstore_pb2_grpc.KvStoreServiceStub(channel)
            try:
                await stub.GetStoreInfo(kvstore_pb2.GetStoreInfoRequest(), timeout=240)
            except grpc.RpcError as error:
                raise from_rpc_error(error) from error

    try:
        await info(token=Token("secret, of the services"), tls=tls(ours))
        with pytest.raises(UnauthenticatedError):
            await info(tls=tls(ours))
        with pytest.raises(UnauthenticatedError):
            await info(token=Token("wrong"), tls=tls(ours))
        with pytest.raises(BatonError, match="certificate"):
            await info(token=Token("secret, of the services"))
    finally:
        await server.stop(0)


async def test_http_over_tls_wants_no_certificate_of_clients(ours: Certificate, theirs: Certificate) -> None:
    flags = {"tls_cert": ours.cert, "tls_key": ours.key, "tls_ca": ours.ca}
    app = RouterApp(RouterConfig(port=0, grpc_port=0, **flags))
    await app.start()
    try:
        url = f"https://127.0.0.1:{app.http_port}/health"
        async with httpx.AsyncClient(verify=ssl.create_default_context(cafile=ours.ca), timeout=240) as client:
            assert (await client.get(url)).status_code == 200
            with pytest.raises(httpx.RemoteProtocolError):
                await client.get(url.replace("https:", "http:"))
        async with httpx.AsyncClient(verify=ssl.create_default_context(cafile=theirs.ca), timeout=240) as client:
            with pytest.raises(httpx.ConnectError):
                await client.get(url)
    finally:
        await app.stop()
    plain = RouterApp(RouterConfig(port=0, grpc_port=0, http_tls=False, **flags))
    await plain.start()
    try:
        async with httpx.AsyncClient(timeout=240) as client:
            assert (await client.get(f"http://127.0.0.1:{plain.http_port}/health")).status_code == 200
    finally:
        await plain.stop()


def test_the_command_line_says_what_is_wrong(ours: Certificate, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["health", "127.0.0.1:1", "--tls-cert", ours.cert]) == 2
    assert "--tls-key" in capsys.readouterr().err
    assert main(["kvstore", "clear", "--tenant", "a", "127.0.0.1:1", *ours.flags]) == 1
    assert "127.0.0.1:1" in capsys.readouterr().err
    assert main(["kvstore", "tenants", "nowhere"]) == 2
