"""Two tenants before real processes with certificates and a token: nothing of one is of use to the other."""

from __future__ import annotations

import asyncio
import json
import ssl
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from tests.support.equality import hf_greedy
from tests.support.servers.certificates import Authority, Certificate
from tests.support.servers.up import Running, running_up

import baton
from baton.api.v1 import kvstore_pb2, kvstore_pb2_grpc, router_pb2, router_pb2_grpc, worker_pb2, worker_pb2_grpc
from baton.cli.main import main
from baton.errors import UnauthenticatedError
from baton.rpc.channel import open_channel
from baton.rpc.service_token import Token
from baton.rpc.tls import Tls
from baton.tokenizer.tokenizer import Tokenizer

pytestmark = pytest.mark.slow

A, B, ADMIN = "sk-a", "sk-b", "sk-admin"
TOKEN = "secret-of-the-services"
QUOTA_BLOCKS = 40
BLOCK_BYTES = 48 * 1024
"""Of the demo model in float32."""


@dataclass
class World:
    running: Running
    certificate: Certificate
    token_file: str
    tls: Tls

    @property
    def context(self) -> ssl.SSLContext:
        return ssl.create_default_context(cafile=self.certificate.ca)

    def address(self, name: str) -> str:
        for line in self.running.lines:
            if f" {name} " in f" {line.replace('│', ' ').replace('|', ' ')} " and "grpc 127.0.0.1:" in line:
                return line.split("grpc ")[1].split()[0]
        raise AssertionError("".join(self.running.lines))

    def http(self, key: str) -> httpx.Client:
        url = self.running.url.replace("http:", "https:")
        return httpx.Client(base_url=url, verify=self.context, headers={"authorization": f"Bearer {key}"}, timeout=240)

    def complete(self, key: str, prompt: str, **fields: Any) -> tuple[int, httpx.Response]:
        body = {"model": "baton-tiny", "prompt": prompt, "max_tokens": 4, "temperature": 0, **fields}
        with self.http(key) as client:
            answer = client.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"], answer

    def shares(self) -> dict[str, kvstore_pb2.TenantUse]:
        async def ask() -> kvstore_pb2.ListTenantsResponse:
            async with open_channel(self.address("kvstore"), token=Token(TOKEN), tls=self.tls) as channel:
                stub: Any = kvstore_pb2_grpc.KvStoreServiceStub(channel)
                found: kvstore_pb2.ListTenantsResponse
                found = await stub.ListTenants(kvstore_pb2.ListTenantsRequest(), timeout=240)
                return found

        return {use.tenant: use for use in asyncio.run(ask()).tenants}

    def indexed(self) -> int:
        """How many blocks the router knows of on each instance, at least."""
        with self.http(ADMIN) as client:
            return min(row["blocks"] for row in client.get("/debug/index").json()["instances"])

    def stored(self, tenant: str) -> int:
        """How many blocks of a tenant have come, whether they are still there or not."""
        share = self.shares()[tenant]
        return share.num_blocks + share.num_evictions

    def channel(self, address: str) -> grpc.Channel:
        return grpc.secure_channel(address, self.tls.channel_credentials()[1])

    def cli(self, *args: str) -> int:
        return main([*args, "--token-file", self.token_file, *self.certificate.flags])


def until(condition: Callable[[], bool]) -> None:
    ends = time.monotonic() + 240
    while not condition():
        assert time.monotonic() < ends
        time.sleep(0.05)


@pytest.fixture(scope="module")
def world(model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    root: Path = tmp_path_factory.mktemp("tenants")
    certificate = Authority(root / "ca").issue("services")
    keys, secret, token = root / "keys.json", root / "secret", root / "token"
    quota = QUOTA_BLOCKS * BLOCK_BYTES
    keys.write_text(json.dumps({"tenants": {
        "a": {"keys": [A], "kv_bytes": quota},
        "b": {"keys": [B], "kv_bytes": 4 * quota},
        "ops": {"keys": [ADMIN], "admin": True},
    }}))  # fmt: skip
    secret.write_text("a secret that routers share")
    token.write_text(TOKEN)
    with running_up(
        "--ratio", "1P1D", "--dtype", "float32", "--model", model, "--kvstore", "--pipe", "tls",
        "--token-file", str(token), "--router-args", f"--api-keys {keys} --tenant-secret-file {secret}",
        "--tls-cert", certificate.cert, "--tls-key", certificate.key, "--tls-ca", certificate.ca,
    ) as running:  # fmt: skip
        tls = Tls(certificate.cert, certificate.key, certificate.ca)
        yield World(running, certificate, str(token), tls)


def forget_prefixes(world: World) -> None:
    """Have the instances drop what they keep: what is cached then is in the store alone."""
    with baton.Client(world.running.grpc, token_file=world.token_file, tls=world.tls) as client:
        addresses = [each.address for each in client.list_instances()]
    assert len(addresses) == 2

    async def reset(address: str) -> None:
        async with open_channel(address, token=Token(TOKEN), tls=world.tls) as channel:
            stub: Any = worker_pb2_grpc.WorkerServiceStub(channel)
            await stub.ResetPrefixCache(worker_pb2.ResetPrefixCacheRequest(), timeout=240)

    def forgotten() -> bool:
        for address in addresses:
            asyncio.run(reset(address))
        with world.http(ADMIN) as client:
            rows = client.get("/debug/index").json()["instances"]
        return len(rows) == 2 and all(row["blocks"] == 0 and row["state"] == "exact" for row in rows)

    until(forgotten)  # what a request still uses is dropped later


def test_nothing_of_one_tenant_is_of_use_to_another(world: World, model: str, texts: list[str]) -> None:
    prompt = texts[3]
    cached, answer = world.complete(A, prompt, return_token_ids=True)
    assert (cached, answer.headers["x-baton-pipe"]) == (0, "tls")
    ids = Tokenizer.load(model).encode(prompt)
    assert answer.json()["choices"][0]["token_ids"] == hf_greedy(model, [ids], 4)[0]
    until(lambda: "a" in world.shares() and world.indexed() >= len(ids) // 16)
    cached, answer = world.complete(A, prompt)
    assert cached > 100
    assert float(answer.headers["x-baton-match-rate"]) > 0.5

    for fields in ({}, {"cache_salt": "a"}):  # engines' caches and the router's index, and whatever salt it makes up
        cached, answer = world.complete(B, prompt, **fields)
        assert cached == 0
        assert answer.headers["x-baton-cached-tokens"] == "0"
        assert float(answer.headers["x-baton-match-rate"]) == 0
    assert world.complete(A, prompt, cache_salt="mine")[0] == 0, "a client's salt divides its tenant's cache"
    assert world.complete(A, prompt, cache_salt="mine")[0] > 100

    other = texts[1]
    before = world.stored("a")
    _, answer = world.complete(A, other)
    blocks = answer.json()["usage"]["prompt_tokens"] // 16
    until(lambda: world.stored("a") >= before + blocks)  # it is saved behind the answer
    forget_prefixes(world)  # the store
    cached, answer = world.complete(B, other)
    assert (cached, "store" in answer.headers["x-baton-path"]) == (0, False)
    cached, answer = world.complete(A, other)
    assert cached > 100, "what the other one misses is there"
    assert "store" in answer.headers["x-baton-path"] or int(answer.headers["x-baton-kv-bytes"]) > 0


def test_the_sdk_is_a_tenant_too(world: World, texts: list[str]) -> None:
    prompt = f"# over the SDK\n{texts[3]}"

    def cached(key: str) -> int:
        with baton.Client(world.running.grpc, token=key, tls=world.tls) as client:
            trace = client.generate(prompt, max_tokens=4, temperature=0).trace
        assert trace is not None
        stored = trace.transferred_tokens if trace.path == "store" else 0
        return max(trace.cached_tokens, trace.prefill_cached_tokens, stored)

    first = cached(A)
    assert cached(A) > first
    mine = world.complete(A, prompt)[0]
    assert mine > first, "over HTTP it is the same tenant"
    assert cached(B) == 0
    with (
        baton.Client(world.running.grpc, token="sk-wrong", tls=world.tls, retries=0) as client,
        pytest.raises(UnauthenticatedError),
    ):
        client.generate("x", max_tokens=1)


def test_what_services_do_is_not_for_tenants(world: World) -> None:
    with world.channel(world.running.grpc) as channel:
        stub = router_pb2_grpc.RouterServiceStub(channel)
        for key in (A, ""):
            with pytest.raises(grpc.RpcError) as caught:
                stub.ListInstances(
                    router_pb2.ListInstancesRequest(), metadata=(("authorization", f"Bearer {key}"),), timeout=240
                )
            assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
        metadata = (("authorization", f"Bearer {ADMIN}"),)
        answer = stub.ListInstances(router_pb2.ListInstancesRequest(), metadata=metadata, timeout=240)
        assert len(answer.instances) == 2
    with baton.Client(world.running.grpc, token_file=world.token_file, tls=world.tls) as client:
        assert len(client.list_instances()) == 2
    with world.channel(world.address("kvstore")) as channel:
        store = kvstore_pb2_grpc.KvStoreServiceStub(channel)
        with pytest.raises(grpc.RpcError) as caught:
            store.ListTenants(
                kvstore_pb2.ListTenantsRequest(), metadata=(("authorization", f"Bearer {A}"),), timeout=240
            )
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
    with grpc.insecure_channel(world.address("kvstore")) as channel, pytest.raises(grpc.RpcError) as caught:
        kvstore_pb2_grpc.KvStoreServiceStub(channel).ListTenants(kvstore_pb2.ListTenantsRequest(), timeout=240)
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


def test_tenants_see_their_own_requests_alone(world: World, tmp_path: Path) -> None:
    for key, name in ((A, "from-a"), (B, "from-b")):
        with world.http(key) as client:
            client.post(
                "/v1/completions",
                json={"model": "baton-tiny", "prompt": "def f():", "max_tokens": 2},
                headers={"x-request-id": name},
            ).raise_for_status()
    for key, mine, theirs in ((A, "from-a", "from-b"), (B, "from-b", "from-a")):
        with world.http(key) as client:
            assert client.get(f"/debug/decisions/{mine}").status_code == 200
            assert client.get(f"/debug/decisions/{theirs}").status_code == 404
            listed = client.get("/debug/decisions").json()
            assert not [x for x in listed["decisions"] if theirs in x["id"]]
            assert listed["seen"] == len(listed["decisions"])
            for path in ("/debug/index", "/debug/console", "/debug/replicas"):
                assert client.get(path).status_code == 403
    for key, status in ((A, 0), (B, 1)):
        (tmp_path / "key").write_text(key)
        url = ("--url", world.running.url.replace("http:", "https:"), "--tls-ca", world.certificate.ca)
        assert main(["explain", "from-a", *url, "--api-key-file", str(tmp_path / "key")]) == status
    with world.http(ADMIN) as client:
        assert {client.get(f"/debug/decisions/{name}").status_code for name in ("from-a", "from-b")} == {200}
        assert client.get("/debug/index").status_code == 200


def test_quotas_hold(world: World, texts: list[str]) -> None:
    """Comes after the others: it fills the store."""
    world.complete(B, texts[3])
    until(lambda: world.shares()["b"].num_blocks > 30)
    theirs = world.shares()["b"].num_blocks
    for at in range(6):
        world.complete(A, f"# {at}\n{texts[3]}")
        share = world.shares()["a"]
        assert share.used_bytes <= QUOTA_BLOCKS * BLOCK_BYTES == share.quota_bytes
    until(lambda: world.shares()["a"].num_evictions > 0)
    assert world.shares()["b"].num_blocks >= theirs

    assert world.cli("kvstore", "tenants", world.address("kvstore")) == 0

    def cleared() -> bool:
        """The last answer's blocks may still be on their way when everything there is forgotten."""
        assert world.cli("kvstore", "clear", "--tenant", "a", world.address("kvstore")) == 0
        return world.shares()["a"].num_blocks == 0

    until(cleared)
    assert world.shares()["b"].num_blocks >= theirs
