"""Requests byte by byte: clients that leave, wait, come late, or speak something else."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
from typing import Any

import pytest
from tests.support.readable import readable
from tests.support.scripted import ANSWER, MODEL, encode
from tests.support.servers.http_front import BODY, Served, begun, raw, read_answers, rest

from baton_router.frontend.http.protocol import HttpProtocol
from baton_router.processor.input_processor import InputProcessor


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("hang_after", [0, 3])
@pytest.mark.parametrize("prompts", [1, 3])
def test_a_client_that_leaves_cancels_at_once(api: Served, stream: bool, hang_after: int, prompts: int) -> None:
    api.dispatcher.hang_after = hang_after
    body = json.dumps({"prompt": ["x"] * prompts, "stream": stream, "temperature": 0}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}"
    with contextlib.closing(socket.create_connection(api.socket.getsockname()[:2])) as client:
        client.sendall(head.encode() + b"\r\n\r\n" + body)
        api.wait_until(lambda: api.dispatcher.open_streams == prompts)
        if stream and hang_after:
            assert client.recv(100).startswith(b"HTTP/1.1 200")
    api.wait_until(lambda: api.dispatcher.open_streams == 0)  # they would hang for ever
    assert api.dispatcher.closed_early == prompts
    api.wait_until(lambda: 'baton_http_in_flight{endpoint="/v1/completions"} 0.0' in api.http.get("/metrics").text)


def test_closing_the_sdks_stream_cancels(api: Served) -> None:
    api.dispatcher.hang_after = 3
    stream = api.chat(stream=True)
    next(iter(stream))
    stream.close()
    api.wait_until(lambda: api.dispatcher.open_streams == 0)  # they would hang for ever
    api.reset()
    assert api.chat().choices[0].message.content == ANSWER


def test_time_limits() -> None:
    with Served(request_timeout_s=1.0) as api:
        # Once it has loaded its tokenizer, which may take longer than that.
        api.wait_until(lambda: api.post("/v1/completions", {"prompt": "x"}).status_code == 200)
        api.dispatcher.hang_after = 0
        assert api.post("/v1/completions", {"prompt": "x"}).status_code == 504
        api.dispatcher.hang_after = 2
        text = api.post("/v1/completions", {"prompt": "x", "stream": True}).text
        assert json.loads(text.split("\n\n")[-2].removeprefix("data: "))["error"]["code"] == "deadline_exceeded"
        api.wait_until(lambda: api.dispatcher.open_streams == 0)
    with Served(body_timeout_s=1.0) as api:
        with contextlib.closing(socket.create_connection(api.socket.getsockname()[:2])) as client:
            client.sendall(
                b"POST /v1/completions HTTP/1.1\r\ncontent-type: application/json\r\n"
                b"host: x\r\ncontent-length: 10\r\n\r\n{"
            )
            assert client.recv(100).startswith(b"HTTP/1.1 408")
        assert not api.dispatcher.requests


def test_a_client_that_does_not_read_is_cut_off() -> None:
    with Served(send_timeout_s=0.3, max_body_bytes=10**6) as api:
        api.dispatcher.info = type(api.dispatcher.info)(
            "baton-tiny", api.dispatcher.info.path, 10**6, 4096, frozenset()
        )
        api.dispatcher.script = lambda request, index: encode(ANSWER) * 4000
        api.dispatcher.per_chunk = 5000
        api.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # connections inherit it
        body = json.dumps({"prompt": "x", "stream": True, "temperature": 0, "max_tokens": 200_000, "n": 8}).encode()
        head = (
            f"POST /v1/completions HTTP/1.1\r\ncontent-type: application/json\r\n"
            f"host: x\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        with contextlib.closing(socket.socket()) as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.connect(api.socket.getsockname()[:2])
            client.sendall(head.encode() + body)
            api.wait_until(lambda: api.dispatcher.closed_early == 1 and api.dispatcher.open_streams == 0)


def test_a_client_that_leaves_ends_what_its_text_waits_for(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, ended = threading.Event(), threading.Event()

    async def never(self: InputProcessor, *args: Any, **options: Any) -> Any:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    monkeypatch.setattr(InputProcessor, "tokenize", never)
    with Served() as api:
        with socket.create_connection(api.socket.getsockname()) as client:
            client.sendall(
                b"POST /tokenize HTTP/1.1\r\ncontent-type: application/json\r\n"
                b'host: x\r\ncontent-length: 14\r\n\r\n{"prompt":"x"}'
            )
            assert begun.wait(240)
        assert ended.wait(240)
        monkeypatch.undo()
        assert api.post("/tokenize", {"prompt": "x"}).status_code == 200


def test_a_request_head_is_bounded_in_size(api: Served) -> None:
    assert b" 200 " in raw(
        api, b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\nx: " + b"a" * 10_000 + b"\r\n\r\n"
    )
    with contextlib.suppress(ConnectionError):  # the server may close while we still send
        answer = raw(api, b"GET /health HTTP/1.1\r\nhost: x\r\nx: " + b"a" * 3_000_000)
        assert answer.startswith(b"HTTP/1.1 431 ")
    assert api.http.get("/health").status_code == 200


@pytest.mark.parametrize("step", [1, 7, 10_000])
def test_an_offer_of_another_protocol_is_ignored(api: Served, step: int) -> None:
    """Java's client offers HTTP/2 with every request over plain HTTP; its body must not be lost for it."""
    body = b'{"prompt": "def", "temperature": 0}'
    post = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    offer = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAEAAEAAAAIAAAABAAMAAABk\r\n"
    chunked = b"transfer-encoding: chunked\r\n\r\n%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)
    data = (
        post + offer + b"content-length: %d\r\n\r\n" % len(body) + body
        + post + offer + chunked
        + b"GET /health HTTP/1.1\r\nhost: x\r\nConnection: upgrade\r\nUpgrade: websocket\r\n\r\n"
        + b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: Upgrade, close\r\nupgrade: h2c\r\n\r\n"
    )  # fmt: skip
    received = bytearray()
    with socket.create_connection(api.socket.getsockname()[:2], timeout=240) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for at in range(0, len(data), step):
            connection.sendall(data[at : at + step])
        while piece := connection.recv(65536):
            received += piece
    answers = read_answers(bytes(received))
    assert [status for status, _ in answers] == [200] * 4
    for _, answer in answers[:2]:
        assert json.loads(answer)["choices"][0]["finish_reason"]
    assert [[*request.prompt_token_ids] for request in api.dispatcher.requests] == [MODEL.tokenizer.encode("def")] * 2


def test_what_is_no_http_gets_a_400(api: Served) -> None:
    for data in (
        b"\x16\x03\x01\x02\x00\x01",
        b"CONNECT other:443 HTTP/1.1\r\n\r\n",
    ):
        assert raw(api, data).startswith(b"HTTP/1.1 400 ")


def test_a_request_head_must_come_in_time() -> None:
    class Hasty(HttpProtocol):
        head_timeout_s = 0.5

    with Served(protocol=Hasty) as api:
        assert raw(api, b"") == b""
        assert raw(api, b"GET /health HT") == b""
        second = raw(api, b"GET /health HTTP/1.1\r\nhost: x\r\n\r\nGET /heal")
        assert second.startswith(b"HTTP/1.1 200 ")
        assert second.count(b"HTTP/1.1") == 1
        # A body may take longer than that.
        body = b'{"prompt": "def", "max_tokens": 1}'
        with socket.create_connection(("127.0.0.1", api.socket.getsockname()[1]), timeout=240) as connection:
            kind = b"content-type: application/json\r\n"
            head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n%bcontent-length: %d\r\n\r\n" % (kind, len(body))
            connection.sendall(head + body[:5])
            assert not readable(connection.fileno(), timeout_s=1.0)
            connection.sendall(body[5:])
            assert connection.recv(100).startswith(b"HTTP/1.1 200 ")


def test_a_body_may_come_late_and_in_pieces(api: Served) -> None:
    with begun(api, b"connection: close\r\ncontent-length: %d\r\n\r\n" % len(BODY) + BODY[:5]) as client:
        assert not readable(client.fileno(), timeout_s=0.3)
        for at in range(5, len(BODY)):
            client.sendall(BODY[at : at + 1])
        answer = rest(client)
    assert answer.startswith(b"HTTP/1.1 200")
    assert json.loads(answer.split(b"\r\n\r\n", 1)[1])["choices"][0]["text"] == ANSWER


def test_a_client_that_waits_for_100_continue_gets_it(api: Served) -> None:
    head = b"expect: 100-continue\r\nconnection: close\r\ncontent-length: %d\r\n"
    with begun(api, head % len(BODY) + b"\r\n") as client:
        assert client.recv(100) == b"HTTP/1.1 100 Continue\r\n\r\n"
        client.sendall(BODY)
        assert rest(client).startswith(b"HTTP/1.1 200")
    with begun(api, head % 250_000 + b"\r\n") as client:  # it need not be sent to be refused
        assert rest(client).startswith(b"HTTP/1.1 413")
    with begun(api, head % 3 + b"content-type: text/plain\r\n\r\n") as client:
        assert rest(client).startswith(b"HTTP/1.1 415")


def test_a_client_that_leaves_amid_its_body_is_counted_as_gone(api: Served) -> None:
    def seen(name: str, labels: dict[str, str]) -> float:
        return api.registry.get_sample_value(name, {"endpoint": "/v1/completions", **labels}) or 0.0

    before = seen("baton_http_requests_total", {"status": "499"})
    with begun(api, b"content-length: 100\r\n\r\n{"):
        api.wait_until(lambda: seen("baton_http_in_flight", {}) == 1)
    api.wait_until(lambda: seen("baton_http_requests_total", {"status": "499"}) == before + 1)
    api.wait_until(lambda: seen("baton_http_in_flight", {}) == 0)


@pytest.mark.parametrize("stream", [False, True])
def test_an_old_client_gets_an_answer_that_ends_with_the_connection(api: Served, stream: bool) -> None:
    body = json.dumps({"prompt": "def", "temperature": 0, "max_tokens": 100, "stream": stream}).encode()
    head, _, answer = raw(
        api,
        b"POST /v1/completions HTTP/1.0\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body)
        + body,
    ).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200")
    assert b"chunked" not in head
    if stream:
        assert answer.endswith(b"data: [DONE]\n\n")
        events = [json.loads(line[6:]) for line in answer.split(b"\n\n")[:-2]]
        assert "".join(event["choices"][0]["text"] for event in events) == ANSWER
    else:
        assert json.loads(answer)["choices"][0]["text"] == ANSWER
