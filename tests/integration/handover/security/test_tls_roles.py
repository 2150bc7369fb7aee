"""Roles in certificates, over TLS: what each may call, and who may read KV."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from tests.support.servers.certificates import Authority, Certificate
from tests.support.transport.transport_rig import Rig, soon

from baton.api.v1 import kvstore_pb2, kvstore_pb2_grpc, router_pb2, router_pb2_grpc, worker_pb2
from baton.config.kvstore import KVStoreConfig
from baton.config.router import RouterConfig
from baton.errors import BatonError, ConfigError, PermissionDeniedError
from baton.kv_transfer.blocks import BlockFetcher, LinkOptions
from baton.rpc.audit import AuditLog
from baton.rpc.channel import check_health, open_channel
from baton.rpc.errors import from_rpc_error
from baton.rpc.tls import MAY_CALL, CertificateRoles, Tls, read_tls
from baton_kvstore.server import KVStoreServer
from baton_router.app import RouterApp

PATTERN = "spiffe://example.org/baton/{role}"
HOSTS = "DNS:localhost,IP:127.0.0.1"


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Certificate]:
    """Makes the certificate of a role; of ``none`` it has no URI, of others a URI that the pattern does not fit."""
    authority, made = Authority(tmp_path_factory.mktemp("roles")), dict[str, Certificate]()

    def issue(role: str) -> Certificate:
        if role not in made:
            uri = role if "://" in role else PATTERN.format(role=role)
            made[role] = authority.issue(f"c{len(made)}", names=HOSTS if role == "none" else f"{HOSTS},URI:{uri}")
        return made[role]

    return issue


def tls(certificate: Certificate, roles: str = "") -> Tls:
    return Tls(certificate.cert, certificate.key, certificate.ca, roles=roles)


def flags(certificate: Certificate) -> dict[str, str]:
    files = {"tls_cert": certificate.cert, "tls_key": certificate.key, "tls_ca": certificate.ca}
    return {**files, "tls_roles": PATTERN}


async def call(address: str, certificate: Certificate, make: Any, name: str, request: Any) -> None:
    """Call a method; returns when it was let in, whatever became of it then.

    Raises:
        PermissionDeniedError: It was not.
    """
    async with open_channel(address, tls=tls(certificate)) as channel:
        try:
            done = getattr(make(channel), name)(request, timeout=240)
            if hasattr(done, "read"):
                await done.read()
            else:
                await done
        except grpc.RpcError as error:
            mapped = from_rpc_error(error)
            if isinstance(mapped, PermissionDeniedError):
                raise mapped from error


async def test_a_store_lets_each_role_do_its_part(
    shown: Callable[[str], Certificate], monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[str] = []
    monkeypatch.setattr("baton.rpc.audit._log", AuditLog(lines.append))
    server = KVStoreServer(KVStoreConfig(capacity_bytes=1 << 20, **flags(shown("kvstore"))))  # type: ignore[arg-type]
    await server.start()
    info, delete = kvstore_pb2.GetStoreInfoRequest(), kvstore_pb2.DeleteRequest(tenant="acme")
    tenants, pin = kvstore_pb2.ListTenantsRequest(), kvstore_pb2.PinRequest()
    stub = kvstore_pb2_grpc.KvStoreServiceStub
    try:
        for role in ("decode", "prefill", "instance"):
            await call(server.address, shown(role), stub, "GetStoreInfo", info)
            await call(server.address, shown(role), stub, "Put", kvstore_pb2.PutRequest())
        for name, request in (("Delete", delete), ("ListTenants", tenants), ("Pin", pin)):
            await call(server.address, shown("admin"), stub, name, request)
            for role in ("decode", "router", "client", "kvstore", "none", "spiffe://other.org/baton/admin"):
                with pytest.raises(PermissionDeniedError, match=f"may not call {name}"):
                    await call(server.address, shown(role), stub, name, request)
        with pytest.raises(PermissionDeniedError, match="of the role router may not call Put"):
            await call(server.address, shown("router"), stub, "Put", kvstore_pb2.PutRequest())
        events = kvstore_pb2.StreamStoreEventsRequest(heartbeat_ms=10)
        await call(server.address, shown("router"), stub, "StreamStoreEvents", events)
        with pytest.raises(PermissionDeniedError):
            await call(server.address, shown("decode"), stub, "StreamStoreEvents", events)
        assert await check_health(server.address, tls=tls(shown("none")), timeout_s=240)
    finally:
        await server.stop(0)
    denied = [json.loads(line) for line in lines if '"denied"' in line]
    assert denied[0]["certificate"] == "spiffe://example.org/baton/decode"
    assert denied[0]["method"].endswith("/Delete")
    assert len([line for line in lines if '"deleted"' in line]) == 1


async def test_a_router_keeps_instances_from_its_administration(shown: Callable[[str], Certificate]) -> None:
    app = RouterApp(RouterConfig(port=0, grpc_port=0, **flags(shown("router"))))  # type: ignore[arg-type]
    await app.start()
    address = f"127.0.0.1:{app.grpc_port}"
    stub = router_pb2_grpc.RouterServiceStub
    register, instances = router_pb2.RegisterRequest(), router_pb2.ListInstancesRequest()
    generate = router_pb2.RouterGenerateRequest()
    try:
        await call(address, shown("admin"), stub, "ListInstances", instances)
        await call(address, shown("decode"), stub, "Register", register)
        await call(address, shown("client"), stub, "Generate", generate)
        for role, name, request in (
            ("decode", "ListInstances", instances),
            ("decode", "Generate", generate),
            ("client", "Register", register),
            ("client", "ListInstances", instances),
            ("kvstore", "Register", register),
        ):
            with pytest.raises(PermissionDeniedError):
                await call(address, shown(role), stub, name, request)
    finally:
        await app.stop()


async def test_without_the_option_every_certificate_may_call_everything(shown: Callable[[str], Certificate]) -> None:
    certificate = shown("kvstore")
    paths = {"tls_cert": certificate.cert, "tls_key": certificate.key, "tls_ca": certificate.ca}
    server = KVStoreServer(KVStoreConfig(capacity_bytes=1 << 20, **paths))  # type: ignore[arg-type]
    await server.start()
    try:
        request = kvstore_pb2.DeleteRequest(tenant="acme")
        await call(server.address, shown("none"), kvstore_pb2_grpc.KvStoreServiceStub, "Delete", request)
    finally:
        await server.stop(0)


@pytest.mark.parametrize(
    ("role", "may"),
    [("decode", True), ("prefill", True), ("kvstore", True), ("router", False), ("client", False), ("none", False)],
)
def test_who_may_read_blocks(shown: Callable[[str], Certificate], role: str, may: bool) -> None:
    rig = Rig("tls")
    server = rig.serve(tls=tls(shown("prefill"), PATTERN))
    fetcher = BlockFetcher(rig.target, rig.print, kinds=("tls",), links=LinkOptions(tls=tls(shown(role))))
    generations = rig.source_arena.generations[[3, 4]]
    try:
        if may:
            fetcher.fetch(server.source, [3, 4], generations, [0, 1], deadline=soon())
            assert rig.same([3, 4], [0, 1])
        else:
            before = rig.target.blocks.copy()
            with pytest.raises(BatonError, match="may not read KV blocks"):
                fetcher.fetch(server.source, [3, 4], generations, [0, 1], deadline=soon())
            assert (rig.target.blocks == before).all()
    finally:
        fetcher.close()
        server.close()
        rig.close()


def test_the_table_has_methods_that_there_are() -> None:
    files = (kvstore_pb2, router_pb2, worker_pb2)
    there = {
        f"/{service.full_name}/{method.name}"
        for file in files
        for service in file.DESCRIPTOR.services_by_name.values()
        for method in service.methods
    }
    assert {method for methods in MAY_CALL.values() for method in methods} - {"*"} <= there
    for name in ("Delete", "Pin", "ListTenants", "Drain", "SetRole", "ListInstances"):
        for role, methods in MAY_CALL.items():
            assert role == "admin" or not any(method.endswith(f"/{name}") for method in methods)


@pytest.mark.parametrize(
    ("name", "callers"),
    [
        ("WorkerService/Prefill", {"decode", "instance"}),
        ("WorkerService/Generate", {"router", "client"}),
        ("WorkerService/StreamKvEvents", {"router"}),
        ("KvStoreService/Put", {"prefill", "decode", "instance"}),
        ("KvStoreService/StreamStoreEvents", {"router"}),
        ("RouterService/Register", {"prefill", "decode", "instance"}),
        ("RouterService/Generate", {"client"}),
    ],
)
def test_nobody_else_may_call(name: str, callers: set[str]) -> None:
    roles = CertificateRoles(PATTERN)
    for role in MAY_CALL:
        uris, method = [PATTERN.format(role=role)], f"/baton.api.v1.{name}"
        if role in callers | {"admin"}:
            roles.require_call(uris, method)
        else:
            with pytest.raises(PermissionDeniedError):
                roles.require_call(uris, method)


def test_a_pattern_that_is_none() -> None:
    for pattern in ("decode", "spiffe://example.org/baton", "spiffe://{role}/{role}", "{role}"):
        with pytest.raises(ConfigError, match="tls_roles") as caught:
            CertificateRoles(pattern)
        assert caught.value.field == "tls_roles"
    with pytest.raises(ConfigError, match="--tls-roles needs") as caught:
        read_tls(RouterConfig(tls_roles=PATTERN))
    assert caught.value.field == "tls_roles"
    assert CertificateRoles("spiffe://a/ns/prod/sa/baton-{role}").of(["spiffe://a/ns/prod/sa/baton-decode"]) == {
        "decode"
    }
    others = ["root", "admin/x", "admin-of-tests", "/admin", "x/admin", ""]
    assert not CertificateRoles(PATTERN).of(PATTERN.format(role=role) for role in others)
    assert not CertificateRoles(PATTERN).of(["spiffe://example_org/baton/admin", "x" + PATTERN.format(role="admin")])


@pytest.mark.parametrize(
    ("begins", "ends"), [("20200101000000Z", "20200102000000Z"), ("20980101000000Z", "20990101000000Z")]
)
async def test_a_certificate_that_does_not_count_now_gets_through_no_handshake(
    tmp_path: Path, begins: str, ends: str
) -> None:
    authority = Authority(tmp_path / "authority")
    uri = PATTERN.format(role="admin")
    ours = authority.issue("store", names=f"{HOSTS},URI:{uri}")
    server = KVStoreServer(KVStoreConfig(capacity_bytes=1 << 20, **flags(ours)))  # type: ignore[arg-type]
    await server.start()
    try:
        shown = authority.issue("late", names=f"{HOSTS},URI:{uri}", begins=begins, ends=ends)
        foreign = Authority(tmp_path / "other").issue("rogue", names=f"{HOSTS},URI:{uri}")
        for each in (shown, foreign):
            credentials = as_shown(each, ours)
            async with grpc.aio.secure_channel(server.address, credentials) as channel:
                stub = kvstore_pb2_grpc.KvStoreServiceStub(channel)
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await stub.Delete(kvstore_pb2.DeleteRequest(tenant="acme"), timeout=240)
                assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    finally:
        await server.stop(0)


def as_shown(certificate: Certificate, theirs: Certificate) -> grpc.ChannelCredentials:
    """Return what shows a certificate that Baton itself would refuse to show, and believes a server of theirs."""
    files = (Path(name) for name in (theirs.ca, certificate.key, certificate.cert))
    return grpc.ssl_channel_credentials(*(file.read_bytes() for file in files))


async def test_a_clients_certificate_registers_no_instance(shown: Callable[[str], Certificate]) -> None:
    app = RouterApp(RouterConfig(port=0, grpc_port=0, **flags(shown("router"))))  # type: ignore[arg-type]
    await app.start()
    stub, address = router_pb2_grpc.RouterServiceStub, f"127.0.0.1:{app.grpc_port}"
    try:
        request = router_pb2.RegisterRequest(address="127.0.0.1:1", instance_id="rogue")
        for role in ("client", "kvstore", "router", "none"):
            with pytest.raises(PermissionDeniedError, match="may not call Register"):
                await call(address, shown(role), stub, "Register", request)
        assert not list(app.registry.instances())
    finally:
        await app.stop()
