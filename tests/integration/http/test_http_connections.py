"""What goes on on one connection of the HTTP front: requests in line, clients that leave or do not read, odd heads."""

from __future__ import annotations

import contextlib
import json
import re
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tests.support.scripted import ANSWER, ModelInfo, encode
from tests.support.servers.http_front import Served, raw, rest

from baton_router.accounts import Accounts
from baton_router.dispatch.event_loop import PREPARE, RESPOND, START, TurnBatcher
from baton_router.frontend.http.protocol import MAX_PIPELINED, HttpProtocol
from baton_router.processor.input_processor import InputProcessor

LONG = ANSWER * 1000


class Noted(HttpProtocol):
    """Remembers its connections."""

    made: list[Noted]

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self.made.append(self)


class Pipelined(Noted):
    """Notes how many requests were parsed, how many waited at once, and the turns of the loop that parsed them."""

    num_parsed = 0
    most_waiting = 0
    num_turns = 0
    stopped = False

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self.turns: Counter[int] = Counter()
        self._count_turn()

    def _count_turn(self) -> None:
        self.num_turns += 1
        if not self.transport.is_closing():
            self.loop.call_soon(self._count_turn)

    def on_message_complete(self) -> None:
        self.num_parsed += 1
        self.turns[self.num_turns] += 1
        super().on_message_complete()
        self.most_waiting = max(self.most_waiting, len(self.pipeline))

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self.stopped |= self.flow.stopped


@pytest.fixture
def noted() -> type[Noted]:
    return type("Fresh", (Noted,), {"made": []})


@pytest.fixture
def api(noted: type[Noted]) -> Iterator[Served]:
    with Served(protocol=noted, max_body_bytes=200_000) as served:
        yield served


def post(body: dict[str, Any], *headers: bytes) -> bytes:
    data = json.dumps({"temperature": 0, **body}).encode()
    lines = (
        b"POST /v1/completions HTTP/1.1",
        b"host: x",
        b"content-type: application/json",
        *headers,
        b"content-length: %d" % len(data),
    )
    return b"\r\n".join(lines) + b"\r\n\r\n" + data


def chunked(body: bytes, trailer: bytes, path: bytes = b"/v1/completions") -> bytes:
    head = b"content-type: application/json\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
    return b"POST " + path + b" HTTP/1.1\r\n" + head + b"%x\r\n%b\r\n0\r\n" % (len(body), body) + trailer


def connect(api: Served, *, buffer: int = 0) -> contextlib.closing[socket.socket]:
    client = socket.socket()
    if buffer:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
    client.settimeout(240)
    client.connect(api.socket.getsockname()[:2])
    return contextlib.closing(client)


def generate_much(api: Served) -> None:
    """Let an answer be longer than what a connection takes that nobody reads."""
    api.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # connections inherit it
    api.dispatcher.info = ModelInfo("baton-tiny", api.dispatcher.info.path, 10**6, 4096, frozenset())
    api.dispatcher.script = lambda request, index: encode(LONG)
    api.dispatcher.per_chunk = 500


@contextlib.contextmanager
def paused_with_another_in_line(api: Served, noted: type[Noted]) -> Iterator[socket.socket]:
    """A connection whose client has not read what a stream brought, and has sent another request."""
    generate_much(api)
    with connect(api, buffer=4096) as client:
        client.sendall(post({"prompt": "def", "stream": True, "max_tokens": 10**5}))
        api.wait_until(lambda: bool(noted.made) and noted.made[0].flow.write_paused)
        client.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        api.wait_until(lambda: bool(noted.made[0].pipeline))
        yield client


def test_a_client_that_leaves_with_a_request_in_line_cancels_what_runs(api: Served, noted: type[Noted]) -> None:
    with paused_with_another_in_line(api, noted):
        assert api.dispatcher.open_streams == 1
    api.wait_until(lambda: api.dispatcher.open_streams == 0)
    assert api.dispatcher.closed_early == 1


def test_a_stream_goes_on_when_its_client_reads_again_with_a_request_in_line(api: Served, noted: type[Noted]) -> None:
    with paused_with_another_in_line(api, noted) as client:
        received = bytearray()
        while piece := client.recv(65536):
            received += piece
    stream, _, health = bytes(received).partition(b"data: [DONE]\n\n")
    texts = [json.loads(line[6:])["choices"][0]["text"] for line in stream.split(b"\n") if line.startswith(b"data: ")]
    assert "".join(texts) == LONG
    assert b"HTTP/1.1 200 OK" in health


def test_many_requests_in_line_are_answered_in_their_order(api: Served) -> None:
    api.completion()  # loads the tokenizer
    bad, good, health = (
        post({"prompt": 5}),
        post({"prompt": "def", "max_tokens": 1}),
        b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n",
    )
    last = b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
    answer = raw(api, good + bad * 300 + good + health + bad + good + last)
    statuses = [int(status) for status in re.findall(rb"HTTP/1.1 (\d+)", answer)]
    assert statuses == [200, *[400] * 300, 200, 200, 400, 200, 200]
    assert len(api.dispatcher.requests) == 4


GET = b" HTTP/1.1\r\nhost: x\r\n\r\n"
MIXED = (b"GET /health" + GET, post({"prompt": 5}), b"GET /nothing" + GET)
"""Requests with ASGI and without, of which each gets another status."""


@pytest.mark.parametrize("requests", [MIXED, MIXED[:1], MIXED[1:2]], ids=["mixed", "asgi", "plain"])
def test_who_reads_no_answers_gets_few_requests_served(requests: tuple[bytes, ...]) -> None:
    kind = type("Fresh", (Pipelined,), {"made": []})
    sent = 6000
    with Served(protocol=kind) as api:
        api.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        with connect(api, buffer=4096) as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
            data = b"".join(requests) * (sent // len(requests))
            sender = threading.Thread(target=client.sendall, args=(data + b"GET /health HTTP/1.0\r\n\r\n",))
            sender.start()
            api.wait_until(lambda: bool(kind.made) and kind.made[0].flow.write_paused and kind.made[0].flow.stopped)
            connection = kind.made[0]
            assert connection.num_parsed < sent / 2
            received = rest(client)
            sender.join()
    statuses = [int(status) for status in re.findall(rb"HTTP/1.1 (\d+)", received)]
    expected = [{MIXED[0]: 200, MIXED[1]: 400, MIXED[2]: 404}[request] for request in requests]
    assert statuses == [*expected * (sent // len(requests)), 200]
    assert connection.most_waiting <= MAX_PIPELINED + 2
    assert connection.num_parsed == sent + 1


def test_requests_of_one_read_are_served_in_turns_of_the_loop() -> None:
    kind = type("Fresh", (Pipelined,), {"made": []})
    with Served(protocol=kind) as api:
        raw(api, b"".join(MIXED) * 100 + b"GET /health HTTP/1.0\r\n\r\n")
        (connection,) = kind.made
        assert connection.num_parsed == 301
        assert max(connection.turns.values()) <= 2  # a short body ends in one piece with the next head
        assert connection.stopped


def test_a_request_that_comes_alone_waits_for_no_turn() -> None:
    kind = type("Fresh", (Pipelined,), {"made": []})
    blank = json.dumps({"prompt": 5}, indent=2).replace("\n", "\r\n\r\n").encode()
    with Served(protocol=kind) as api, connect(api) as client:
        for request in (*MIXED, chunked(blank, b"\r\n"), chunked(blank, b"x: y\r\n\r\n")):
            client.sendall(request)
            assert client.recv(65536).startswith(b"HTTP/1.1 ")
        assert not kind.made[0].stopped


def test_who_has_not_taken_the_answer_before_gets_no_other_and_is_cut_off() -> None:
    with Served(send_timeout_s=2.0) as api:
        generate_much(api)
        body = {"prompt": "def", "max_tokens": 10**5}
        with connect(api, buffer=4096) as client:
            client.sendall(post(body))
            api.wait_until(lambda: len(api.dispatcher.requests) == 1 and api.dispatcher.open_streams == 0)
            client.sendall(post({**body, "stream": True}))
            api.wait_until(lambda: not api.server.server_state.connections)
        assert len(api.dispatcher.requests) == 1


@pytest.mark.parametrize("stream", [True, False])
def test_the_socket_of_a_client_that_reads_nothing_does_not_stay(stream: bool) -> None:
    with Served(**{"stream_timeout_s" if stream else "send_timeout_s": 0.3}) as api:
        generate_much(api)
        with connect(api, buffer=4096) as client:
            client.sendall(post({"prompt": "def", "stream": stream, "max_tokens": 10**5}))
            api.wait_until(lambda: len(api.dispatcher.requests) == 1)
            api.wait_until(lambda: not api.server.server_state.connections)
            api.wait_until(lambda: api.dispatcher.open_streams == 0)


def test_a_client_that_reads_an_answer_slowly_gets_all_of_it(noted: type[Noted]) -> None:
    with Served(send_timeout_s=1.5, protocol=noted) as api:
        generate_much(api)
        with connect(api, buffer=4096) as client:
            client.sendall(post({"prompt": "def", "max_tokens": 10**5}, b"connection: close"))
            received = bytearray()
            for _ in range(2):  # each time it has taken something when its time would have been over
                api.wait_until(lambda: bool(noted.made) and noted.made[0].flow.write_paused)
                waiting = noted.made[0]._send_timer
                received += client.recv(65536)
                api.wait_until(lambda waiting=waiting: noted.made[0]._send_timer is not waiting)
            while piece := client.recv(65536):
                received += piece
        assert json.loads(received.partition(b"\r\n\r\n")[2])["choices"][0]["text"] == LONG


def test_no_connection_is_idle_behind_an_answer_that_came_at_once(api: Served, noted: type[Noted]) -> None:
    api.dispatcher.hang_after = 0
    with connect(api) as client:
        client.sendall(post({"prompt": 5}) + post({"prompt": "def"}))
        assert client.recv(100).startswith(b"HTTP/1.1 400")
        api.wait_until(lambda: api.dispatcher.open_streams == 1)
        assert noted.made[0]._idle_since is None


def test_a_connection_is_idle_from_its_latest_answer_on(api: Served, noted: type[Noted]) -> None:
    with connect(api) as client:
        client.sendall(post({"prompt": "def"}))
        api.wait_until(lambda: bool(noted.made) and noted.made[0]._idle_since is not None)
        connection = noted.made[0]
        timer = connection.timeout_keep_alive_task
        connection.loop.call_soon_threadsafe(connection.timeout_keep_alive_handler)  # of an answer long before
        api.wait_until(lambda: connection.timeout_keep_alive_task not in (None, timer))
        assert not connection.transport.is_closing()
        connection.timeout_keep_alive = 0
        connection.loop.call_soon_threadsafe(connection.timeout_keep_alive_handler)
        while client.recv(65536):
            pass
        api.wait_until(lambda: not api.server.server_state.connections)


def test_no_request_is_cut_off_because_the_one_before_is_long_ago(api: Served, noted: type[Noted]) -> None:
    with connect(api) as client:
        client.sendall(post({"prompt": "def"}))
        api.wait_until(lambda: bool(noted.made) and noted.made[0]._idle_since is not None)
        connection = noted.made[0]
        api.dispatcher.hang_after = 0
        client.sendall(post({"prompt": "def"}))
        api.wait_until(lambda: api.dispatcher.open_streams == 1)
        connection.timeout_keep_alive = 0
        connection.loop.call_soon_threadsafe(connection.timeout_keep_alive_handler)
        api.wait_until(lambda: connection.timeout_keep_alive_task is None)
        assert not connection.transport.is_closing()


def test_headers_behind_a_body_are_none() -> None:
    """A proxy that takes care of a header sees the head alone."""
    body = b'{"prompt": "def", "temperature": 0}'
    with Served(accounts=Accounts.of_keys("key")) as api, connect(api) as client:
        client.sendall(chunked(body, b"authorization: Bearer key\r\n\r\n"))
        assert client.recv(100).startswith(b"HTTP/1.1 401")
        assert not api.dispatcher.requests
        with connect(api) as other:
            other.sendall(
                chunked(b'{"prompt": "def"}', b"authorization: Bearer key\r\nx: y\r\n\r\n", path=b"/tokenize")
            )
            assert other.recv(100).startswith(b"HTTP/1.1 401")


def test_headers_behind_a_body_are_bounded_in_size(api: Served) -> None:
    body = b'{"prompt": "def", "temperature": 0}'
    with contextlib.suppress(ConnectionError):  # the server may close while we still send
        answer = raw(api, chunked(body, b"x: " + b"a" * 3_000_000))
        assert answer.startswith(b"HTTP/1.1 431 ")
    assert not api.dispatcher.requests


@pytest.mark.parametrize("target", [b"/", b"http://a:1/", b"/v1/completions"])
def test_nobody_is_connected(api: Served, target: bytes) -> None:
    assert raw(api, b"CONNECT " + target + b" HTTP/1.1\r\n\r\n").startswith(b"HTTP/1.1 400 ")
    assert api.http.get("/health").status_code == 200


# --- between two steps of a request (see baton_router.dispatch.event_loop) ---


class Meddling(TurnBatcher):
    """Steps where something happens to one request, the first that comes once ``armed``, just before one of its own."""

    def __init__(self, before: int, meddle: Callable[[Any], None]) -> None:
        super().__init__()
        self._before, self._meddle, self.armed = before, meddle, False

    def schedule(self, step: int, action: Callable[[Any], None], argument: Any) -> None:
        if self.armed and step == self._before:
            self.armed = False
            super().schedule(step, self._meddle, argument)
        super().schedule(step, action, argument)


def leave(serving: Any) -> None:
    """Do what the connection does when its client has gone."""
    serving._exchange.on_connection_lost()
    serving._exchange._connection.transport.abort()


@pytest.mark.parametrize("before", [PREPARE, START, RESPOND])
def test_nothing_goes_on_for_a_client_that_left_between_two_steps(
    before: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    prepared: list[str] = []
    monkeypatch.setattr(InputProcessor, "prepare_now", noting(InputProcessor.prepare_now, prepared))
    steps = Meddling(before, leave)
    with Served(steps=steps) as api:
        api.completion()  # loads the tokenizer
        prepared.clear()
        api.reset()
        steps.armed = True
        with connect(api) as client:
            client.sendall(post({"prompt": "def"}))
            assert client.recv(1) == b""
        assert len(prepared) == (before != PREPARE)
        assert len(api.dispatcher.requests) == (before == RESPOND)
        assert api.dispatcher.open_streams == 0
        assert api.completion().choices[0].text == ANSWER
        assert api.server.server_state.total_requests == 2, "the one that was lost is none that was answered"
    assert not caplog.records


def noting(function: Callable[..., Any], notes: list[str]) -> Callable[..., Any]:
    """Return a function that notes its calls."""

    def noted(*args: Any, **kwargs: Any) -> Any:
        notes.append(function.__name__)
        return function(*args, **kwargs)

    return noted


@pytest.mark.parametrize("before", [PREPARE, START, RESPOND])
def test_a_request_whose_time_ends_between_two_steps_gets_one_answer(
    before: int, caplog: pytest.LogCaptureFixture
) -> None:
    steps = Meddling(before, lambda serving: serving.expire())
    with Served(steps=steps) as api, connect(api) as client:
        api.completion()  # loads the tokenizer
        steps.armed = True
        client.sendall(post({"prompt": "def"}))
        api.wait_until(lambda: api.server.server_state.total_requests == 2)
        client.sendall(post({"prompt": "def"}, b"connection: close"))
        received = bytearray()
        while piece := client.recv(65536):
            received += piece
        assert re.findall(rb"HTTP/1.1 (\d+)", bytes(received)) == [b"504", b"200"]
        assert api.dispatcher.open_streams == 0
    assert not caplog.records


class Impatient(HttpProtocol):
    """Drops what follows an answer for a moment only."""

    drain_s = 0.5


def drip(client: socket.socket, piece: bytes, seconds: float = 240.0) -> bytes:
    """Send a piece now and then until the server closes; return what came."""
    received, end = bytearray(), time.monotonic() + seconds
    client.settimeout(0.1)
    while time.monotonic() < end:
        try:
            client.sendall(piece)
            more = client.recv(65536)
        except TimeoutError:
            continue
        except OSError:
            with contextlib.suppress(OSError):  # what came before the connection was reset
                while more := client.recv(65536):
                    received += more
            return bytes(received)
        received += more
        if not more:  # it may be closed for one direction only
            time.sleep(0.1)
    raise AssertionError(f"the connection is still there, after {bytes(received)!r}")


@pytest.mark.parametrize(
    ("line", "status"),
    [
        (b"POST /v1/completions", b"408"),
        (b"POST /v1/completions?x", b"408"),
        (b"GET /health", b"200"),
        (b"POST /nowhere", b"404"),
        (b"GET /v1/models", b"200"),
    ],
)
@pytest.mark.parametrize("length", [b"content-length: 100000", b"transfer-encoding: chunked"])
def test_a_dripped_body_does_not_keep_its_connection_behind_the_answer(
    line: bytes, status: bytes, length: bytes
) -> None:
    with Served(protocol=Impatient, body_timeout_s=0.3) as api, connect(api) as client:
        client.sendall(line + b" HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n" + length + b"\r\n\r\n")
        received = drip(client, b"1\r\n \r\n" if length.startswith(b"transfer") else b" ")
        assert re.findall(rb"HTTP/1.1 (\d+)", received) == [status]
        api.wait_until(lambda: not api.server.server_state.connections)


def test_more_than_some_bodies_behind_an_answer_end_the_connection() -> None:
    with Served(max_body_bytes=100_000) as api, connect(api) as client:
        client.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n")
        assert client.recv(65536).startswith(b"HTTP/1.1 200")
        with pytest.raises(ConnectionError):
            client.sendall((b"2710\r\n" + bytes(10_000) + b"\r\n") * 1000)


def test_line_breaks_between_requests_do_not_keep_a_connection(api: Served, noted: type[Noted]) -> None:
    with connect(api) as client:
        api.wait_until(lambda: bool(noted.made))
        noted.made[0].timeout_keep_alive = 1
        client.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
        assert drip(client, b"\r\n").startswith(b"HTTP/1.1 200")


def test_what_follows_an_answer_is_dropped_and_the_connection_stays(api: Served) -> None:
    """Of a request that is answered by its head alone."""
    with connect(api) as client:
        for _ in range(3):
            client.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\ncontent-length: 100000\r\n\r\n" + bytes(50_000))
            assert client.recv(65536).startswith(b"HTTP/1.1 200")
            client.sendall(bytes(50_000))
        client.sendall(b"GET /version HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        received = bytearray()
        while piece := client.recv(65536):
            received += piece
        assert received.startswith(b"HTTP/1.1 200")


class Unhurried(HttpProtocol):
    """Waits for what follows an answer for longer than any client of these tests."""

    drain_s = 3600.0


@pytest.mark.parametrize("length", [b"content-length: 250000", b"transfer-encoding: chunked"])
def test_a_body_that_is_too_long_is_refused_at_once(length: bytes) -> None:
    with Served(protocol=Unhurried, max_body_bytes=200_000, body_timeout_s=3600.0) as api, connect(api) as client:
        client.sendall(
            b"POST /v1/completions HTTP/1.1\r\ncontent-type: application/json\r\nhost: x\r\n" + length + b"\r\n\r\n"
        )
        client.sendall(b"%x\r\n" % 250_000 + bytes(200_001) if length.startswith(b"transfer") else b"{")
        received = bytearray()
        while piece := client.recv(65536):
            received += piece
    assert received.startswith(b"HTTP/1.1 413")
    assert json.loads(received.partition(b"\r\n\r\n")[2])["error"]["code"] == "payload_too_large"
