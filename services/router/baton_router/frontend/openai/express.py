"""The endpoints that generate, without ASGI: a request that came whole is served by callbacks, from bytes to bytes.

What is parsed, checked, generated and written is what :mod:`baton_router.frontend.openai.generation` parses, checks,
generates and
writes; here are no tasks, queues or generators between. Anything unusual about the way that a request comes in is left
to the ASGI application, and so are requests with several prompts.
"""

from __future__ import annotations

import asyncio
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

import orjson
from starlette.responses import Response

from baton.errors import BatonError, DeadlineError, InternalError
from baton_router.dispatch.deadlines import Deadlines
from baton_router.dispatch.interface import Running
from baton_router.dispatch.turn_batching import PREPARE, RESPOND, START, Steps
from baton_router.frontend.http.body import decode
from baton_router.frontend.http.errors import baton_error_response
from baton_router.frontend.http.http_exchange import Exchange
from baton_router.frontend.http.middleware import Front, name_request
from baton_router.frontend.http.options import HttpOptions
from baton_router.frontend.openai.answer import AnswerBuilder
from baton_router.frontend.openai.events import EventWriter
from baton_router.frontend.openai.generation import CLIENT_GONE_STATUS, Generations
from baton_router.frontend.openai.openai_request import Job
from baton_router.frontend.openai.request_headers import with_headers
from baton_router.frontend.openai.response_headers import Route, route_lines
from baton_router.processor.text_request import PreparedRequest, TextChunk, TextRequest

log = logging.getLogger(__name__)

_PARSED = Callable[[Any], Job]


class Express:
    """Serves exchanges.

    Args:
        generations: The endpoints.
        front: What surrounds them.
        options: Limits.
        steps: Of this router's requests.

    Attributes:
        paths: Paths of the endpoints, as requests have them and as text.
        max_body_bytes: Longest body.
        options: Limits.
        metrics: Where requests are counted.
        deadlines: Of requests that are served.
        steps: See above.
    """

    def __init__(self, generations: Generations, front: Front, options: HttpOptions, steps: Steps) -> None:
        self.steps = steps
        self.generations, self.options, self.metrics = generations, options, front.metrics
        self.max_body_bytes = options.max_body_bytes
        self.deadlines = Deadlines(options.request_timeout_s)
        self._front = front
        self._endpoints: dict[str, tuple[_PARSED, str]] = {
            "/v1/chat/completions": (generations.chat_job, "chatcmpl"),
            "/v1/completions": (generations.completion_job, "cmpl"),
        }
        self.paths: Mapping[bytes, str] = {path.encode(): path for path in self._endpoints}

    def serve(self, exchange: Exchange) -> bool:
        """Serve a request, now or later; ``False``: it is for the ASGI application."""
        begun = time.perf_counter()
        parse, prefix = self._endpoints[exchange.path]
        ident = name_request(exchange.scope)
        serving = None
        try:
            error = self._front.refuses(exchange.scope, exchange.path)
            if error is not None:
                raise error
            job = parse(decode(exchange.body))
            if len(job.requests) > 1:
                return False
            exchange.body = b""  # what has been read need not lie in the caches for as long as the answer takes
            request = with_headers(exchange.scope, job.requests)[0]
            serving = _Stream if job.stream else _Whole
            running = serving(self, exchange, (job, request), (ident, f"{prefix}-{ident}"), begun)
        except Exception as error:
            _refuse(self, exchange, error, (ident, begun))
            return True
        self.steps.later(PREPARE, _Serving.begin, running)
        return True


class _Serving(ABC):
    """One request on its way; the sink of its generation."""

    __slots__ = (
        "_begun",
        "_ended",
        "_exchange",
        "_express",
        "_headers",
        "_id",
        "_job",
        "_name",
        "_prepared",
        "_preparing",
        "_request",
        "_route",
        "_running",
        "_stall",
        "_started",
    )

    def __init__(
        self,
        express: Express,
        exchange: Exchange,
        wanted: tuple[Job, TextRequest],
        names: tuple[str, str],
        begun: float,
    ) -> None:
        self._express, self._exchange = express, exchange
        self._job, self._request = wanted
        self._id, self._name = names
        self._begun = begun
        self._headers: dict[str, str] = {}
        self._prepared: PreparedRequest | None = None
        self._preparing: asyncio.Task[None] | None = None
        self._route = Route()
        self._running: Running | None = None
        self._ended = self._started = False
        self._stall: asyncio.TimerHandle | None = None
        express.metrics.begin(exchange.path)
        exchange.on_gone = self._gone
        exchange.on_flow = self._flow
        express.deadlines.add(self)

    def begin(self) -> None:
        """Prepare and start the generation; all that fails is answered."""
        if self._ended:
            return
        pipeline = self._express.generations.pipeline
        try:
            self._prepared = pipeline.prepare_now(self._request, fallback_id=self._name)
        except Exception as error:
            self._fail(error)
            return
        if self._prepared is not None:
            self._express.steps.later(START, _Serving._start, self)
        else:
            self._preparing = asyncio.get_running_loop().create_task(self._prepare())

    async def _prepare(self) -> None:
        try:
            pipeline = self._express.generations.pipeline
            self._prepared = await pipeline.prepare(self._request, fallback_id=self._name)
        except Exception as error:
            self._preparing = None
            self._fail(error)
            return
        self._preparing = None
        self._express.steps.later(START, _Serving._start, self)

    def _start(self) -> None:
        if self._ended:
            return
        try:
            self._generate()
        except Exception as error:
            self._fail(error)

    def _generate(self) -> None:
        generations, prepared = self._express.generations, self._prepared
        assert prepared is not None
        self._headers = generations.headers_of(self._job, prepared)
        self._write_for(prepared)
        running = generations.pipeline.start(prepared, self)
        if self._ended:
            running.cancel()
            return
        self._running = running
        if self._exchange.paused:  # by the answer before
            self._flow(True)

    @abstractmethod
    def _write_for(self, prepared: PreparedRequest) -> None:
        """Make what writes the answer."""

    def _head(self) -> bytes:
        """Return the header lines of a good answer, but for those that say how its body comes."""
        lines = route_lines(self._route) + b"x-request-id: " + self._id.encode() + b"\r\n"
        for name, value in self._headers.items():
            lines += f"{name}: {value}\r\n".encode("latin-1")
        return lines

    # --- the generation ---

    def on_chunk(self, chunk: TextChunk) -> None:
        """Take a chunk."""
        if chunk.trace is not None or chunk.decision is not None:
            self._route.add(chunk)
        try:
            self._take(chunk)
        except Exception as error:
            self._fail(error)

    def on_end(self, error: Exception | None) -> None:
        """Take the end."""
        if error is not None:
            self._fail(error)
            return
        try:
            self._finish()
        except Exception as failure:
            self._fail(failure)
            return
        self._end(200)

    @abstractmethod
    def _take(self, chunk: TextChunk) -> None: ...

    @abstractmethod
    def _finish(self) -> None: ...

    # --- what else can happen ---

    def _gone(self) -> None:
        self._end(200 if self._started else CLIENT_GONE_STATUS)

    def expire(self) -> None:
        """The request's time is over."""
        self._fail(DeadlineError(f"the request took longer than {self._express.options.request_timeout_s:g} s"))

    def _flow(self, paused: bool) -> None:
        """The client reads too slowly, or has caught up: the generation's tokens wait with it, for so long."""
        if self._stall is not None:
            self._stall.cancel()
            self._stall = None
        if paused:
            limit = self._express.options.send_timeout_s
            self._stall = asyncio.get_running_loop().call_later(limit, self._stalled)
        if self._running is not None:
            self._running.hold(paused)

    def _stalled(self) -> None:
        self._end(200)
        self._exchange.abort()

    def _fail(self, error: Exception) -> None:
        """Answer with an error, or end a stream that has begun with one."""
        if self._ended:
            return
        if not self._started:
            self._end(None)
            _refuse(self._express, self._exchange, error, (self._id, None))
            status = error.http_status if isinstance(error, BatonError) else 500
            self._express.metrics.end(self._exchange.path, status, time.perf_counter() - self._begun)
            return
        known = error
        if not isinstance(known, BatonError):
            _log(self._id, self._exchange.path, error)
            known = InternalError("something went wrong inside Baton")
        self._end(200 if known is error else 500)
        self._break_off(known)

    def _break_off(self, error: BatonError) -> None:
        """End an answer that has begun, and cannot say why any more."""
        self._exchange.abort()

    def _end(self, status: int | None) -> None:
        """Leave nothing running; count the request if its status is known."""
        if self._ended:
            return
        self._ended = True
        self._exchange.on_gone = self._exchange.on_flow = None
        self._express.deadlines.discard(self)
        if self._stall is not None:
            self._stall.cancel()
        if self._preparing is not None:
            self._preparing.cancel()
        running, self._running = self._running, None  # no circle is left that a collector would have to find
        if running is not None:
            running.cancel()
        if status is not None:
            self._express.metrics.end(self._exchange.path, status, time.perf_counter() - self._begun)


class _Whole(_Serving):
    """An answer in one piece."""

    __slots__ = ("_builder",)

    def on_end(self, error: Exception | None) -> None:
        """Take the end; the answer is written with those of others."""
        if error is None:
            self._express.steps.later(RESPOND, _Whole._respond, self)
        else:
            self._fail(error)

    def _respond(self) -> None:
        if not self._ended:
            super().on_end(None)

    def _write_for(self, prepared: PreparedRequest) -> None:
        self._builder = AnswerBuilder(self._job, [prepared], self._name, int(time.time()))

    def _take(self, chunk: TextChunk) -> None:
        self._builder.add(0, chunk)

    def _finish(self) -> None:
        body = orjson.dumps(self._builder.build())
        self._exchange.respond(200, self._head() + b"content-type: application/json\r\n", body)


class _Stream(_Serving):
    """An answer as events. It begins with the first chunk, so that errors before it have their own status."""

    __slots__ = ("_writer",)

    def _write_for(self, prepared: PreparedRequest) -> None:
        self._writer = EventWriter(self._job, [prepared], self._name, int(time.time()))

    def _take(self, chunk: TextChunk) -> None:
        data = self._writer.add(0, chunk)
        first = not self._started
        if first:
            self._started = True
            self._exchange.start(200, self._head() + _EVENT_HEADERS)
        if data:
            self._exchange.send(data)
        elif first:  # a token that is half a character: the client may wait for its headers, not for its text
            self._exchange.send_head()

    def _finish(self) -> None:
        self._exchange.finish(self._writer.end())

    def _break_off(self, error: BatonError) -> None:
        self._exchange.finish(self._writer.error(error))


_EVENT_HEADERS = (
    b"content-type: text/event-stream; charset=utf-8\r\ncache-control: no-cache\r\nx-accel-buffering: no\r\n"
)


def _refuse(express: Express, exchange: Exchange, error: Exception, known: tuple[str, float | None]) -> None:
    """Answer with an error; count it if nobody else does, which is so if it is known when it began."""
    ident, begun = known
    if not isinstance(error, BatonError):
        _log(ident, exchange.path, error)
        error = InternalError("something went wrong inside Baton")
    response: Response = baton_error_response(error)
    lines = b"".join(b"%b: %b\r\n" % (name, value) for name, value in response.raw_headers if name != b"content-length")
    exchange.respond(response.status_code, lines + b"x-request-id: " + ident.encode() + b"\r\n", bytes(response.body))
    if begun is not None:
        express.metrics.begin(exchange.path)
        express.metrics.end(exchange.path, response.status_code, time.perf_counter() - begun)


def _log(ident: str, path: str, error: Exception) -> None:
    log.error("request %s to %s failed", ident, path, exc_info=error)
