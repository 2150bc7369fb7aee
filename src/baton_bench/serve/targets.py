"""Services under load: an OpenAI endpoint, with an HTTP client of its own, or a Baton router over gRPC.

General HTTP clients spend more time on an event than a fast service does, so that under load their own queue would be
measured. Here an event costs a parser's callback and two searches, and its time is taken before either.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, Any, Protocol, TypedDict, cast
from urllib.parse import urlsplit

import httptools
import msgspec
import orjson

from baton.client import AsyncClient
from baton.config.flags import AccessConfig
from baton.errors import BatonError, ConfigError, UnavailableError
from baton.rpc.tls import Tls, read_tls
from baton_bench.serve.options import ServeOptions
from baton_bench.serve.prompts import PlannedRequest
from baton_bench.serve.records import Sample

OnEvent = Callable[[bytes, float], None]
"""Called with the data of each event and its arrival time in seconds of ``time.perf_counter``."""


_MAX_BYTES = 8 * 2**20
"""Longest event, and longest answer that is no stream."""


class BrokenStreamError(Exception):
    """The connection ended before the answer did."""


@dataclass(slots=True)
class Answer:
    """Status and headers of an answer, and its body where that is no event stream."""

    status: int = 0
    content_type: str = ""
    body: bytearray = field(default_factory=bytearray)

    @property
    def is_stream(self) -> bool:
        """Whether its body are events."""
        return self.status == 200 and self.content_type.startswith("text/event-stream")


class _Connection(asyncio.Protocol):
    """One connection with one request at a time."""

    def __init__(self) -> None:
        self.open = False
        self.reused = False
        self._transport: asyncio.Transport | None = None
        self._done: asyncio.Future[None] | None = None
        self._reset(None)

    def _reset(self, on_event: OnEvent | None) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self._has_length = False
        self._ends_by_close = False
        self._on_event = on_event
        self.answer = Answer()
        self._rest = b""
        self._data: list[bytes] = []
        self._held = 0
        self._now = 0.0
        self.started = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's is none by name
        self._transport = cast(asyncio.Transport, transport)
        self.open = True

    def connection_lost(self, exc: Exception | None) -> None:
        self.open = False
        if self._done is None or self._done.done():
            return
        if exc is None and self._ends_by_close:
            self._done.set_result(None)
        else:
            self._done.set_exception(BrokenStreamError(str(exc) if exc else "the service closed the connection"))

    def data_received(self, data: bytes) -> None:
        self._now = time.perf_counter()
        self.started = True
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(f"no HTTP: {error}")

    def _fail(self, why: str) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_exception(BrokenStreamError(why))
        self.close()

    # --- the parser's calls ---

    def on_header(self, name: bytes, value: bytes) -> None:
        name = name.lower()
        if name == b"content-type":
            self.answer.content_type = value.decode("latin-1").lower()
        elif name in (b"content-length", b"transfer-encoding"):
            self._has_length = True

    def on_headers_complete(self) -> None:
        self.answer.status = self._parser.get_status_code()
        # A body without a length ends where the connection does (RFC 9112, 6.3); the parser does not see that end.
        self._ends_by_close = not self._has_length

    def on_body(self, body: bytes) -> None:
        self._held += len(body)
        if self._held > _MAX_BYTES:
            self._fail(f"more than {_MAX_BYTES} bytes without an event")
            return
        if not self.answer.is_stream:
            self.answer.body += body
            return
        *lines, self._rest = (self._rest + body).split(b"\n")
        for line in lines:
            line = line.rstrip(b"\r")
            if line.startswith(b"data:"):
                self._data.append(line[5:].strip())
            elif not line and self._data:
                data = b"\n".join(self._data)
                self._data = []
                self._held = len(self._rest)
                if self._on_event is not None:
                    self._on_event(data, self._now)

    def on_message_complete(self) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_result(None)
        if not self._parser.should_keep_alive():
            self.close()

    async def exchange(self, request: bytes, on_event: OnEvent) -> Answer:
        """Send a request and read its answer.

        Raises:
            BrokenStreamError: The connection ended first.
        """
        if self._transport is None:
            raise BrokenStreamError("not connected")
        self._reset(on_event)
        self._done = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        await self._done
        return self.answer

    def close(self) -> None:
        self.open = False
        if self._transport is not None:
            self._transport.close()


class HttpClient:
    """Connections to one service, kept for further requests.

    Args:
        url: Base URL of the service, e.g. ``http://127.0.0.1:8000``; its path is put before that of requests.
        headers: Sent with every request.
        context: For ``https``.
    """

    def __init__(self, url: str, headers: dict[str, str], context: ssl.SSLContext | None = None) -> None:
        parts = urlsplit(url)
        secure = parts.scheme == "https"
        self._host = parts.hostname or ""
        self._port = parts.port or (443 if secure else 80)
        self._path = parts.path.rstrip("/")
        self._context = (context or ssl.create_default_context()) if secure else None
        self._idle: list[_Connection] = []
        self._head = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        self._netloc = parts.netloc.rpartition("@")[2]

    async def send(self, method: str, path: str, body: bytes, on_event: OnEvent) -> Answer:
        """Send a request, and read its answer to the end.

        Raises:
            OSError: The service cannot be reached.
            BrokenStreamError: The connection ended before the answer.
        """
        head = (
            f"{method} {self._path}{path} HTTP/1.1\r\nHost: {self._netloc}\r\n{self._head}"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        request = head.encode("latin-1") + body
        while True:
            connection = await self._connection()
            try:
                answer = await connection.exchange(request, on_event)
            except BrokenStreamError:
                if connection.reused and not connection.started:
                    continue  # the service had closed it while it was idle
                raise
            except BaseException:
                connection.close()
                raise
            if connection.open:
                self._idle.append(connection)
            return answer

    async def _connection(self) -> _Connection:
        while self._idle:
            connection = self._idle.pop()
            if connection.open:
                connection.reused = True
                return connection
        loop = asyncio.get_running_loop()
        _, made = await loop.create_connection(_Connection, self._host, self._port, ssl=self._context)
        return made

    def close(self) -> None:
        for connection in self._idle:
            connection.close()
        self._idle.clear()


_LIST_TIMEOUT_S = 10.0


class Target(Protocol):
    """A service that answers."""

    model: str

    async def prepare(self) -> None:
        """Check that the service answers, and choose the model.

        Raises:
            BatonError: It does not answer.
        """

    async def ask(self, request: PlannedRequest, sample: Sample) -> None:
        """Send a request, and record its events and errors in ``sample``."""

    async def close(self) -> None: ...


def make_target(options: ServeOptions, access: AccessConfig) -> Target:
    """Return the target that the options name.

    Raises:
        ConfigError: Certificates or keys cannot be read.
    """
    if options.endpoint == "grpc":
        return GrpcTarget(options, access, read_tls(access))
    return OpenAITarget(options, access)


class _Model(TypedDict):
    id: Annotated[str, msgspec.Meta(pattern=r"^[^\x00-\x1f\x7f-\x9f]+$")]


class _Models(TypedDict):
    data: list[_Model]


_Count = Annotated[int, msgspec.Meta(ge=0, le=2**53)] | None


class _Details(TypedDict, total=False):
    cached_tokens: _Count


class _Usage(TypedDict, total=False):
    prompt_tokens: _Count
    completion_tokens: _Count
    prompt_tokens_details: _Details | None


class OpenAITarget:
    """``/v1/completions`` or ``/v1/chat/completions`` of any service, streamed."""

    def __init__(self, options: ServeOptions, access: AccessConfig) -> None:
        self.model = options.model
        self._options = options
        headers = {"Authorization": f"Bearer {options.api_key}"} if options.api_key else {}
        context = ssl.create_default_context(cafile=access.tls_ca or None) if options.url.startswith("https") else None
        self._http = HttpClient(options.url.removesuffix("/").removesuffix("/v1"), headers, context)
        self._read = _read_chat if options.endpoint == "chat" else _read_completion

    async def prepare(self) -> None:
        try:
            async with asyncio.timeout(_LIST_TIMEOUT_S):
                answer = await self._http.send("GET", "/v1/models", b"", _ignore)
        except (OSError, BrokenStreamError, TimeoutError) as error:
            raise UnavailableError(f"{self._options.url} does not answer: {error or 'time is up'}") from error
        if self.model:
            return
        if answer.status != 200:
            text = bytes(answer.body[:200]).decode(errors="replace")
            raise UnavailableError(f"{self._options.url}/v1/models answers {answer.status}: {text}")
        try:
            self.model = msgspec.json.decode(answer.body, type=_Models)["data"][0]["id"]
        except (ValueError, IndexError, RecursionError) as error:
            text = " ".join(bytes(answer.body[:200]).decode(errors="replace").split())
            message = f"{self._options.url}/v1/models lists no model: {text}; give --model"
            raise ConfigError(message, field="model") from error

    async def ask(self, request: PlannedRequest, sample: Sample) -> None:
        path, body = self._body(request)
        counted: dict[str, Any] = {}

        def on_event(data: bytes, at: float) -> None:
            if data == b"[DONE]":
                counted["done"] = True
                return
            try:  # here: the parser makes an error of its own of what is raised in it
                self._take_event(orjson.loads(data), at, sample, counted)
            except (ValueError, AttributeError, LookupError, TypeError) as error:
                sample.fail("bad event", f"{type(error).__name__}: {error}")

        await _guarded(self._send(path, body, on_event, counted, sample), self._options.timeout_s, sample)
        _take_usage(sample, counted.get("usage"))

    def _take_event(self, event: dict[str, Any], at: float, sample: Sample, counted: dict[str, Any]) -> None:
        if error := event.get("error"):
            sample.fail("error event", str(error.get("message", error)))
        if self._read(event):
            sample.arrivals.append(at)
        if event.get("usage"):
            counted["usage"] = msgspec.convert(event["usage"], _Usage)

    async def _send(
        self, path: str, body: bytes, on_event: Callable[[bytes, float], None], counted: dict[str, Any], sample: Sample
    ) -> None:
        answer = await self._http.send("POST", path, body, on_event)
        if answer.status != 200:
            sample.fail(f"http {answer.status}", bytes(answer.body).decode(errors="replace"))
        elif not answer.is_stream:
            sample.fail("no stream", f"content type {answer.content_type or 'missing'}")
        elif "done" not in counted:
            sample.fail("cut", "the stream ended without [DONE]")

    def _body(self, request: PlannedRequest) -> tuple[str, bytes]:
        options = self._options
        body: dict[str, Any] = {
            "model": self.model,
            "max_tokens": request.output_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if options.ignore_eos:
            body["ignore_eos"] = True
        if request.session:
            body["session_id"] = request.session
        if options.endpoint == "chat":
            prompt = request.prompt
            body["messages"] = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
            return "/v1/chat/completions", orjson.dumps(body)
        body["prompt"] = request.prompt
        return "/v1/completions", orjson.dumps(body)

    async def close(self) -> None:
        self._http.close()


def _ignore(data: bytes, at: float) -> None:
    """Take an event of an answer that should have none."""


def _read_completion(event: dict[str, Any]) -> bool:
    """Whether an event has output: also a token whose text waits for the next one, but not a bare end."""
    choices = event.get("choices")
    return bool(choices and (choices[0].get("text") or choices[0].get("finish_reason") is None))


def _read_chat(event: dict[str, Any]) -> bool:
    """Whether an event has output: text, reasoning or a call; not the one that names the role, nor a bare end."""
    choices = event.get("choices")
    if not choices:
        return False
    delta = choices[0].get("delta") or {}
    if any(delta.get(key) for key in ("content", "reasoning", "reasoning_content", "tool_calls", "refusal")):
        return True
    return delta.get("content") == "" and "role" not in delta and choices[0].get("finish_reason") is None


def _take_usage(sample: Sample, usage: _Usage | None) -> None:
    counts: _Usage = usage or {}
    details: _Details = counts.get("prompt_tokens_details") or {}
    sample.prompt_tokens = counts.get("prompt_tokens")
    sample.cached_tokens = details.get("cached_tokens")
    sample.finish(counts.get("completion_tokens"))


async def _guarded(work: Any, timeout_s: float, sample: Sample) -> None:
    """Run a request; a failure becomes the sample's error."""
    try:
        async with asyncio.timeout(timeout_s):
            await work
    except TimeoutError:
        sample.fail("timeout", f"no end within {timeout_s:g} s")
    except BrokenStreamError as error:
        sample.fail("cut" if sample.arrivals else "connection", str(error))
    except OSError as error:
        sample.fail("connection", str(error))
    except BatonError as error:
        sample.fail(error.code, error.message)


class GrpcTarget:
    """A Baton router, through the SDK."""

    def __init__(self, options: ServeOptions, access: AccessConfig, tls: Tls | None) -> None:
        self.model = options.model
        self._options = options
        self._client = AsyncClient(
            options.url,
            token=options.api_key or None,
            token_file="" if options.api_key else access.token_file,
            timeout=options.timeout_s,
            retries=0,
            tls=tls,
        )

    async def prepare(self) -> None:
        models = await self._client.models(timeout=_LIST_TIMEOUT_S)
        if not self.model:
            if not models:
                raise UnavailableError(f"{self._options.url} has no model yet")
            self.model = models[0].name

    async def ask(self, request: PlannedRequest, sample: Sample) -> None:
        await _guarded(self._send(request, sample), self._options.timeout_s, sample)
        sample.finish(sample.output_tokens or None)

    async def _send(self, request: PlannedRequest, sample: Sample) -> None:
        stream = await self._client.generate(
            request.prompt,
            model=self.model,
            stream=True,
            max_tokens=request.output_tokens,
            temperature=0.0,
            ignore_eos=self._options.ignore_eos,
            session_id=request.session,
        )
        async with stream:
            while (chunks := await stream.next_chunks()) is not None:
                count = sum(len(chunk.token_ids) for chunk in chunks)
                if count:
                    sample.arrivals.append(time.perf_counter())
                    sample.output_tokens += count
        if stream.trace is not None:
            sample.prompt_tokens = stream.trace.prompt_tokens
            sample.cached_tokens = stream.trace.cached_tokens

    async def close(self) -> None:
        await self._client.close()
