"""What the audit log has of real services: who was turned away, who looked, who deleted, what changed. No secrets."""

from __future__ import annotations

import base64
import contextlib
import json
import socket
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from tests.support.transport.transport_rig import Rig, soon

from baton.api.v1 import kvstore_pb2, kvstore_pb2_grpc, router_pb2, router_pb2_grpc
from baton.config.kvstore import KVStoreConfig
from baton.config.router import RouterConfig
from baton.errors import BatonError
from baton.kv_transfer.blocks import BlockFetcher, BlockServer, LinkOptions, ServerOptions
from baton.rpc.audit import AuditLog
from baton.rpc.auth import HEADER
from baton.rpc.channel import open_channel
from baton.rpc.service_token import Token
from baton.types import InstanceId
from baton_kvstore.server import KVStoreServer
from baton_router.app import RouterApp

TOKEN, ADMIN, USER, WRONG = "t0ken-of-all-the-services", "sk-admin-key", "sk-user-key", "sk-wrong-key"


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    found: list[str] = []
    monkeypatch.setattr("baton.rpc.audit._log", AuditLog(found.append))
    return found


def told(lines: list[str]) -> list[dict[str, Any]]:
    for secret in (TOKEN, ADMIN, USER, WRONG):
        assert not any(secret in line for line in lines)
    found = [{k: v for k, v in json.loads(line).items() if k not in ("time", "service")} for line in lines]
    lines.clear()
    return found


def private(path: Path, text: str) -> str:
    path.touch(0o600)
    path.write_text(text)
    return str(path)


def accounts(*names: str) -> str:
    known = {"boss": {"keys": [ADMIN], "admin": True}, "user": {"keys": [USER]}}
    return json.dumps({"tenants": {name: known[name] for name in names}})


async def test_a_router_notes_wrong_keys_administrators_reads_and_new_keys(lines: list[str], tmp_path: Path) -> None:
    keys = private(tmp_path / "keys.json", accounts("boss", "user"))
    config = RouterConfig(
        port=0,
        grpc_port=0,
        api_keys=keys,
        token_file=private(tmp_path / "token", TOKEN),
        redis="",
        tenant_secret_file="",
    )
    app = RouterApp(config)
    await app.start()
    try:
        url = f"http://127.0.0.1:{app.http_port}"
        failed = {"event": "authentication_failed", "over": "http", "peer": "127.0.0.1"}
        async with httpx.AsyncClient(base_url=url, timeout=240) as client:

            async def get(path: str, key: str) -> int:
                return (await client.get(path, headers={"authorization": f"Bearer {key}"})).status_code

            assert await get("/metrics", WRONG) == 401
            answer = await client.post("/v1/completions", json={"prompt": "secret"}, headers={"x-api-key": WRONG})
            assert answer.status_code == 401
            assert told(lines) == [{**failed, "endpoint": "/metrics"}, {**failed, "endpoint": "/v1/completions"}]
            read = {"event": "admin_read", "over": "http", "account": "boss", "peer": "127.0.0.1"}
            for path in ("/metrics", "/debug/decisions", "/debug/index", "/debug/console"):
                assert await get(path, ADMIN) == 200
                assert told(lines) == [{**read, "endpoint": path}]
            assert await get("/metrics", USER) == 403
            assert told(lines) == [{**read, "event": "denied", "account": "user", "endpoint": "/metrics"}]
            for method, path in (("POST", "/reset_prefix_cache"), ("POST", "/flush_cache"), ("GET", "/tokenizer_info")):
                answer = await client.request(method, path, headers={"authorization": f"Bearer {USER}"})
                assert answer.status_code == 403
                assert told(lines) == [{**read, "event": "denied", "account": "user", "endpoint": path}]
            assert await get("/debug/decisions", USER) == 200  # its own
            assert await get("/v1/models", USER) == 503
            assert told(lines) == []

            async with open_channel(f"127.0.0.1:{app.grpc_port}") as channel:
                stub: Any = router_pb2_grpc.RouterServiceStub(channel)
                key, wrong = (((HEADER, f"Bearer {x}"),) for x in (ADMIN, WRONG))
                await stub.ListInstances(router_pb2.ListInstancesRequest(), timeout=240, metadata=key)
                with pytest.raises(grpc.RpcError):
                    await stub.Register(router_pb2.RegisterRequest(), timeout=240, metadata=wrong)
                forged = ((HEADER, f"Baton {base64.urlsafe_b64encode(bytes(88)).decode()}"),)  # as long as a true one
                with pytest.raises(grpc.RpcError):
                    await stub.Heartbeat(router_pb2.HeartbeatRequest(), timeout=240, metadata=forged)
            async with open_channel(f"127.0.0.1:{app.grpc_port}", token=Token(WRONG)) as channel:
                stub = router_pb2_grpc.RouterServiceStub(channel)
                with pytest.raises(grpc.RpcError):
                    await stub.Register(router_pb2.RegisterRequest(), timeout=240)
            assert told(lines) == [
                {"event": "admin_read", "over": "grpc", "account": "boss", "method": "ListInstances"}
                | {"peer": "ipv4:127.0.0.1"},
                {"event": "authentication_failed", "over": "grpc", "method": "/baton.api.v1.RouterService/Register"}
                | {"peer": "ipv4:127.0.0.1"},
                {"event": "authentication_failed", "over": "grpc", "method": "/baton.api.v1.RouterService/Heartbeat"}
                | {"peer": "ipv4:127.0.0.1"},
                {"event": "authentication_failed", "over": "grpc", "method": "/baton.api.v1.AuthService/Prove"}
                | {"peer": "ipv4:127.0.0.1"},
            ]
            private(tmp_path / "keys.json", accounts("boss"))
            await app._reload.look()
            private(tmp_path / "keys.json", "broken")
            await app._reload.look()
            changed = {"event": "keys_changed", "source": keys}
            assert told(lines) == [{**changed, "taken": "yes", "tenants": 1}, {**changed, "taken": "no"}]
    finally:
        await app.stop()


async def test_a_store_notes_what_is_deleted(lines: list[str]) -> None:
    server = KVStoreServer(KVStoreConfig(capacity_bytes=1 << 20))
    await server.start()
    try:
        async with open_channel(server.address) as channel:
            stub: Any = kvstore_pb2_grpc.KvStoreServiceStub(channel)
            await stub.Delete(kvstore_pb2.DeleteRequest(tenant="acme"), timeout=240)
    finally:
        await server.stop(0)
    assert told(lines) == [{"event": "deleted", "what": "tenant acme", "blocks": 0, "peer": "ipv4:127.0.0.1"}]


@pytest.mark.parametrize("kind", ["tcp", "shm"])
def test_a_pipe_notes_who_does_not_know_the_token(lines: list[str], kind: str) -> None:
    rig = Rig(kind)
    server = BlockServer(
        rig.source_arena, rig.print, InstanceId("p1"), kinds=(kind,), token=Token(TOKEN), options=ServerOptions()
    )
    fetcher = BlockFetcher(rig.target, rig.print, kinds=(kind,), links=LinkOptions(token=Token(WRONG)))
    try:
        with pytest.raises(BatonError):
            fetcher.fetch(server.source, [0], rig.source_arena.generations[[0]], [0], deadline=soon())
    finally:
        fetcher.close()
        server.close()
        rig.close()
    first, *others = told(lines)
    assert not others
    assert (first["event"], first["over"], first["kind"]) == ("authentication_failed", "pipe", kind)


def test_who_knocks_at_a_pipe_again_and_again_does_not_fill_the_log(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    # However long the fifty take on a busy machine, they come within the time that one line stands for.
    monkeypatch.setattr("baton.kv_transfer.blocks.server._COMPLAINTS_S", 3600.0)
    rig = Rig("tcp")
    server = BlockServer(
        rig.source_arena, rig.print, InstanceId("p1"), kinds=("tcp",), token=Token(TOKEN), options=ServerOptions()
    )
    host, _, port = server.endpoints[0].address.rpartition(":")
    try:
        for at in range(50):
            with (
                contextlib.suppress(ConnectionResetError),
                socket.create_connection((host, int(port)), timeout=240) as sock,
            ):
                sock.sendall(bytes([at]) * 64)
                while sock.recv(4096):  # until it is sent away
                    continue
    finally:
        server.close()
        rig.close()
    assert caplog.text.count("was sent away") == 1
