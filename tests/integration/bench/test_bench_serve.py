"""``baton bench serve`` against a real router with workers that have no model, and against services that misbehave."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.integration.router.test_router_process import router
from tests.support.child_env import child_env
from tests.support.servers.fake_worker import FakeWorker

from baton.cli.main import main
from baton.config.flags import AccessConfig
from baton.errors import ConfigError, UnavailableError
from baton.types import Role
from baton_bench.serve.options import ServeOptions
from baton_bench.serve.prompts import PlannedRequest
from baton_bench.serve.records import Sample
from baton_bench.serve.targets import HttpClient, OpenAITarget

MODEL = "models/baton-tiny"
QUICK = ("--requests", "6", "--isl", "24", "--osl", "5", "--warmup", "1", "--vocab-size", "64")
WAIT_S = 240.0


Bench = Callable[..., Awaitable[tuple[int, str, str]]]


@pytest.fixture
def bench(capsys: pytest.CaptureFixture[str]) -> Bench:
    async def run(*arguments: str) -> tuple[int, str, str]:
        code = await asyncio.to_thread(main, ["bench", "serve", *arguments])
        return code, *capsys.readouterr()

    return run


async def in_a_process(*arguments: str) -> tuple[int, str, str]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "baton.cli.main", "bench", "serve", *arguments,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE, env=child_env(),
    )  # fmt: skip
    out, err = await process.communicate()
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()


def of(out: str, kind: str) -> list[dict[str, Any]]:
    return [line for line in map(json.loads, out.splitlines()) if line["record"] == kind]


@pytest.fixture
async def service() -> AsyncIterator[tuple[FakeWorker, str, str]]:
    """A worker without a model behind a router; yields it and the router's HTTP and gRPC addresses."""
    async with contextlib.AsyncExitStack() as stack:
        worker = FakeWorker(Role.DECODE, "d0")
        worker.state.model_path = MODEL
        await worker.start()
        stack.push_async_callback(worker.stop)
        process = await stack.enter_async_context(router("--decode", worker.address, "--reconnect-max-s", "0.2"))
        http = await stack.enter_async_context(httpx.AsyncClient(base_url=f"http://{process.http}", timeout=240))
        async with asyncio.timeout(WAIT_S):
            while (await http.get("/v1/models")).status_code != 200:
                await asyncio.sleep(0.02)
        yield worker, process.http, process.grpc


async def test_every_endpoint_counts_alike(service, bench):
    worker, http, grpc = service
    for number, endpoint in enumerate(("completions", "chat", "grpc")):
        target = ("--endpoint", endpoint, "--url", grpc if endpoint == "grpc" else f"http://{http}")
        text = ("--tokenizer", MODEL) if endpoint == "chat" else ()
        run = in_a_process if endpoint == "grpc" else bench
        code, out, err = await run(*target, *QUICK, *text, "--seed", str(number), "--json", "--details",
                                     "--slo", "ttft:60s", "--slo", "itl:60s", "--max-concurrency", "2")  # fmt: skip
        assert (code, err) == (0, "")
        (head,), (load,), details = of(out, "run"), of(out, "serve"), of(out, "request")
        assert head["endpoint"] == endpoint
        assert (load["completed"], load["failed"], load["output_tokens"], load["peak_concurrency"]) == (6, 0, 30, 2)
        assert load["attainment"] == 1.0
        assert load["goodput"] == load["requests_per_s"]
        assert load["ttft_ms"]["p99"] <= load["e2e_ms"]["p99"]
        assert load["cached_tokens"] is not None
        if endpoint != "chat":
            assert load["input_tokens"] == 6 * 24
        for line in details:
            assert line["output_tokens"] == 5
            assert sum(line["itl_ms"]) == pytest.approx(line["e2e_ms"] - line["ttft_ms"], abs=0.01)
    assert len(worker.state.requests) == 3 * 7  # with the warm-up


async def test_rates_the_report_and_the_knee(service, bench, tmp_path):
    _, http, _ = service
    code, out, _ = await bench(
        "--url", f"http://{http}", *QUICK, "--request-rate", "200", "--plot", str(tmp_path / "a.png")
    )
    assert code == 0
    for label in ("Serving Benchmark Result", "Median TTFT (ms)", "P99 TPOT (ms)", "Request throughput (req/s)"):
        assert label in out
    assert (tmp_path / "a.png").read_bytes()[:4] == b"\x89PNG"
    code, out, _ = await bench("--url", f"http://{http}", *QUICK, "--find-knee", "--slo", "ttft:60s", "--request-rate",
                               "300", "--knee-max-rate", "600", "--json", "--plot",
                               str(tmp_path / "b.png"))  # fmt: skip
    (knee,), loads = of(out, "knee"), of(out, "serve")
    assert code == 0
    assert (tmp_path / "b.png").read_bytes()[:4] == b"\x89PNG"
    assert len(loads) >= knee["tried"]
    assert loads[0]["request_rate"] == 300.0
    best = [load for load in loads if load["request_rate"] == knee["rate"]]
    assert knee["rate"] is None or best[-1]["served_share"] == knee["served_share"] >= 0.9


async def test_refusals_are_counted_by_kind(service, bench):
    worker, http, grpc = service
    worker.state.max_running = 0
    for url, kind in ((f"http://{http}", "http 429"), (grpc, "queue_full")):
        endpoint = ("--endpoint", "grpc") if url == grpc else ()
        code, out, _ = await (in_a_process if endpoint else bench)(
            "--url", url, *endpoint, *QUICK, "--warmup", "0", "--json"
        )
        (load,), (result,) = of(out, "serve"), of(out, "result")
        assert code == 1
        assert load["errors"] == {kind: 6}
        assert (load["completed"], load["ttft_ms"]) == (0, None)
        assert result["failures"][0].startswith(f"6 times {kind}; the first: ")


async def test_no_service():
    code, out, err = await in_a_process("--url", "http://127.0.0.1:9", *QUICK)
    assert (code, out.count("Traceback"), err.count("Traceback")) == (1, 0, 0)
    assert err.startswith("baton bench serve: http://127.0.0.1:9 does not answer")


# --- one connection, step by step ---

Script = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
HEAD_CLOSE = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n"
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


def chunk(text: str) -> bytes:
    return f"{len(text):x}\r\n{text}\r\n".encode()


def event(text: str, end: str | None = None) -> bytes:
    return chunk("data: " + json.dumps({"choices": [{"text": text, "finish_reason": end}]}) + "\n\n")


DONE = chunk("data: [DONE]\n\n") + b"0\r\n\r\n"


@contextlib.asynccontextmanager
async def scripted(script: Script) -> AsyncIterator[OpenAITarget]:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await script(reader, writer)
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    options = ServeOptions(url=f"http://127.0.0.1:{port}", model="m", timeout_s=WAIT_S)
    target = OpenAITarget(options, AccessConfig())
    try:
        yield target
    finally:
        await target.close()
        server.close()
        await server.wait_closed()


async def read_request(reader: asyncio.StreamReader) -> bytes:
    head = await reader.readuntil(b"\r\n\r\n")
    length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
    return await reader.readexactly(length)


async def ask(target: OpenAITarget) -> Sample:
    sample = Sample(0)
    await target.ask(PlannedRequest((1, 2), 4), sample)
    return sample


async def test_an_event_counts_when_it_arrives_and_not_when_the_answer_ends():
    sample, seen = Sample(0), list[int]()

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(HEAD)
        for number in range(3):
            writer.write(event("a"))
            async with asyncio.timeout(WAIT_S):
                while len(sample.arrivals) <= number:  # it must be noted before the next one is sent
                    await asyncio.sleep(0.001)
            seen.append(len(sample.arrivals))
        writer.write(event("", "stop") + chunk('data: {"choices": [], "usage": {"completion_tokens": 4, '
                     '"prompt_tokens": 2, "prompt_tokens_details": {"cached_tokens": 1}}}\n\n') + DONE)  # fmt: skip

    async with scripted(script) as target:
        await target.ask(PlannedRequest((1, 2), 4), sample)
    assert seen == [1, 2, 3]
    assert len(set(sample.arrivals)) == 3
    assert (sample.error, sample.output_tokens, sample.prompt_tokens, sample.cached_tokens) == ("", 4, 2, 1)


@pytest.mark.parametrize(
    ("answer", "kind", "arrivals"),
    [
        (HEAD + event("a"), "cut", 1),
        (HEAD + event("a") + b"0\r\n\r\n", "cut", 1),
        (HEAD_CLOSE + b'data: {"choices": [{"text": "a"}]}\n\ndata: [DONE]\n\n', "", 1),
        (HEAD_CLOSE + b'data: {"choices": [{"text": "a"}]}\n\n', "cut", 1),
        (b"", "connection", 0),
        (b"nonsense\r\n\r\n", "connection", 0),
        (HEAD + event("a") + chunk('data: {"error": {"message": "worker died"}}\n\n') + DONE, "error event", 1),
        (HEAD + chunk("data: {no json\n\n") + DONE, "bad event", 0),
        (HEAD + event("a") + chunk('data: {"usage": [7]}\n\n') + DONE, "bad event", 1),
        (HEAD + event("a") + chunk('data: {"usage": {"completion_tokens": "7"}}\n\n') + DONE, "bad event", 1),
        (HEAD + event("a") + chunk('data: {"usage": {"prompt_tokens_details": 7}}\n\n') + DONE, "bad event", 1),
        (HEAD + chunk("data: " + "[" * 100_000 + "\n\n") + DONE, "bad event", 0),
        (HEAD + DONE, "empty answer", 0),
        (b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n{}", "no stream", 0),
        (b"HTTP/1.1 503 No\r\ncontent-length: 4\r\n\r\nbusy", "http 503", 0),
    ],
)
async def test_kinds_of_errors(answer: bytes, kind: str, arrivals: int):
    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(answer)
        await writer.drain()

    async with scripted(script) as target:
        sample = await ask(target)
    assert (sample.error, len(sample.arrivals)) == (kind, arrivals)


@pytest.mark.parametrize("head", [HEAD, HEAD.replace(b"200 OK", b"500 No")])
@pytest.mark.parametrize("line", ["x", "data: x\n"])
async def test_an_event_without_end_is_given_up(head: bytes, line: str):
    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(head)
        with contextlib.suppress(ConnectionError):
            while True:
                writer.write(chunk(line * 100_000))
                await writer.drain()

    async with scripted(script) as target:
        sample = await ask(target)
    assert sample.message == f"more than {8 * 2**20} bytes without an event"


@pytest.mark.parametrize("session", ["", "a"])
async def test_a_service_is_told_the_session(session: str):
    bodies: list[dict[str, Any]] = []

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        bodies.append(json.loads(await read_request(reader)))
        writer.write(HEAD + event("a", "stop") + DONE)

    async with scripted(script) as target:
        await target.ask(PlannedRequest((1, 2), 4, session=session), Sample(0))
    assert bodies[0].get("session_id", "") == session


async def test_a_request_that_never_ends_is_given_up():
    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(HEAD + event("a"))
        await reader.read()  # until the client goes

    async with scripted(script) as target:
        target._options = ServeOptions(timeout_s=0.2)
        assert (await ask(target)).error == "timeout"


async def test_a_connection_that_was_closed_while_idle_is_replaced():
    served: list[int] = []

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        served.append(len(served))
        writer.write(HEAD + event("a", "stop") + DONE)
        await writer.drain()
        writer.close()

    async with scripted(script) as target:
        assert [(await ask(target)).error for _ in range(3)] == ["", "", ""]
    assert served == [0, 1, 2]


async def test_connections_are_kept():
    connections: list[int] = []

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.append(1)
        for _ in range(3):
            await read_request(reader)
            writer.write(HEAD + event("a", "stop") + DONE)

    async with scripted(script) as target:
        assert [(await ask(target)).error for _ in range(3)] == ["", "", ""]
    assert len(connections) == 1


@pytest.mark.parametrize(
    "models",
    ["null", "[]", '{"data": []}', '{"data": [{"id": 7}]}', '{"data": [{"id": "a\\u001b[2J"}]}', "[" * 100_000],
)
async def test_a_service_must_name_its_model(models: str):
    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(f"HTTP/1.1 200 OK\r\ncontent-length: {len(models)}\r\n\r\n{models}".encode())
        await writer.drain()

    async with scripted(script) as target:
        target.model = ""
        with pytest.raises(ConfigError, match="lists no model"):
            await target.prepare()


async def test_what_a_service_says_is_cleaned_and_cut():
    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(b"HTTP/1.1 503 No\r\ncontent-length: 1000\r\n\r\n" + b"\x1b]0;owned\x07" * 100)
        await writer.drain()

    async with scripted(script) as target:
        sample = await ask(target)
    assert sample.message.startswith("\ufffd]0;owned\ufffd")
    assert sample.message.isprintable()
    assert len(sample.message) == 300


async def test_a_service_without_models_is_not_waited_for():
    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(b"HTTP/1.1 503 No\r\ncontent-length: 4\r\n\r\nbusy")
        await writer.drain()

    async with scripted(script) as target:
        target.model = ""
        with pytest.raises(UnavailableError, match="answers 503: busy"):
            await target.prepare()


def test_paths_keep_what_the_url_has():
    assert HttpClient("http://h:1/base/", {})._path == "/base"
    assert Path(MODEL).is_dir()
