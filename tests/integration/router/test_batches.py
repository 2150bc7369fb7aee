"""Files and batches as the openai SDK uses them: real router processes, killed and started again, over an engine."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sqlite3
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai.types import Batch
from prometheus_client import generate_latest
from tests.integration.router.test_router_process import Process
from tests.support.servers.cluster import LocalCluster
from tests.support.servers.fake_worker import FakeWorker
from tests.support.servers.redis_server import RedisServer, missing_redis

from baton.config import EngineConfig
from baton.config.router import RouterConfig
from baton.errors import QueueFullError
from baton.rpc.server import free_port
from baton.rpc.service_token import Token
from baton.types import BACKGROUND_PRIORITY, Role
from baton_router.app import RouterApp

CHAT = "/v1/chat/completions"
MODEL = "models/baton-tiny"
ENDED = ("completed", "failed", "expired", "cancelled")


def chat_body(index: int, **fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": f"write function {index}"}]
    return {"messages": messages, "temperature": 0, "max_tokens": 6, **fields}


def line(index: int, url: str = CHAT, body: dict[str, Any] | None = None) -> dict[str, Any]:
    return {"custom_id": f"r{index}", "method": "POST", "url": url, "body": chat_body(index) if body is None else body}


def jsonl(lines: Sequence[Any]) -> bytes:
    return b"".join((x if isinstance(x, bytes) else json.dumps(x).encode()) + b"\n" for x in lines)


async def create(client: openai.AsyncOpenAI, lines: Sequence[Any], endpoint: Any = CHAT, **fields: Any) -> Batch:
    file = await client.files.create(file=("in.jsonl", jsonl(lines)), purpose="batch")
    return await client.batches.create(
        input_file_id=file.id, endpoint=endpoint, completion_window="24h", **fields
    )  # fmt: skip


async def wait_until(client: openai.AsyncOpenAI, batch: Batch, *states: str, done: int = 0) -> Batch:
    async with asyncio.timeout(240):
        while True:
            with contextlib.suppress(openai.APIConnectionError):  # its router has just been killed
                batch = await client.batches.retrieve(batch.id)
                counts = batch.request_counts
                assert counts is not None
                if batch.status in states or (done and counts.completed >= done):
                    return batch
                assert batch.status not in ENDED, batch
            await asyncio.sleep(0.02)


async def results(client: openai.AsyncOpenAI, ident: str | None) -> list[dict[str, Any]]:
    if ident is None:
        return []
    return [json.loads(x) for x in (await client.files.content(ident)).text.splitlines()]


def client_of(url: str, key: str = "none") -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=240)


class Router:
    """A router process on ports of its own, which can be killed and started again."""

    def __init__(self, *flags: str) -> None:
        self.port = free_port()
        self.flags = ("--port", str(self.port), "--grpc-port", str(free_port()), *flags)
        self.url = f"http://127.0.0.1:{self.port}"
        self._process: Process | None = None

    async def start(self) -> None:
        self._process = Process(
            await asyncio.create_subprocess_exec(
                sys.executable, "-m", "baton_router.main", *self.flags, stderr=asyncio.subprocess.PIPE
            )
        )
        await self._process.serving()

    async def kill(self) -> None:
        if self._process is not None and self._process.process.returncode is None:
            self._process.process.kill()
            await self._process.process.communicate()


@contextlib.asynccontextmanager
async def engine() -> AsyncIterator[str]:
    """A decode instance with a real engine; its address."""
    config = EngineConfig(model=MODEL, dtype="float32", device="cpu", kv_blocks=2048)
    async with LocalCluster(config, num_prefill=0) as cluster:
        yield cluster.decode[0].address


@contextlib.asynccontextmanager
async def router(*flags: str) -> AsyncIterator[Router]:
    process = Router(*flags)
    try:
        await process.start()
        yield process
    finally:
        await process.kill()


async def test_a_killed_router_goes_on_and_nothing_is_lost_or_repeated(tmp_path: Path) -> None:
    total = 1000
    async with (
        engine() as address,
        router("--decode", address, "--batch-store", str(tmp_path / "b")) as process,
        client_of(process.url) as client,
    ):
        batch = await create(client, [line(i) for i in range(total)], metadata={"run": "7"})
        for share in (0.2, 0.5):
            await wait_until(client, batch, done=int(share * total))
            await process.kill()
            await process.start()
        batch = await wait_until(client, batch, "completed")
        assert batch.request_counts is not None
        assert batch.request_counts.model_dump() == {"total": total, "completed": total, "failed": 0}
        assert (batch.metadata, batch.error_file_id) == ({"run": "7"}, None)
        found = await results(client, batch.output_file_id)
        assert [x["custom_id"] for x in found] == [f"r{i}" for i in range(total)]
        used = [x["response"]["body"]["usage"] for x in found]
        assert batch.usage is not None
        assert batch.usage.input_tokens == sum(x["prompt_tokens"] for x in used) > 0
        assert batch.usage.output_tokens == sum(x["completion_tokens"] for x in used) > 0
        assert batch.usage.total_tokens == batch.usage.input_tokens + batch.usage.output_tokens
        for index in range(0, total, 50):
            direct = await client.chat.completions.create(model="baton-tiny", **chat_body(index))
            answer = found[index]["response"]
            assert answer["status_code"] == 200
            assert answer["body"]["choices"] == direct.model_dump(exclude_unset=True)["choices"]


async def test_a_batch_is_cancelled_at_half(tmp_path: Path) -> None:
    async with (
        engine() as address,
        router("--decode", address, "--batch-store", str(tmp_path / "b")) as process,
        client_of(process.url) as client,
    ):
        batch = await create(client, [line(i) for i in range(600)])
        await wait_until(client, batch, done=300)
        batch = await client.batches.cancel(batch.id)
        assert batch.status in ("cancelling", "cancelled")
        batch = await wait_until(client, batch, "cancelled")
        answered = await results(client, batch.output_file_id)
        failed = await results(client, batch.error_file_id)
        assert {x["error"]["code"] for x in failed} == {"batch_cancelled"}
        numbers = [int(x["custom_id"][1:]) for x in answered]
        assert numbers == sorted(numbers)
        assert sorted(numbers + [int(x["custom_id"][1:]) for x in failed]) == list(range(600))
        with pytest.raises(openai.ConflictError, match="cannot be cancelled"):
            await client.batches.cancel(batch.id)


@pytest.mark.skipif(missing_redis() is not None, reason=str(missing_redis()))
async def test_another_router_takes_over() -> None:
    redis = RedisServer()
    await redis.start()
    try:
        async with engine() as address, contextlib.AsyncExitStack() as stack:
            flags = ("--decode", address, "--redis", redis.url, "--batch-store", "redis")
            first, second = [await stack.enter_async_context(router(*flags)) for _ in range(2)]
            one, two = client_of(first.url), client_of(second.url)
            batch = await create(one, [line(i) for i in range(400)])
            await wait_until(two, batch, done=50)
            async with httpx.AsyncClient() as http:
                metrics = (await http.get(f"{first.url}/metrics")).text
            runs_first = "baton_router_batches_running 1.0" in metrics
            await (first if runs_first else second).kill()
            client = two if runs_first else one
            batch = await wait_until(client, batch, "completed")
            found = await results(client, batch.output_file_id)
            assert [x["custom_id"] for x in found] == [f"r{i}" for i in range(400)]
            await one.close()
            await two.close()
    finally:
        await redis.kill()


# --- one router in this process, over a scripted instance ---


class Clock:
    now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


@contextlib.asynccontextmanager
async def app(
    folder: Path, *, clock: Clock | None = None, worker: FakeWorker | None = None, **flags: Any
) -> AsyncIterator[RouterApp]:
    token = Token("the services' token") if "api_keys" in flags else None
    worker = worker or FakeWorker(Role.DECODE, "d0", caches=False, token=token)
    worker.state.model_path = MODEL
    await worker.start()
    config = RouterConfig(port=0, grpc_port=0, decode=(worker.address,), batch_store=str(folder / "b"), **flags)
    made = RouterApp(config, **({} if clock is None else {"now": clock}))
    await made.start()
    try:
        async with asyncio.timeout(240):
            while not made.is_ready():
                await asyncio.sleep(0.01)
        yield made
    finally:
        await made.stop()
        await worker.stop()


def url_of(made: RouterApp) -> str:
    return f"http://127.0.0.1:{made.http_port}"


async def test_a_broken_line_is_an_error_and_the_others_run(tmp_path: Path) -> None:
    body = {"model": "nothing", **chat_body(4)}
    lines = [line(0), b"{nonsense", line(2, "/v1/completions"), line(3), line(4, body=body), line(5, body={}), b"",
             line(6, body=chat_body(6, stream=True)), line(7)]  # fmt: skip
    async with app(tmp_path) as made, client_of(url_of(made)) as client:
        batch = await wait_until(client, await create(client, lines), "completed")
        assert batch.request_counts is not None
        assert batch.request_counts.model_dump() == {"total": 8, "completed": 3, "failed": 5}
        answered = await results(client, batch.output_file_id)
        failed = await results(client, batch.error_file_id)
    assert [x["custom_id"] for x in answered] == ["r0", "r3", "r7"]
    assert [x["custom_id"] for x in failed] == [None, "r2", "r4", "r5", "r6"]
    assert "line 2 is not valid JSON" in failed[0]["error"]["message"]
    assert (failed[1]["error"]["param"], failed[1]["error"]["line"]) == ("url", 3)
    assert failed[2]["response"]["status_code"] == 404
    assert failed[2]["response"]["body"]["error"]["code"] == "model_not_found"
    assert failed[3]["response"]["body"]["error"]["param"] == "messages"
    assert failed[4]["error"]["param"] == "body.stream"


async def test_names_must_be_there_and_unique(tmp_path: Path) -> None:
    unnamed = {key: value for key, value in line(2).items() if key != "custom_id"}
    async with app(tmp_path, batch_lines=10) as made, client_of(url_of(made)) as client:
        batch = await wait_until(client, await create(client, [line(0), line(1), line(0), unnamed]), "failed")
        assert batch.errors is not None
        assert [(x.line, x.param, x.code) for x in batch.errors.data or []] == [
            (3, "custom_id", "duplicate_custom_id"),
            (4, "custom_id", "missing_custom_id"),
        ]
        for lines, code in (([], "empty_file"), ([line(i) for i in range(11)], "too_many_lines")):
            batch = await wait_until(client, await create(client, lines), "failed")
            assert batch.errors is not None
            assert [x.code for x in batch.errors.data or []] == [code]


async def test_results_end_where_the_bytes_of_a_tenant_do(tmp_path: Path) -> None:
    async with app(tmp_path, batch_tenant_bytes=16_000) as made, client_of(url_of(made)) as client:
        batch = await create(client, [line(i) for i in range(60)])
        batch = await wait_until(client, batch, "completed")
        assert batch.request_counts is not None
        assert 0 < batch.request_counts.completed < 40
        assert {x["error"]["code"] for x in await results(client, batch.error_file_id)} == {"output_limit"}
        with pytest.raises(openai.RateLimitError, match="delete some"):
            await client.batches.create(input_file_id=batch.input_file_id, endpoint=CHAT, completion_window="24h")
        for ident in (batch.output_file_id, batch.error_file_id):
            await client.files.delete(str(ident))
        await client.batches.create(input_file_id=batch.input_file_id, endpoint=CHAT, completion_window="24h")


async def test_only_so_many_files_are_read_at_once(tmp_path: Path) -> None:
    async with app(tmp_path) as made, client_of(url_of(made)) as client, contextlib.AsyncExitStack() as stack:
        file = await client.files.create(file=("in.jsonl", b"x" * (16 << 20)), purpose="batch")
        readers = []
        request = f"GET /v1/files/{file.id}/content HTTP/1.1\r\nHost: localhost\r\n\r\n".encode()
        for _ in range(33):  # they read the beginning of the answer and no more
            reader, writer = await asyncio.open_connection("127.0.0.1", made.http_port, limit=1 << 16)
            stack.callback(writer.close)
            writer.write(request)
            readers.append(await reader.readline())
        assert [x.split()[1] for x in readers] == [b"200"] * 32 + [b"429"]


async def test_a_record_that_cannot_be_read_stops_no_other_batch(tmp_path: Path) -> None:
    async with app(tmp_path) as made, client_of(url_of(made)) as client:
        with sqlite3.connect(tmp_path / "b" / "batches.sqlite3") as db:
            values = ("batch_x", "batch_", "", "validating", 2**40, b'{"id": "batch_x", "tenant": 5}')
            columns = "id, prefix, tenant, status, removed_at, body"
            db.execute(f"INSERT INTO records ({columns}) VALUES (?, ?, ?, ?, ?, ?)", values)
        db.close()
        batch = await wait_until(client, await create(client, [line(0)]), "completed")
        assert [x.id async for x in client.batches.list()] == [batch.id]


async def test_a_batch_that_is_interrupted_leaves_no_task(tmp_path: Path) -> None:
    before = asyncio.all_tasks()
    worker = FakeWorker(Role.DECODE, "d0", caches=False)
    async with app(tmp_path, worker=worker) as made:
        worker.state.pause_after = 0
        async with client_of(url_of(made)) as client:
            await create(client, [line(0)])
        async with asyncio.timeout(240):
            while not worker.state.requests:
                await asyncio.sleep(0.01)
    assert asyncio.all_tasks() == before


async def test_completions_and_responses_run_too(tmp_path: Path) -> None:
    bodies = {"/v1/completions": {"prompt": "def", "max_tokens": 3}, "/v1/responses": {"input": "def"}}
    async with app(tmp_path) as made, client_of(url_of(made)) as client:
        for endpoint, body in bodies.items():
            batch = await create(client, [line(0, endpoint, body)], endpoint)
            batch = await wait_until(client, batch, "completed")
            (found,) = await results(client, batch.output_file_id)
            body = found["response"]["body"]
            assert body["object"] in ("text_completion", "response")
            assert batch.usage is not None
            assert batch.usage.total_tokens == body["usage"]["total_tokens"] > 0
        with pytest.raises(openai.NotFoundError):  # it takes no place of the tenant's own responses
            await client.responses.retrieve(found["response"]["body"]["id"])


async def test_what_is_wrong_with_a_request_is_named(tmp_path: Path) -> None:
    async with (
        app(tmp_path, batch_file_bytes=10_000, batch_tenant_batches=1) as made,
        client_of(url_of(made)) as client,
    ):
        good = await client.files.create(file=("in.jsonl", jsonl([line(0)])), purpose="batch")
        fields: dict[str, Any] = {"input_file_id": good.id, "endpoint": CHAT, "completion_window": "24h"}
        for changes, param in (
            ({"input_file_id": "file-1"}, "input_file_id"),
            ({"endpoint": "/v1/embeddings"}, "endpoint"),
            ({"completion_window": "1h"}, "completion_window"),
            ({"metadata": {str(i): "" for i in range(17)}}, "metadata"),
            ({"output_expires_after": {"anchor": "created_at", "seconds": 5}}, "output_expires_after.seconds"),
        ):
            with pytest.raises(openai.APIStatusError) as raised:
                await client.batches.create(**{**fields, **changes})
            assert raised.value.status_code == (404 if param == "input_file_id" else 400)
            assert raised.value.body["param"] == param  # type: ignore[index]
        with pytest.raises(openai.BadRequestError, match="purpose must be batch"):
            await client.files.create(file=("in.jsonl", b"{}"), purpose="assistants")
        with pytest.raises(openai.APIStatusError, match="at most 10000 bytes"):
            await client.files.create(file=("in.jsonl", b"x" * 10_001), purpose="batch")
        with pytest.raises(openai.BadRequestError, match="limit must be between"):
            await client.batches.list(limit=101)
        with pytest.raises(openai.NotFoundError, match="after"):
            await client.files.list(after="file-nothing")
        assert [x.id async for x in client.files.list()] == [good.id]


async def test_without_a_store_the_endpoints_say_so(tmp_path: Path) -> None:
    async with app(tmp_path) as made:
        assert made.http_port
    config = RouterConfig(port=0, grpc_port=0)
    made = RouterApp(config)
    await made.start()
    try:
        async with client_of(url_of(made)) as client:
            with pytest.raises(openai.APIStatusError, match="--batch-store") as raised:
                await client.files.create(file=("in.jsonl", b"{}"), purpose="batch")
            assert raised.value.status_code == 501
            with pytest.raises(openai.APIStatusError, match="--batch-store"):
                await client.batches.list()
    finally:
        await made.stop()


async def test_tenants_see_only_their_own(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("the services' token")
    tenants = {"a": {"keys": ["sk-aa"], "requests_per_minute": 6}, "b": {"keys": ["sk-bb"], "admin": True}}
    (tmp_path / "keys.json").write_text(json.dumps({"tenants": tenants}))
    for name in ("token", "keys.json"):
        (tmp_path / name).chmod(0o600)
    flags = {"api_keys": str(tmp_path / "keys.json"), "token_file": str(tmp_path / "token")}
    async with app(tmp_path, **flags) as made:
        a, b = client_of(url_of(made), "sk-aa"), client_of(url_of(made), "sk-bb")
        batch = await create(a, [line(i) for i in range(2)])
        batch = await wait_until(a, batch, "completed")
        assert batch.output_file_id is not None
        for call in (
            b.batches.retrieve(batch.id),
            b.batches.cancel(batch.id),
            b.files.retrieve(batch.input_file_id),
            b.files.content(batch.output_file_id),
            b.files.delete(batch.output_file_id),
            b.batches.create(input_file_id=batch.input_file_id, endpoint=CHAT, completion_window="24h"),
        ):
            with pytest.raises(openai.NotFoundError):
                await call
        assert [x async for x in b.files.list()] == []
        assert [x async for x in b.batches.list()] == []
        assert [x.id async for x in a.batches.list()] == [batch.id]
        assert len([x async for x in a.files.list(purpose="batch_output")]) == 1
        async with client_of(url_of(made), "sk-cc") as stranger:
            with pytest.raises(openai.AuthenticationError):
                await stranger.files.retrieve(batch.output_file_id)
        # Beyond half of its limit its lines wait, and are not refused; its own requests have the other half.
        waiting = await create(a, [line(i) for i in range(9)])
        await wait_until(a, waiting, done=1)
        await a.chat.completions.create(model="fake", messages=[{"role": "user", "content": "x"}])
        await a.batches.cancel(waiting.id)
        await wait_until(a, waiting, "cancelled")
        assert (await a.files.delete(batch.output_file_id)).deleted
        with pytest.raises(openai.NotFoundError):
            await a.files.content(batch.output_file_id)
        await a.close()
        await b.close()


async def test_a_batch_expires_with_the_answers_that_it_has(tmp_path: Path) -> None:
    clock = Clock()
    worker = FakeWorker(Role.DECODE, "d0", caches=False)
    async with app(tmp_path, clock=clock, worker=worker, instance_slots=2) as made, client_of(url_of(made)) as client:
        worker.state.pause_after = 0
        batch = await create(client, [line(i) for i in range(5)])
        await wait_until(client, batch, "in_progress")
        clock.now += 24 * 3600 - 1
        await asyncio.sleep(0)
        assert (await client.batches.retrieve(batch.id)).status == "in_progress"
        clock.now += 1
        batch = await wait_until(client, batch, "expired")
        failed = await results(client, batch.error_file_id)
        assert [x["custom_id"] for x in failed] == [f"r{i}" for i in range(5)]
        assert {x["error"]["code"] for x in failed} == {"batch_expired"}
        assert batch.expired_at == clock.now
        clock.now += 31 * 24 * 3600  # everything is removed by and by
        async with asyncio.timeout(240):
            while [x async for x in client.files.list()] or [x async for x in client.batches.list()]:
                await asyncio.sleep(0.05)


async def test_lines_that_are_refused_are_sent_again(tmp_path: Path) -> None:
    worker = FakeWorker(Role.DECODE, "d0", caches=False)
    async with app(tmp_path, worker=worker) as made, client_of(url_of(made)) as client:
        worker.state.refuse = QueueFullError("full", retry_after_s=0.1)
        batch = await create(client, [line(i) for i in range(3)])
        async with asyncio.timeout(240):
            while 'baton_router_batch_lines_total{outcome="deferred"}' not in generate_latest(made.metrics).decode():
                await asyncio.sleep(0.01)
        assert (await client.batches.retrieve(batch.id)).status == "in_progress"
        worker.state.refuse = None
        batch = await wait_until(client, batch, "completed")
        assert batch.request_counts is not None
        assert batch.request_counts.completed == 3


async def test_a_line_gives_way_to_a_request_that_would_wait(tmp_path: Path) -> None:
    worker = FakeWorker(Role.DECODE, "d0", caches=False)
    state = worker.state
    async with app(tmp_path, worker=worker, instance_slots=2) as made, client_of(url_of(made)) as client:
        state.pause_after = 0
        batch = await create(client, [line(i) for i in range(3)])
        async with asyncio.timeout(240):
            while not state.requests:
                await asyncio.sleep(0.01)
        assert [x.priority for x in state.requests] == [BACKGROUND_PRIORITY]  # of two slots one stays free
        async with httpx.AsyncClient(base_url=url_of(made)) as http:
            assert (await http.get("/debug/console")).json()["background"] == 1
        chats = [asyncio.create_task(client.chat.completions.create(model="fake", **chat_body(9))) for _ in "ab"]
        async with asyncio.timeout(240):
            while len(state.running) < 2 or not state.cancelled:
                await asyncio.sleep(0.01)
        assert [x.priority for x in state.requests] == [BACKGROUND_PRIORITY, 0, 0]
        state.pause_after = None
        worker.changed()
        await asyncio.gather(*chats)
        batch = await wait_until(client, batch, "completed")
        assert [x["custom_id"] for x in await results(client, batch.output_file_id)] == ["r0", "r1", "r2"]
