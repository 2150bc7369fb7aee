"""Bounds on the connections of one HTTP server: who gives way to whom, and who is told that there is no room."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator

import httpx
import pytest
from tests.integration.http.test_http_connections import Noted, connect, generate_much, noted, post
from tests.support.servers.http_front import Served

__all__ = ["noted"]  # the fixture


class Crowded:
    """A server with room for six connections, and clients that fill it."""

    def __init__(self, api: Served, noted: type[Noted], stack: contextlib.ExitStack) -> None:
        self.api, self.noted, self._stack = api, noted, stack
        generate_much(api)

    @property
    def num_connections(self) -> int:
        return len(self.noted.made[0].connections)

    def begin_stream(self) -> socket.socket:
        """Begin an answer that its client does not read."""
        at, client = len(self.noted.made), self._stack.enter_context(connect(self.api, buffer=4096))
        client.sendall(post({"prompt": "def", "stream": True, "max_tokens": 10**5}))
        self.api.wait_until(lambda: len(self.noted.made) > at and self.noted.made[at].flow.write_paused)
        return client

    def begin_idle(self) -> socket.socket:
        """Make a connection whose only answer was read."""
        at, client = len(self.noted.made), self._stack.enter_context(connect(self.api))
        client.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
        self.api.wait_until(lambda: len(self.noted.made) > at and self.noted.made[at].idle_since is not None)
        assert client.recv(4096).startswith(b"HTTP/1.1 200")
        return client

    def turned_away(self, reason: str) -> float:
        """Count connections that were."""
        name = "baton_http_turned_away_connections_total"
        return self.api.registry.get_sample_value(name, {"reason": reason}) or 0.0


@pytest.fixture
def crowded(noted: type[Noted]) -> Iterator[Crowded]:
    # The clients of streams do not read: on a busy machine the default time-out for that would end the first stream
    # before the last connection is there, and leave room for it.
    with Served(protocol=noted, max_connections=6, send_timeout_s=3600.0) as api, contextlib.ExitStack() as stack:
        yield Crowded(api, noted, stack)


def test_heads_that_do_not_come_keep_nobody_out(noted: type[Noted]) -> None:
    noted.silence_s = 0.0
    with Served(protocol=noted, max_connections=40) as api, contextlib.ExitStack() as stack:
        half = [stack.enter_context(connect(api)) for _ in range(100)]
        for client in half:
            with contextlib.suppress(ConnectionError):
                client.sendall(b"GET /health HTTP/1.1\r\nhost:")
        assert httpx.get(f"{api.url}/health", timeout=240).status_code == 200
        api.wait_until(lambda: len(noted.made[0].connections) <= 20)
        assert api.registry.get_sample_value(
            "baton_http_turned_away_connections_total", {"reason": "slow"}
        ) == 101 - 20  # fmt: skip


def test_nobody_gives_way_who_has_just_come(noted: type[Noted]) -> None:
    noted.silence_s = 3600.0
    with Served(protocol=noted, max_connections=12) as api, contextlib.ExitStack() as stack:
        for _ in range(12):
            stack.enter_context(connect(api))
        api.wait_until(lambda: len(noted.made) == 12)
        assert httpx.get(f"{api.url}/health", timeout=240).status_code == 503
        assert not any(each.transport.is_closing() for each in noted.made[:12])


def test_of_those_that_say_nothing_the_client_with_most_gives_way(noted: type[Noted]) -> None:
    noted.silence_s = 0.0
    with Served(protocol=noted, max_connections=12) as api, contextlib.ExitStack() as stack:

        def come(host: str) -> Noted:
            client, at = stack.enter_context(contextlib.closing(socket.socket())), len(noted.made)
            client.bind((host, 0))
            client.connect(api.socket.getsockname()[:2])
            api.wait_until(lambda: len(noted.made) > at)
            return noted.made[at]

        first, *others = come("127.0.0.2"), *(come("127.0.0.3") for _ in range(20))
        api.wait_until(lambda: len(first.connections) <= 6)
        assert [each.transport.is_closing() for each in (first, *others)] == [False] + [True] * 15 + [False] * 5


def test_idle_connections_give_way_and_where_there_are_none_the_client_is_told(crowded: Crowded) -> None:
    busy = [crowded.begin_stream() for _ in range(4)]
    longest, other = crowded.begin_idle(), crowded.begin_idle()
    crowded.begin_stream()
    assert not longest.recv(4096)
    assert not crowded.noted.made[5].transport.is_closing()
    crowded.begin_stream()
    assert not other.recv(4096)
    answer = httpx.get(f"{crowded.api.url}/health", timeout=240)
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
    assert answer.json()["error"]["code"] == "overloaded"
    assert (crowded.turned_away("idle"), crowded.turned_away("full")) == (2, 1)
    busy[0].close()
    crowded.api.wait_until(lambda: crowded.num_connections < 6)
    assert httpx.get(f"{crowded.api.url}/health", timeout=240).status_code == 200


def test_those_that_are_refused_are_few_and_take_no_room(crowded: Crowded, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("baton_router.frontend.http.protocol._REFUSED_S", 3600.0)
    busy = [crowded.begin_stream() for _ in range(6)]
    with contextlib.ExitStack() as stack:
        refused = [stack.enter_context(connect(crowded.api)) for _ in range(30)]
        for client in refused:
            assert client.recv(4096).startswith(b"HTTP/1.1 503")
        crowded.api.wait_until(lambda: crowded.num_connections == 6 + 8)
    crowded.api.wait_until(lambda: crowded.num_connections == 6)
    assert httpx.get(f"{crowded.api.url}/health", timeout=240).status_code == 503
    busy[0].close()
    crowded.api.wait_until(lambda: crowded.num_connections < 6)
    crowded.begin_stream()
    assert httpx.get(f"{crowded.api.url}/health", timeout=240).status_code == 503
