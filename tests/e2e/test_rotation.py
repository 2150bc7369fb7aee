"""The services' token is replaced under a running deployment: no request fails, and the old one opens nothing then."""

from __future__ import annotations

import asyncio
from pathlib import Path

import grpc
import grpc.aio
import pytest

from baton.api.v1 import kvstore_pb2, kvstore_pb2_grpc, worker_pb2, worker_pb2_grpc
from baton.cli.plan import ExtraArgs, Ratio, make_plan
from baton.cli.supervisor import Supervisor
from baton.client import AsyncClient
from baton.rpc.channel import open_channel
from baton.rpc.service_token import Token, read_token

OLD, NEW = "the-old-token-0123456789", "the-new-token-9876543210"
STEPS = ((OLD, NEW), (NEW, OLD), (NEW,))
CLIENTS = 4


def write(path: Path, *tokens: str) -> None:
    """Replace a token file, as a mounted secret is."""
    fresh = path.with_suffix(".new")
    fresh.write_text("\n".join(tokens) + "\n")
    fresh.chmod(0o600)
    fresh.replace(path)


@pytest.mark.slow
async def test_a_token_is_replaced_under_load_without_a_failed_request(model, starter, tmp_path):
    path, lines, done = tmp_path / "token", [], [0] * CLIENTS
    write(path, OLD)
    worker = ("--model", model, "--dtype", "float32", "--kv-blocks", "600", "--remote-prefill-threshold", "16")
    plan = make_plan(
        ratio=Ratio(1, 1),
        kvstore=True,
        access=("--token-file", str(path)),
        extra=ExtraArgs(worker=worker),
    )
    names = {"kvstore", "prefill-0", "decode-0", "router"}

    def emit(name: str, line: str) -> None:
        lines.append((name, line))

    supervisor = Supervisor(plan, emit, token=read_token(str(path)))
    supervisor.spawn = starter.spawn
    stop = asyncio.Event()

    async def client(number: int) -> None:
        """Ask without a pause, on connections of its own for each third request; a failure ends the test."""
        while not stop.is_set():
            async with AsyncClient(plan.grpc_address, token_file=str(path), retries=0) as sdk:
                for _ in range(3):
                    prompt = [3 + number, done[number] % 500, *range(40, 100)]
                    answer = await sdk.generate(prompt, max_tokens=4, temperature=0.0, ignore_eos=True)
                    assert len(answer.token_ids) == 4
                    done[number] += 1

    async def ask_store() -> None:
        async with open_channel(plan.kvstore.health_address, token=read_token(str(path))) as channel:
            await kvstore_pb2_grpc.KvStoreServiceStub(channel).GetStoreInfo(
                kvstore_pb2.GetStoreInfoRequest(), timeout=240
            )

    async def served(more: int) -> None:
        goals = [count + more for count in done]
        while any(count < goal for count, goal in zip(done, goals, strict=True)):
            await asyncio.sleep(0.05)

    async with supervisor, asyncio.TaskGroup() as clients:
        for number in range(CLIENTS):
            clients.create_task(client(number))
        await served(2)
        for at, tokens in enumerate(STEPS):
            write(path, *tokens)
            async with asyncio.timeout(240):
                while {name for name, line in lines if f"read again: {len(tokens)} tokens" in line} != names:
                    await ask_store()  # which may have nothing to do: to be asked is enough to have it look
                    await asyncio.sleep(0.1)
            await served(3)
            lines.clear()
            if at < 2:
                continue
            (decode,) = (x for x in plan.workers if x.name == "decode-0")
            for token, opens in ((Token(OLD), False), (Token(NEW), True)):
                async with open_channel(decode.health_address, token=token) as channel:
                    info = worker_pb2_grpc.WorkerServiceStub(channel).GetInfo(worker_pb2.GetInfoRequest(), timeout=240)
                    if opens:
                        assert (await info).instance_id
                        continue
                    with pytest.raises(grpc.aio.AioRpcError) as refused:
                        await info
                    assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
        stop.set()
