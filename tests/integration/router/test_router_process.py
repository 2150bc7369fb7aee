"""``baton-router`` as a process: start, health, registration over the wire, drain, bad configurations."""

from __future__ import annotations

import asyncio
import contextlib
import re
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import grpc.aio
import httpx
import pytest
from tests.support.servers.fake_tokens import expected_tokens
from tests.support.servers.fake_worker import FakeWorker

from baton.api.v1 import common_pb2, router_pb2, router_pb2_grpc
from baton.rpc.channel import check_health, open_channel
from baton.rpc.convert import role_to_pb
from baton.rpc.server import free_port
from baton.types import Role
from baton_router.app import listen


class Process:
    """A running router and where it listens."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.lines: list[str] = []
        self.http = self.grpc = ""

    async def serving(self) -> None:
        assert self.process.stderr is not None
        async with asyncio.timeout(240):
            while line := (await self.process.stderr.readline()).decode():
                self.lines.append(line)
                if found := re.search(r"serving http=(\S+) grpc=(\S+)", line):
                    self.http, self.grpc = found[1], found[2]
                    return
        raise AssertionError("".join(self.lines))

    async def end(self) -> tuple[int, str]:
        async with asyncio.timeout(240):
            _, rest = await self.process.communicate()
        assert self.process.returncode is not None
        return self.process.returncode, "".join(self.lines) + rest.decode()


async def spawn(*flags: str) -> Process:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "baton_router.main", "--port", "0", "--grpc-port", "0", *flags),
        stderr=asyncio.subprocess.PIPE,
    )
    return Process(process)


@contextlib.asynccontextmanager
async def router(*flags: str) -> AsyncIterator[Process]:
    process = await spawn(*flags)
    try:
        await process.serving()
        yield process
    finally:
        if process.process.returncode is None:
            process.process.kill()
            await process.process.wait()


@contextlib.asynccontextmanager
async def decode_worker() -> AsyncIterator[FakeWorker]:
    worker = FakeWorker(Role.DECODE, "d0")
    worker.state.model_path = "models/baton-tiny"
    await worker.start()
    try:
        yield worker
    finally:
        await worker.stop()


async def register(stub: router_pb2_grpc.RouterServiceAsyncStub, worker: FakeWorker) -> str:
    request = router_pb2.RegisterRequest(
        address=worker.address, instance_id=worker.instance_id, role=role_to_pb(worker.role), epoch=worker.epoch
    )
    lease = await stub.Register(request, timeout=240)
    async with asyncio.timeout(240):
        while not [x for x in (await stub.ListInstances(router_pb2.ListInstancesRequest())).instances if x.healthy]:
            await asyncio.sleep(0.01)
    assert (await stub.Heartbeat(router_pb2.HeartbeatRequest(lease_id=lease.lease_id))).known
    return str(lease.lease_id)


async def refuses_connections(address: str) -> None:
    host, port = address.split(":")
    async with asyncio.timeout(240):
        while True:
            try:
                _, writer = await asyncio.open_connection(host, int(port))
            except ConnectionRefusedError:
                return
            writer.transport.abort()
            await asyncio.sleep(0.01)


def generate_request(num_tokens: int) -> router_pb2.RouterGenerateRequest:
    return router_pb2.RouterGenerateRequest(
        request_id="r",
        token_ids=router_pb2.TokenIds(ids=range(20)),
        sampling=common_pb2.SamplingParams(max_tokens=num_tokens, seed=3),
    )


async def test_an_instance_that_is_refused_is_told_of() -> None:
    async with decode_worker() as worker, router() as process, open_channel(process.grpc) as channel:
        stub = router_pb2_grpc.RouterServiceStub(channel)
        other = FakeWorker(Role.DECODE, "p0")
        await other.start()
        try:
            await register(stub, worker)
            request = router_pb2.RegisterRequest(
                address=other.address, instance_id="p0", role=role_to_pb(Role.PREFILL), epoch=other.epoch
            )
            await stub.Register(request, timeout=240)
            refused: dict[str, str] = {}
            async with asyncio.timeout(240), httpx.AsyncClient(base_url=f"http://{process.http}", timeout=240) as http:
                while not any(refused.values()):
                    answer = await stub.ListInstances(router_pb2.ListInstancesRequest())
                    refused = {item.address: item.refused for item in answer.instances}
                while (ready := await http.get("/readyz")).status_code != 200:
                    await asyncio.sleep(0.01)
            assert refused == {worker.address: "", other.address: "role is decode, expected prefill"}
            assert ready.json() == {"status": "ready", "refused": {"prefill": 1}}
        finally:
            await other.stop()


async def test_life_of_a_router() -> None:
    drain = ("--drain-timeout-s", "240")
    async with decode_worker() as worker, router(*drain) as process, open_channel(process.grpc) as channel:
        stub = router_pb2_grpc.RouterServiceStub(channel)
        assert await check_health(process.grpc, timeout_s=240)
        async with httpx.AsyncClient(base_url=f"http://{process.http}", timeout=240) as http:
            assert (await http.get("/readyz")).status_code == 503
            assert (await http.get("/readyz", headers={"host": "rebound.example"})).status_code == 403
            lease = await register(stub, worker)
            async with asyncio.timeout(240):  # its tokenizer is loaded first
                while (await http.get("/readyz")).status_code != 200:
                    await asyncio.sleep(0.01)
            assert 'baton_router_instance_healthy{instance="d0",role="decode"} 1.0' in (await http.get("/metrics")).text

            worker.state.pause_after = 4
            call = stub.Generate(generate_request(8))
            tokens: list[int] = []
            while len(tokens) < 4:
                response = await call.read()
                tokens += response.deltas[0].token_ids
            # Told to end in mid-stream, it takes nothing new but brings this one to its end.
            process.process.send_signal(signal.SIGTERM)
            async with asyncio.timeout(240):
                while await check_health(process.grpc, timeout_s=0.5):
                    await asyncio.sleep(0.01)
            await refuses_connections(process.http)
            worker.state.pause_after = None
            worker.changed()
            while response := await call.read():
                tokens += response.deltas[0].token_ids
        assert tokens == expected_tokens(range(20), 8, seed=3)
        assert lease
        code, output = await process.end()
        assert code == 0, output
        assert "Traceback" not in output


async def test_more_clients_than_the_soft_limit_of_open_files_are_served() -> None:
    async with limited_router("-Sn 256") as process:
        assert await asks_at_once(process.http, 400) == [b"HTTP/1.1 200 OK"] * 400
        assert "open files and connections: at most" in "".join(process.lines)


async def test_clients_above_the_hard_limit_of_open_files_are_told() -> None:
    async with limited_router("-n 256") as process:
        answers = await asks_at_once(process.http, 180)
        assert set(answers) <= {b"HTTP/1.1 200 OK", b"HTTP/1.1 503 Service Unavailable"}
        assert answers.count(b"HTTP/1.1 200 OK") >= 160
        assert await asks_at_once(process.http, 1) == [b"HTTP/1.1 200 OK"]
        host, port = process.http.split(":")
        half = [await asyncio.open_connection(host, int(port)) for _ in range(300)]
        for _, writer in half:
            writer.write(b"GET /health HTTP/1.1\r\nhost:")
        async with asyncio.timeout(240):  # once they have been silent for long enough, others take their places
            while await asks_at_once(process.http, 10) != [b"HTTP/1.1 200 OK"] * 10:
                continue
        for _, writer in half:
            writer.transport.abort()


async def asks_at_once(address: str, count: int) -> list[bytes]:
    """Connect so many times, then ask on all connections; returns the status lines, empty ones where it was reset."""
    host, port = address.split(":")
    opened = [await asyncio.open_connection(host, int(port)) for _ in range(count)]
    for _, writer in opened:
        writer.write(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
    lines = []
    async with asyncio.timeout(240):
        for reader, writer in opened:
            try:
                lines.append((await reader.readline()).strip())
            except ConnectionResetError:  # closed with the request unread, as no descriptor was free
                lines.append(b"")
            writer.transport.abort()
    return lines


@contextlib.asynccontextmanager
async def limited_router(limit: str) -> AsyncIterator[Process]:
    flags = "-m baton_router.main --port 0 --grpc-port 0"
    process = Process(
        await asyncio.create_subprocess_exec(
            *("bash", "-c", f"ulimit {limit} && exec {sys.executable} {flags}"), stderr=asyncio.subprocess.PIPE
        )
    )
    try:
        await process.serving()
        yield process
    finally:
        if process.process.returncode is None:
            process.process.kill()
            await process.process.wait()


async def test_drain_has_an_end() -> None:
    async with decode_worker() as worker, router("--drain-timeout-s", "0.2") as process:
        async with open_channel(process.grpc) as channel:
            stub = router_pb2_grpc.RouterServiceStub(channel)
            await register(stub, worker)
            worker.state.pause_after = 1
            call = stub.Generate(generate_request(8))
            await call.read()
            process.process.send_signal(signal.SIGINT)
            with pytest.raises(grpc.aio.AioRpcError, match="shutting down") as caught:
                await call.read()
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
            await worker.wait_until(lambda: not worker.state.running)
        code, output = await process.end()
        assert code == 0, output


async def test_requests_that_outlive_a_drain_are_told_why() -> None:
    async with decode_worker() as worker, router("--drain-timeout-s", "0.2") as process:
        async with open_channel(process.grpc) as channel:
            await register(router_pb2_grpc.RouterServiceStub(channel), worker)
        worker.state.pause_after = 1
        body = {"prompt": [5, 6, 7], "max_tokens": 8}
        async with httpx.AsyncClient(base_url=f"http://{process.http}", timeout=240) as client:
            whole = asyncio.create_task(client.post("/v1/completions", json=body))
            async with client.stream("POST", "/v1/completions", json={**body, "stream": True}) as stream:
                await worker.wait_until(lambda: len(worker.state.running) == 2)
                process.process.send_signal(signal.SIGTERM)
                *_, last = [line async for line in stream.aiter_lines() if line]
            answer = await whole
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "unavailable")
        assert answer.headers["retry-after"]
        assert "shutting down" in last
        code, output = await process.end()
        assert code == 0, output
        assert "Traceback" not in output


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (["--beta", "-3"], "beta must be between"),
        (["--decode", "nowhere"], "'nowhere' is not host:port"),
        (["--model", "/does/not/exist"], "/does/not/exist"),
        (["--host", "0.0.0.0"], "--token-file"),
        (["--token-file", "/does/not/exist"], "/does/not/exist"),
    ],
)
async def test_bad_configuration_is_one_clear_line(flags: list[str], text: str) -> None:
    code, output = await (await spawn(*flags)).end()
    assert code == 2
    assert text in output
    assert "Traceback" not in output
    assert len([line for line in output.splitlines() if line]) == 1, output


@pytest.mark.parametrize("flag", ["--port", "--grpc-port"])
async def test_a_port_in_use_is_one_clear_line(flag: str) -> None:
    with listen("127.0.0.1", 0) as sock:
        port = sock.getsockname()[1]
        code, output = await (await spawn(flag, str(port))).end()
    assert code == 2
    assert f"127.0.0.1:{port}" in output
    assert len([line for line in output.splitlines() if line]) == 1, output


async def test_the_router_needs_no_torch() -> None:
    code = "import sys, baton_router.app; print(sorted({'torch', 'transformers'} & set(sys.modules)))"
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", code, stdout=asyncio.subprocess.PIPE)
    output, _ = await process.communicate()
    assert output.decode().strip() == "[]"


async def test_metrics_have_a_port_of_their_own_where_clients_must_not_see_them(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("one\ntwo\n")
    (tmp_path / "token").write_text("the services' token")
    port = free_port()
    flags = ("--api-keys", str(tmp_path / "keys"), "--token-file", str(tmp_path / "token"))
    async with router(*flags, "--metrics-port", str(port)) as process, httpx.AsyncClient(timeout=240) as http:
        answer = await http.get(f"http://{process.http}/metrics", headers={"authorization": "Bearer one"})
        assert answer.status_code == 403
        assert "baton_router_" in (await http.get(f"http://127.0.0.1:{port}/metrics")).text
