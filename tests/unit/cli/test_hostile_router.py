"""``baton status`` and ``baton explain`` against what is no router: one line, no control characters, and an end."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from baton.cli.main import main

EVIL = "\x1b]0;owned\x07\x1b[2J\x9b31m\x7f\r\u202e\ud800"
LONG = EVIL + "x" * 1_000_000 + "\n" * 1000
TIMES = {"p50": 1.0, "p99": 2.0}
NOW = {"hit_rate": 0.5, "requests_per_s": 1.0, "tokens_per_s": 1.0, "failed": 0, "ttft_ms": TIMES, "itl_ms": None}
INSTANCE = {
    "id": EVIL, "role": EVIL, "status": EVIL, "draining": False, "silent": False, "lost_s": None, "reason": EVIL,
    "in_flight": 1, "running": 1, "waiting": 1, "loading": 1, "blocks_total": 1, "blocks_active": 1,
    "blocks_cached": 1, "index": {"state": EVIL},
}  # fmt: skip
STATE: dict[str, Any] = {
    "model": EVIL, "policy": EVIL, "running": 1, "queued": 1, "seen": 1, "now": NOW,
    "instances": [INSTANCE, {**INSTANCE, "status": "lost", "lost_s": 7.0}], EVIL: EVIL,
}  # fmt: skip
DECISION = {
    "id": EVIL, "time": 1.0, "outcome": EVIL, "prefill": EVIL, "decode": EVIL, "path": EVIL, "reason": EVIL,
    "kv_bytes": 1, "match_rate": 0.5, "ttft_ms": 1.0, "duration_ms": 1.0, "prompt_tokens": 1, "generated_tokens": 1,
}  # fmt: skip
CANDIDATE = {
    "instance": EVIL, "role": "decode", "match_rate": 0.5, "load": 1.0, "score": 1.0, "terms": {EVIL: 1.0},
    "partner": EVIL, "partner_terms": {EVIL: 1.0}, "winner": True,
}  # fmt: skip
EXPLANATION: dict[str, Any] = {
    **DECISION, "time_iso": EVIL, "why": [EVIL], "others": [EVIL],
    "trace": {"pipe": EVIL, "kv_bytes": 1, "failed_prefills": [EVIL]},
    "placements": [{"at_ms": 1.0, "index_state": EVIL, "candidates": [CANDIDATE]}],
}  # fmt: skip
DEEP = b"[" * 200_000 + b"]" * 200_000

Answer = Callable[["Peer"], None]


class Server(http.server.ThreadingHTTPServer):
    """A server whose connections' threads end, and are joined."""

    daemon_threads = False
    answer: Answer

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Peer)
        self.gone = threading.Event()


class Peer(http.server.BaseHTTPRequestHandler):
    """Answers as the server's ``answer`` does."""

    server: Server
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        try:
            self.server.answer(self)
        except OSError:  # the client has gone
            self.close_connection = True

    def log_message(self, format: str, *args: object) -> None:
        pass

    def send(self, body: bytes, status: int = 200) -> None:
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def body(value: Any, status: int = 200) -> Answer:
    content = value if isinstance(value, bytes) else json.dumps(value).encode()
    return lambda peer: peer.send(content, status)


@pytest.fixture
def serve() -> Iterator[Callable[[Answer], list[str]]]:
    server = Server()
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()

    def start(answer: Answer) -> list[str]:
        server.answer = answer
        return ["--url", f"http://127.0.0.1:{server.server_port}"]

    try:
        yield start
    finally:
        server.gone.set()
        server.shutdown()
        thread.join()
        server.server_close()  # joins the threads of connections


def run(words: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    status = main(words)
    out, err = capsys.readouterr()
    assert [x for x in out + err if not x.isprintable() and x != "\n"] == []
    return status, out, err


@pytest.mark.parametrize("words", [["status"], ["explain"], ["explain", "x"]])
@pytest.mark.parametrize("flags", [[], ["--json"]])
def test_no_text_reaches_the_terminal_as_it_is(words, flags, serve, capsys):
    answer = {"status": STATE, "explain": {"decisions": [DECISION]}, "x": EXPLANATION}[words[-1]]
    status, out, err = run([*words, *flags, *serve(body(answer))], capsys)
    assert (status, err) == (int(words == ["status"]), ""), "status: an instance is not ready"
    if flags:
        assert json.loads(out) == answer
    else:
        assert "owned" in out


@pytest.mark.parametrize("words", [["status", "--json"], ["explain", "x"]])
@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (b"null", "Expected `object`, got `null`"),
        (b"[1, 2, 3]", "Expected `object`, got `array`"),
        (b"{}", "Object missing required field"),
        (b'{"now": 5, "instances": {"a": 1}, "decisions": 7}', "gives no router's answer"),
        (b"<html>", "Expecting value"),
        (b"9" * 10_000, "Exceeds the limit"),
        (b"\xff\xff", "decode"),
        (DEEP, "nested too deeply"),
        (b'{"x": %s}' % (b"[" * 100 + b"]" * 100), "nested too deeply"),
    ],
    ids=["null", "list", "empty", "types", "html", "number", "bytes", "deep", "rather deep"],
)
def test_another_answer_is_one_line(words, answer, told, serve, capsys):
    status, out, err = run([*words, *serve(body(answer))], capsys)
    assert (status, out) == (1, "")
    assert told in err
    assert "is it a router?" in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    "state",
    [
        {**STATE, "instances": [None]},
        {**STATE, "instances": [{**INSTANCE, "running": EVIL}]},
        {**STATE, "instances": [{**INSTANCE, "running": -1}]},
        {**STATE, "instances": [{**INSTANCE, "blocks_active": 10**400}]},
        {**STATE, "instances": [{**INSTANCE, "index": 5}]},
        {**STATE, "now": {**NOW, "ttft_ms": {"p50": 1.0}}},
        {**STATE, "now": {**NOW, "ttft_ms": {"p50": 1.0, "p99": 10**400}}},
        {**STATE, "seen": True},
    ],
)
def test_wrong_types_in_a_state_are_one_line(state, serve, capsys):
    status, out, err = run(["status", *serve(body(state))], capsys)
    assert (status, out) == (1, "")
    assert "at `$." in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    "answer",
    [body({"error": {"message": LONG}}, 500), body({"error": {"message": LONG}}, 404), body(DEEP, 500),
     body({"error": LONG}, 500), lambda peer: peer.wfile.write(b"\x1b]0;owned\x07" + 50_000 * b"x" + b"\r\n\r\n")],
    ids=["500", "404", "deep", "no message", "no HTTP"],
)  # fmt: skip
def test_errors_are_short_lines(answer, serve, capsys):
    status, out, err = run(["status", *serve(answer)], capsys)
    assert (status, out) == (1, "")
    assert err.count("\n") == 1
    assert len(err) < 600


def drip(peer: Peer) -> None:
    peer.send_response(200)
    peer.send_header("content-length", "1000000")
    peer.end_headers()
    while not peer.server.gone.wait(0.02):
        peer.wfile.write(b"[")


def drip_head(peer: Peer) -> None:
    peer.wfile.write(b"HTTP/1.1 200 OK\r\nx: ")
    while not peer.server.gone.wait(0.02):
        peer.wfile.write(b"x")


def tiny_chunks(peer: Peer) -> None:
    peer.send_response(200)
    peer.send_header("transfer-encoding", "chunked")
    peer.end_headers()
    while True:
        peer.wfile.write(b"1\r\n[\r\n" * 1000)


def interim(peer: Peer) -> None:
    while True:
        peer.wfile.write(b"HTTP/1.1 102 Processing\r\n\r\n" * 100)


def silent(peer: Peer) -> None:
    peer.server.gone.wait()


@pytest.mark.parametrize("answer", [drip, drip_head, tiny_chunks, interim, silent])
def test_the_time_limit_is_of_the_whole_answer(answer, serve, capsys):
    status, out, err = run(["status", "--timeout-s", "0.3", *serve(answer)], capsys)
    assert (status, out) == (1, "")
    assert "no whole answer of a router from http://127.0.0.1:" in err
    assert "within 0.3 s" in err
    assert err.count("\n") == 1


def test_an_endless_answer_is_not_read_to_its_end(serve, capsys):
    def endless(peer: Peer) -> None:
        peer.send_response(200)
        peer.send_header("connection", "close")
        peer.end_headers()
        while True:
            peer.wfile.write(b"[" * 1_000_000)

    status, _, err = run(["status", *serve(endless)], capsys)
    assert status == 1
    assert "is it a router?" in err
