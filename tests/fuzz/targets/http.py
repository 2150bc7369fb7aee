"""The router's HTTP port: a real connection of the real protocol, its app and endpoints, any bytes in any pieces."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import socket
from typing import Any

import uvicorn
from prometheus_client import CollectorRegistry
from tests.fuzz.choices import Choices
from tests.fuzz.event_loops import event_loop
from tests.support.scripted import ScriptedDispatcher
from uvicorn.server import ServerState

from baton.tokenizer import TextModelCache
from baton_router.frontend.app import create_app
from baton_router.frontend.http.middleware import HttpOptions
from baton_router.frontend.http.protocol import HttpProtocol
from baton_router.processor.input_processor import InputProcessor
from baton_router.processor.output_processor import GenerationMetrics

_LINES = (
    b"POST /v1/completions HTTP/1.1\r\n",
    b"POST /v1/chat/completions HTTP/1.1\r\n",
    b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n",
    b"POST /tokenize HTTP/1.1\r\n",
    b"POST /detokenize HTTP/1.0\r\n",
    b"POST /v1%2Fcompletions HTTP/1.1\r\n",
    b"GET /v1/models HTTP/1.1\r\n",
    b"GET /health HTTP/1.1\r\n",
    b"OPTIONS * HTTP/1.1\r\n",
    b"host: a\r\n",
    b"content-length: 66\r\n",
    b"content-length: 5\r\n",
    b"transfer-encoding: chunked\r\n",
    b"transfer-encoding: gzip, chunked\r\n",
    b"connection: close\r\n",
    b"connection: upgrade, http2-settings\r\nupgrade: h2c\r\nhttp2-settings: AA\r\n",
    b"expect: 100-continue\r\n",
    b"content-type: application/json\r\n",
    b"authorization: Bearer key\r\n",
    b"x-request-id: \x1b[31m\r\n",
    b"\r\n",
    b"5\r\nhello\r\n",
    b"0\r\n\r\n",
    b'3a\r\n{"model":"baton-tiny","prompt":"def","max_tokens":2,"n":1}\r\n0\r\n\r\n',
    b'{"model":"baton-tiny","prompt":"def","max_tokens":2,"stream":true}',
    b'{"model":"baton-tiny","messages":[{"role":"user","content":"x"}],"max_tokens":2}',
    b'{"tokens":[1,2],"model":"baton-tiny"}',
)


class _Server:
    """One event loop with everything above the dispatcher."""

    def __init__(self) -> None:
        self.loop = event_loop(__name__)
        asyncio.set_event_loop(self.loop)
        self.dispatcher = ScriptedDispatcher()
        self.failures: list[Any] = []
        registry = CollectorRegistry()
        processor = InputProcessor(self.dispatcher, TextModelCache(), GenerationMetrics(registry))
        front = create_app(processor, self.dispatcher, registry=registry, options=HttpOptions(max_body_bytes=10_000))
        protocol = HttpProtocol.serving(front.posts)
        self.config = uvicorn.Config(front.app, http=protocol, log_config=None, ws="none", lifespan="off")
        self.config.load()
        self.state = ServerState()
        self.make = functools.partial(
            protocol, config=self.config, server_state=self.state, app_state={}, _loop=self.loop
        )
        self.loop.set_exception_handler(lambda loop, context: self.failures.append(context))

    async def talk(self, pieces: list[bytes], *, leave: bool) -> bytes:
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        _, protocol = await self.loop.connect_accepted_socket(self.make, theirs)
        answer = b""
        with ours:
            for piece in pieces:
                with contextlib.suppress(OSError):
                    ours.send(piece)
                await asyncio.sleep(0)
                with contextlib.suppress(OSError):
                    answer += ours.recv(1 << 16)
            for _ in range(20):
                await asyncio.sleep(0)
                if self.dispatcher.open_streams == 0:
                    break
            if not leave:
                with contextlib.suppress(OSError):
                    ours.shutdown(socket.SHUT_WR)
                for _ in range(40):
                    await asyncio.sleep(0)
                    with contextlib.suppress(OSError):
                        answer += ours.recv(1 << 16)
        for _ in range(2000):
            if protocol not in self.state.connections and not self.dispatcher.open_streams and not self.state.tasks:
                return answer
            await asyncio.sleep(0 if _ < 200 else 0.001)
        raise AssertionError(f"the connection stays: {self.state.connections}, {self.state.tasks}")


@functools.cache
def _server() -> _Server:
    return _Server()


def http(data: bytes) -> None:
    """Whatever comes is answered or closed: never a 500, nothing is left behind, nothing is raised in the loop."""
    choices, pieces, server = Choices(data), [], _server()
    leave = choices.flag()
    while choices.more() and len(pieces) < 30:
        piece = b"".join(choices.pick(_LINES) for _ in range(choices.number(0, 12)))
        if choices.number(0, 3) == 0:
            piece = choices.mutated(piece)
        elif choices.number(0, 7) == 0:
            piece += choices.take(choices.number(1, 200))
        pieces.append(piece)
    answer = server.loop.run_until_complete(server.talk(pieces, leave=leave))
    assert not server.failures, server.failures
    assert answer[:9] in (b"", b"HTTP/1.1 "), answer[:200]
    assert b"HTTP/1.1 500" not in answer, (pieces, answer)
    server.dispatcher.requests.clear()
