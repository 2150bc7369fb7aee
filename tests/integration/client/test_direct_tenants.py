"""Tenants in direct mode: API keys at the router, tickets at the decode instance, the services' token for neither."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import httpx
import pytest
from tests.integration.client.test_direct import KEY, MODEL, PROMPT, until
from tests.integration.router.test_router_process import router
from tests.support.servers.cluster import LocalCluster
from tests.support.servers.fake_tokens import expected_tokens
from tests.support.servers.fake_worker import FakeWorker

from baton import AsyncClient
from baton.api.v1 import common_pb2, worker_pb2, worker_pb2_grpc
from baton.config import EngineConfig
from baton.config.worker import WorkerConfig
from baton.errors import UnauthenticatedError
from baton.rpc.auth import HEADER
from baton.rpc.channel import open_channel
from baton.rpc.service_token import read_token
from baton.rpc.ticket import Bearer, sign, ticket_header
from baton.token_ids import pack_ids
from baton.types import Role

NAMES = {key: f"key-{hashlib.sha256(key.encode()).hexdigest()[:8]}" for key in ("sk-one", "sk-two")}


@contextlib.asynccontextmanager
async def world(folder: Path) -> AsyncIterator[tuple[FakeWorker, str]]:
    """A router with two API keys, and a decode instance that wants tickets."""
    for name, content in (
        ("key", KEY),
        ("keys", b"sk-one\nsk-two\n"),
        ("secret", b"a secret of routers"),
        ("token", b"the services' token"),
    ):
        (folder / name).write_bytes(content)
    async with contextlib.AsyncExitStack() as stack:
        worker = FakeWorker(Role.DECODE, "d0", ticket_key=KEY, token=read_token(str(folder / "token")))
        worker.state.model_path = MODEL
        await worker.start()
        stack.push_async_callback(worker.stop)
        flags = ("--api-keys", str(folder / "keys"), "--tenant-secret-file", str(folder / "secret"))
        flags += ("--token-file", str(folder / "token"))
        process = await stack.enter_async_context(
            router("--decode", worker.address, "--ticket-key-file", str(folder / "key"), *flags)
        )
        http = await stack.enter_async_context(httpx.AsyncClient(base_url=f"http://{process.http}", timeout=240))

        async def ready() -> bool:
            return (await http.get("/readyz")).status_code == 200

        await until(ready)
        yield worker, process.grpc


async def test_a_ticket_carries_the_tenants_salt(tmp_path: Path) -> None:
    async with world(tmp_path) as (worker, address):
        for key in NAMES:
            for direct in (True, False):
                async with AsyncClient(address, token=key, direct=direct) as client:
                    answer = await client.generate(PROMPT, max_tokens=3, seed=5, cache_salt="mine")
                    assert answer.choices[0].token_ids == expected_tokens(PROMPT, 3, seed=5)
                    await client.generate(PROMPT, max_tokens=3, seed=5)
        seen = [(x.tenant.id, x.cache_salt) for x in worker.state.requests]
        assert [name for name, _ in seen] == [name for name in NAMES.values() for _ in range(4)]
        assert all(len(salt) == 64 for _, salt in seen)
        assert seen[:2] == seen[2:4]  # with and without the router between it is the same cache
        assert seen[4:6] == seen[6:]
        assert len(set(seen)) == 4  # two tenants, each with and without a salt of its own
        for key in ("sk-wrong", None):
            async with AsyncClient(address, token=key, direct=True, retries=0) as client:
                with pytest.raises(UnauthenticatedError):
                    await client.generate(PROMPT, max_tokens=3)


async def test_a_ticket_opens_generate_and_nothing_else(tmp_path: Path) -> None:
    for name, content in (("key", KEY), ("token", b"secret of services")):
        (tmp_path / name).write_bytes(content)
    engine = EngineConfig(model=MODEL, dtype="float32", kv_blocks=64)
    config = WorkerConfig(ticket_key_file=str(tmp_path / "key"), token_file=str(tmp_path / "token"))
    async with LocalCluster(engine, config, num_prefill=0) as cluster:
        (decode,) = cluster.decode
        bearer = Bearer(decode.context.base.instance_id, decode.context.base.model.arena.epoch, decode.address)
        request = worker_pb2.GenerateRequest(
            request_id="r",
            prompt_token_ids=pack_ids(PROMPT),
            sampling=common_pb2.SamplingParams(max_tokens=4, n=1, temperature=0, ignore_eos=True),
        )
        async with open_channel(decode.address) as channel:
            stub: Any = worker_pb2_grpc.WorkerServiceStub(channel)

            async def generate() -> int:
                signed = request.HasField("ticket")
                shown = ((HEADER, ticket_header(request.ticket) if signed else "Bearer an API key of the router"),)
                stream = stub.Generate(request, timeout=240, metadata=shown)
                return len([t async for x in stream for d in x.deltas for t in d.token_ids])

            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await generate()
            assert refused.value.code() is grpc.StatusCode.PERMISSION_DENIED
            sign(KEY, request, bearer, life_s=30)
            request.tenant.id = "somebody-else"
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await generate()
            assert refused.value.code() is grpc.StatusCode.PERMISSION_DENIED, "the tenant is signed too"
            request.ClearField("tenant")
            sign(KEY, request, bearer, life_s=30)
            assert await generate() == 4
            for call in (
                stub.GetInfo(worker_pb2.GetInfoRequest(), timeout=240),
                stub.Abort(worker_pb2.AbortRequest(request_id="r"), timeout=240),
                stub.GenerateMany(iter([worker_pb2.GenerateManyRequest()]), timeout=240).read(),
            ):
                with pytest.raises(grpc.aio.AioRpcError) as refused:
                    await call
                assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
