"""The HTTP front over a real socket, with a scripted dispatcher, and clients that speak byte by byte."""

from __future__ import annotations

import contextlib
import json
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import uvicorn
from prometheus_client import CollectorRegistry
from tests.support.scripted import ScriptedDispatcher

from baton.tokenizer import TextModelCache
from baton_router.app import HttpServer
from baton_router.dispatch.event_loop import TurnBatcher
from baton_router.frontend.app import create_app
from baton_router.frontend.http.middleware import HttpOptions
from baton_router.frontend.http.protocol import HttpProtocol
from baton_router.processor.input_processor import InputProcessor
from baton_router.processor.output_processor import GenerationMetrics

CHAT: list[Any] = [{"role": "user", "content": "write add"}]
KEYS = ("key-one", "key-two")


class Served:
    """A real server in a thread, with a dispatcher that tests set up as they like."""

    def __init__(
        self,
        *,
        protocol: type[HttpProtocol] = HttpProtocol,
        steps: TurnBatcher | None = None,
        context: ssl.SSLContext | None = None,
        **options: Any,
    ) -> None:
        self.dispatcher = ScriptedDispatcher()
        self.registry = CollectorRegistry()
        pipeline = InputProcessor(self.dispatcher, TextModelCache(), GenerationMetrics(self.registry))
        self.front = front = create_app(
            pipeline, self.dispatcher, registry=self.registry, options=HttpOptions(**options), steps=steps
        )
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.socket.getsockname()[1]}"
        config = uvicorn.Config(
            front.app,
            http=protocol.serving(front.posts),
            log_level="error",
            ws="none",
            lifespan="off",
            proxy_headers=False,
            timeout_graceful_shutdown=2,
            timeout_keep_alive=600,  # more than a test waits: what ends sooner is ended by a limit of our own
        )
        self.server = HttpServer(config, context, max_connections=64)
        self.thread = threading.Thread(target=self.server.run, kwargs={"sockets": [self.socket]})

    def __enter__(self) -> Served:
        self.thread.start()
        self.client = openai.OpenAI(base_url=f"{self.url}/v1", api_key=KEYS[1], max_retries=0, timeout=240)
        self.http = httpx.Client(base_url=self.url, timeout=240, headers={"authorization": f"Bearer {KEYS[0]}"})
        return self

    def __exit__(self, *args: object) -> None:
        self.client.close()
        self.http.close()
        self.server.should_exit = True
        self.thread.join(240)
        self.socket.close()
        assert not self.thread.is_alive()

    def reset(self) -> None:
        fresh = ScriptedDispatcher()
        for name, value in vars(fresh).items():
            setattr(self.dispatcher, name, value)

    def completion(self, **fields: Any) -> Any:
        return self.client.completions.create(
            **{"model": "baton-tiny", "prompt": "def", "temperature": 0, "max_tokens": 100, **fields}
        )

    def chat(self, **fields: Any) -> Any:
        return self.client.chat.completions.create(
            **{"model": "baton-tiny", "messages": CHAT, "temperature": 0, **fields}
        )

    def post(self, path: str, body: Any, **options: Any) -> httpx.Response:
        return self.http.post(path, json=body, **options)

    def wait_until(self, condition: Any, seconds: float = 240.0) -> None:
        """Poll the server's side, which lives in another thread."""
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, "the server did not get there in time"
            time.sleep(0.005)


def raw(api: Served, data: bytes) -> bytes:
    """Send bytes and return everything that comes until the server closes the connection."""
    with socket.create_connection(("127.0.0.1", api.socket.getsockname()[1]), timeout=240) as connection:
        connection.sendall(data)
        received = bytearray()
        while piece := connection.recv(65536):
            received += piece
    return bytes(received)


def read_answers(data: bytes) -> list[tuple[int, bytes]]:
    """Return status and body of each answer in what a connection brought; all have their length."""
    answers = []
    while data:
        head, _, data = data.partition(b"\r\n\r\n")
        length = next(int(line[15:]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
        answers.append((int(head.split(b" ")[1]), data[:length]))
        data = data[length:]
    return answers


@contextlib.contextmanager
def begun(api: Served, head: bytes) -> Iterator[socket.socket]:
    """A connection on which a request's head was sent, and whatever belongs to it."""
    with contextlib.closing(socket.create_connection(api.socket.getsockname()[:2], timeout=240)) as client:
        client.sendall(b"POST /v1/completions HTTP/1.1\r\ncontent-type: application/json\r\nhost: x\r\n" + head)
        yield client


def rest(client: socket.socket) -> bytes:
    received = bytearray()
    while piece := client.recv(65536):
        received += piece
    return bytes(received)


BODY = json.dumps({"prompt": "def", "temperature": 0, "max_tokens": 100}).encode()
