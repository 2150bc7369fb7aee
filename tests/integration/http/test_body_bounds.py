"""What a request's body may cost while it arrives, and before it is known whether it is served."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from starlette.exceptions import HTTPException
from tests.support.router.limited_app import app_with_limits
from tests.support.servers.http_front import BODY, Served, begun, raw, rest

from baton.errors import QueueFullError
from baton_router.app import RouterApp
from baton_router.frontend.http.protocol import HttpProtocol

HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
LIMITED = b"authorization: Bearer sk-limited\r\n"


@pytest.fixture(scope="module")
def api() -> Iterator[Served]:
    with Served(body_timeout_s=5.0) as served:
        yield served


def find_errors(kind: type[Exception]) -> list[Exception]:
    """Return all errors of a class that this process has."""
    return [each for each in gc.get_objects() if isinstance(each, kind)]


async def ask(app: RouterApp, data: bytes) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", app.http_port)
    writer.write(data)
    async with asyncio.timeout(240):
        answer = await reader.readuntil(b"\r\n\r\n")
    writer.close()
    return answer


async def test_a_tenant_at_its_limits_is_refused_by_the_head_alone(tmp_path: Path) -> None:
    async with app_with_limits(tmp_path) as app:
        accounts = app._credentials.accounts
        assert accounts is not None
        with app.processor.charge(accounts.identify("Bearer sk-limited"), 1.0):
            pass
        no_body = b"content-length: 1000000\r\n\r\n"
        others = find_errors(QueueFullError)  # of other tests
        gc.disable()
        try:
            assert b" 429 " in await ask(app, HEAD + LIMITED + no_body)
            refused = [each for each in find_errors(QueueFullError) if not any(each is other for other in others)]
            assert all(each.__traceback__ is None for each in refused), "its frames have the bytes that were read"
        finally:
            gc.enable()
        body = b'{"prompt": [5, 6, 7], "max_tokens": 2}'
        others = HEAD.replace(b"chat/", b"") + b"authorization: Bearer sk-free\r\n"
        assert b" 200 " in await ask(app, others + b"content-length: %d\r\n\r\n" % len(body) + body)


async def test_the_body_of_a_tenant_at_its_limits_is_not_even_parsed(tmp_path: Path) -> None:
    pieces = []

    def on_body(connection: HttpProtocol, body: bytes) -> None:
        pieces.append(body)

    async with app_with_limits(tmp_path) as app:
        accounts = app._credentials.accounts
        assert accounts is not None
        with app.processor.charge(accounts.identify("Bearer sk-limited"), 1.0), pytest.MonkeyPatch.context() as patch:
            patch.setattr(HttpProtocol, "on_body", on_body)
            reader, writer = await asyncio.open_connection("127.0.0.1", app.http_port)
            writer.write(HEAD + LIMITED + b"transfer-encoding: chunked\r\n\r\n")
            async with asyncio.timeout(240):
                head = await reader.readuntil(b"\r\n\r\n")
                assert b" 429 " in head
                assert b"connection: close" in head
                for _ in range(20):
                    writer.write(b"2\r\nxx\r\n" * 1000)
                    await writer.drain()
                await reader.read()
            writer.close()
        assert pieces == []


async def test_a_long_body_that_is_refused_counts_as_a_request(tmp_path: Path) -> None:
    async with app_with_limits(tmp_path) as app:
        body = b'{"tools": [' + b"[]," * 1_000_000 + b"[]]}"
        request = HEAD + LIMITED + b"content-length: %d\r\n\r\n" % len(body) + body
        assert b" 400 " in await ask(app, request)
        assert b" 429 " in await ask(app, request)
        assert app.dispatcher.num_in_flight == 0


def test_the_bound_follows_from_the_models_context(api: Served) -> None:
    answer = raw(api, HEAD + b"content-length: %d\r\n\r\n" % ((4 << 20) + 1))
    assert b" 413 " in answer.split(b"\r\n")[0]
    assert b"at most 4194304 bytes" in answer


def test_a_long_body_is_served_as_a_short_one(api: Served) -> None:
    fields = {"prompt": "def", "temperature": 0, "max_tokens": 100}
    answers = [api.post("/v1/completions", fields | {"metadata": "x" * size}).json() for size in (10, 1_000_000)]
    assert answers[0]["choices"] == answers[1]["choices"]
    answer = api.post("/tokenize", {"prompt": "def", "metadata": "x" * 1_000_000})
    assert answer.json()["count"] == api.post("/tokenize", {"prompt": "def"}).json()["count"]
    assert api.post("/v1/completions", fields | {"metadata": "x" * 1_000_000, "temperature": "hot"}).status_code == 400
    api.wait_until(lambda: api.front.posts.budget.num_bytes == 0)


def test_bodies_in_tiny_chunks_are_refused(api: Served) -> None:
    chunks = b"2\r\nxx\r\n" * 10_000
    answer = raw(api, HEAD + b"transfer-encoding: chunked\r\n\r\n" + chunks)
    assert b" 400 " in answer.split(b"\r\n")[0]
    assert b"chunks that are too small" in answer
    api.wait_until(lambda: api.front.posts.budget.num_bytes == 0)


def test_the_bytes_of_refused_bodies_are_not_kept(api: Served) -> None:
    """Frames of what has failed have them, and a request keeps the error that it is refused with."""
    others = find_errors(HTTPException)  # of other tests
    gc.disable()
    try:
        raw(api, HEAD + b"transfer-encoding: chunked\r\n\r\n" + b"2\r\nxx\r\n" * 10_000)
        refused = [each for each in find_errors(HTTPException) if not any(each is other for other in others)]
        assert all(each.__traceback__ is None for each in refused)
    finally:
        gc.enable()


def test_bodies_that_never_end_have_one_budget(api: Served) -> None:
    """Twenty times 3 MiB, of which one client may have 32 MiB, and a little of each of the others."""
    budget = api.front.posts.budget
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(begun(api, b"content-length: 4000000\r\n\r\n")) for _ in range(20)]
        for client in clients:
            client.setblocking(False)
        left = dict.fromkeys(clients, 3 << 20)

        def send() -> bool:
            """Send what the server reads; the rest stays with the clients."""
            for client in clients:
                with contextlib.suppress(BlockingIOError):
                    left[client] -= client.send(bytes(min(left[client], 65536)))
            return len(budget._waiting) >= 8

        api.wait_until(send)
        for _ in range(200):
            send()
        assert 30 << 20 < budget.num_bytes < 48 << 20
        assert api.post("/v1/completions", json.loads(BODY)).status_code == 200, "short ones need not wait"
    api.wait_until(lambda: budget.num_bytes == 0)
    assert not budget._waiting
    assert not budget._tenants


def test_a_body_that_waits_goes_on_when_others_are_gone(api: Served) -> None:
    budget = api.front.posts.budget
    body = json.dumps({"prompt": "def", "temperature": 0, "max_tokens": 100, "metadata": "x" * (3 << 20)}).encode()
    with contextlib.ExitStack() as stack:
        others = [begun(api, b"content-length: 4000000\r\n\r\n") for _ in range(11)]
        with contextlib.ExitStack() as before:
            for other in others:
                before.enter_context(other).sendall(bytes(3 << 20))
            api.wait_until(lambda: budget.num_bytes >= 32 << 20)
            waiting = stack.enter_context(begun(api, b"content-length: %d\r\nconnection: close\r\n\r\n" % len(body)))
            waiting.sendall(body[:200_000])
            api.wait_until(lambda: bool(budget._waiting))
        waiting.sendall(body[200_000:])
        assert b" 200 " in rest(waiting).split(b"\r\n")[0]
    api.wait_until(lambda: budget.num_bytes == 0)
