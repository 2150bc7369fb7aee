"""``/v1/chat/completions`` and ``/v1/completions``: from a request's body to the bytes of its answer, by callbacks.

An endpoint is a parser (``openai_request``) and a formatter (:class:`~baton_router.frontend.openai.answer.WholeAnswer`
or :class:`~baton_router.frontend.openai.events.EventStream`).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from starlette.exceptions import HTTPException

from baton.errors import BatonError, DeadlineError, InternalError
from baton_router.dispatch.event_loop import PREPARE, RESPOND, START, Deadlines, TurnBatcher
from baton_router.dispatch.interface import Running
from baton_router.frontend.http.body import check_media, decode
from baton_router.frontend.http.errors import answer_to
from baton_router.frontend.http.http_exchange import HttpExchange
from baton_router.frontend.http.metrics import HttpMetrics
from baton_router.frontend.http.middleware import AccessCheck, cors_lines, name_request, request_id
from baton_router.frontend.http.options import HttpOptions
from baton_router.frontend.openai.answer import WholeAnswer
from baton_router.frontend.openai.events import EventStream
from baton_router.frontend.openai.openai_request import OpenAIRequest, parse_chat, parse_completion
from baton_router.frontend.openai.request_headers import with_headers
from baton_router.frontend.openai.response_headers import Route, route_lines
from baton_router.frontend.openai.unsupported_params import check_strict, header_value
from baton_router.processor.input_processor import InputProcessor
from baton_router.processor.text_request import PreparedRequest, TextChunk

log = logging.getLogger(__name__)

_EVENT_HEADERS = (
    b"content-type: text/event-stream; charset=utf-8\r\ncache-control: no-cache\r\nx-accel-buffering: no\r\n"
)


class GenerationEndpoints:
    """Serves the exchanges of the endpoints that generate; see ``http_exchange.Handler``.

    Args:
        processor: Runs the generations.
        options: Limits.
        metrics: Where requests are counted.
        access: Checks API keys.
        steps: Of this router's requests.

    Attributes:
        paths: Paths of the endpoints, as requests have them and as text.
        deadlines: Of requests that are served.
    """

    def __init__(
        self,
        processor: InputProcessor,
        options: HttpOptions,
        metrics: HttpMetrics,
        access: AccessCheck,
        steps: TurnBatcher,
    ) -> None:
        self.processor, self.options, self.metrics, self.steps = processor, options, metrics, steps
        self.deadlines = Deadlines(options.request_timeout_s)
        self._access = access
        self._parsers: dict[str, tuple[Callable[[Any], OpenAIRequest], str]] = {
            "/v1/chat/completions": (parse_chat, "chatcmpl"),
            "/v1/completions": (partial(parse_completion, max_prompts=options.max_prompts), "cmpl"),
        }
        self.paths: Mapping[bytes, str] = {path.encode(): path for path in self._parsers}

    def check_head(self, exchange: HttpExchange) -> Exception | None:
        """Name a request, and check its API key and what it says of its body; return why it is refused, if it is."""
        scope = exchange.scope
        ident = name_request(scope)
        exchange.common = b"x-request-id: %b\r\n" % ident.encode() + cors_lines(scope, self.options.cors_origins)
        refusal = self._access.refusal(scope, exchange.path)
        return refusal or check_media(scope["headers"], self.options.max_body_bytes)

    def serve(self, exchange: HttpExchange, body: bytes) -> None:
        """Serve a request, now or later."""
        try:
            parse, prefix = self._parsers[exchange.path]
            request = parse(decode(body))
            request.requests = with_headers(exchange.scope, request.requests)
            generation = Generation(self, exchange, request, f"{prefix}-{request_id(exchange.scope)}")
        except Exception as error:
            self.refuse(exchange, error)
        else:
            self.steps.later(PREPARE, Generation.prepare, generation)

    def refuse(self, exchange: HttpExchange, error: Exception) -> None:
        """Answer a request with an error."""
        if not isinstance(error, BatonError | HTTPException):
            error = hide(error, exchange)
        response = answer_to(error)
        lines = [b"%b: %b\r\n" % header for header in response.raw_headers if header[0] not in _OWN_HEADERS]
        exchange.respond(response.status_code, b"".join(lines), bytes(response.body))

    def ignored_fields_header(self, request: OpenAIRequest, prepared: PreparedRequest) -> bytes:
        """Return the header line that names a request's fields without effect; empty: there are none.

        Raises:
            InvalidRequestError: There are some, and they are refused.
        """
        ignored = request.ignored
        if request.template_fields:
            ignored = ignored + _unread_variables(request, prepared)
        if not ignored:
            return b""
        check_strict(ignored, self.options.strict_fields)
        self.metrics.count_ignored(ignored)
        return f"x-baton-ignored-fields: {header_value(ignored)}\r\n".encode("latin-1")


class Generation:
    """One HTTP request while it is served: all its prompts, and its answer.

    An answer in events begins with the first chunk, so that errors before it have their own status.
    """

    __slots__ = (
        *("_endpoints", "_ended", "_exchange", "_format", "_headers", "_name", "_prepared", "_preparing"),
        *("_request", "_routes", "_running", "_stall", "_started", "_unfinished"),
    )

    def __init__(
        self, endpoints: GenerationEndpoints, exchange: HttpExchange, request: OpenAIRequest, name: str
    ) -> None:
        self._endpoints, self._exchange, self._request, self._name = endpoints, exchange, request, name
        self._headers = b""
        self._prepared: list[PreparedRequest] = []
        self._preparing: asyncio.Task[None] | None = None
        self._routes = [Route() for _ in request.requests]
        self._running: list[Running] = []
        self._unfinished = len(request.requests)
        self._format: WholeAnswer | EventStream | None = None
        self._ended = self._started = False
        self._stall: asyncio.TimerHandle | None = None
        exchange.on_gone = self._leave
        exchange.on_flow = self._flow
        endpoints.deadlines.add(self)

    def prepare(self) -> None:
        """Check and tokenize the prompts, at once if there is one short one, and start the generation."""
        if self._ended:
            return
        requests, processor = self._request.requests, self._endpoints.processor
        try:
            prepared = processor.prepare_now(requests[0], fallback_id=self._name) if len(requests) == 1 else None
        except Exception as error:
            self._fail(error)
            return
        if prepared is not None:
            self._prepared.append(prepared)
            self._endpoints.steps.later(START, Generation._start, self)
        else:
            self._preparing = asyncio.get_running_loop().create_task(self._prepare())

    async def _prepare(self) -> None:
        try:
            for request in self._request.requests:
                self._prepared.append(await self._endpoints.processor.prepare(request, fallback_id=self._name))
        except Exception as error:
            self._preparing = None
            self._fail(error)
            return
        self._preparing = None
        self._endpoints.steps.later(START, Generation._start, self)

    def _start(self) -> None:
        if self._ended:
            return
        try:
            endpoints, request, prepared = self._endpoints, self._request, self._prepared
            self._headers = endpoints.ignored_fields_header(request, prepared[0])
            formatter = EventStream if request.stream else WholeAnswer
            self._format = formatter(request, prepared, self._name, int(time.time()))
            self._generate()
        except Exception as error:
            self._fail(error)

    def _generate(self) -> None:
        for at, item in enumerate(self._prepared):
            running = self._endpoints.processor.start(item, _Sink(self, at))
            if self._ended:  # by an error, or its client has gone
                running.cancel()
                return
            self._running.append(running)
        if self._exchange.paused:  # by the answer before
            self._flow(True)

    # --- what the generation brings ---

    def on_chunk(self, at: int, chunk: TextChunk) -> None:
        """Take a chunk of prompt ``at``."""
        if self._ended:
            return
        try:
            if chunk.trace is not None or chunk.decision is not None:
                self._routes[at].add(chunk)
            assert self._format is not None
            data = self._format.add(at, chunk)
            if self._request.stream:
                self._send(data)
        except Exception as error:
            self._fail(error)

    def _send(self, data: bytes) -> None:
        exchange = self._exchange
        if not self._started:
            self._started = True
            exchange.start(200, self._head() + _EVENT_HEADERS)
            if not data:  # a token that is half a character: the client may wait for its headers, not for its text
                exchange.send_head()
        if data:
            exchange.send(data)

    def on_end(self, error: Exception | None) -> None:
        """Take the end of one prompt's generation; the first error ends all."""
        if self._ended:
            return
        if error is not None:
            self._fail(error)
            return
        self._unfinished -= 1
        if self._unfinished:
            return
        if self._request.stream:
            self._finish()
        else:  # it is written together with others
            self._endpoints.steps.later(RESPOND, Generation._finish, self)

    def _finish(self) -> None:
        if self._ended:
            return
        try:
            assert self._format is not None
            data = self._format.end()
            head = self._head() if not self._started else b""
        except Exception as failure:
            self._fail(failure)
            return
        self._leave()
        if self._started:
            self._exchange.finish(data)
        else:
            self._exchange.respond(200, head + b"content-type: application/json\r\n", data)

    def _head(self) -> bytes:
        """Return the header lines of a good answer, but for those that say how its body comes."""
        return route_lines(self._routes) + self._headers

    # --- what else can happen ---

    def expire(self) -> None:
        """The request's time is over."""
        self._fail(DeadlineError(f"the request took longer than {self._endpoints.options.request_timeout_s:g} s"))

    def _flow(self, paused: bool) -> None:
        """The client reads too slowly, or has caught up: the generation's tokens wait with it, for a limited time."""
        if self._stall is not None:
            self._stall.cancel()
            self._stall = None
        if paused:
            limit = self._endpoints.options.send_timeout_s
            self._stall = asyncio.get_running_loop().call_later(limit, self._stalled)
        for running in list(self._running):
            running.hold(paused)

    def _stalled(self) -> None:
        self._leave()
        self._exchange.abort()

    def _fail(self, error: Exception) -> None:
        """Answer with an error, or end a stream that has begun with one."""
        if self._ended:
            return
        self._leave()
        exchange = self._exchange
        if not self._started:
            self._endpoints.refuse(exchange, error)
            return
        if not isinstance(error, BatonError):
            exchange.status = 500  # for the metrics: the head with 200 has left
            error = hide(error, exchange)
        assert isinstance(self._format, EventStream)
        exchange.finish(self._format.error(error))

    def _leave(self) -> None:
        """Leave nothing running."""
        if self._ended:
            return
        self._ended = True
        self._exchange.on_gone = self._exchange.on_flow = None
        self._endpoints.deadlines.discard(self)
        if self._stall is not None:
            self._stall.cancel()
        if self._preparing is not None:
            self._preparing.cancel()
        for running in self._running:
            running.cancel()
        self._running.clear()  # no reference cycle: all of it is freed at once


class _Sink:
    """Takes what one prompt's generation brings."""

    __slots__ = ("_at", "_generation")

    def __init__(self, generation: Generation, at: int) -> None:
        self._generation, self._at = generation, at

    def on_chunk(self, chunk: TextChunk) -> None:
        """Take a chunk."""
        self._generation.on_chunk(self._at, chunk)

    def on_end(self, error: Exception | None) -> None:
        """Take the end."""
        self._generation.on_end(error)


_OWN_HEADERS = frozenset({b"content-length", b"connection"})
"""Headers of an error that the exchange writes itself."""


def hide(error: Exception, exchange: HttpExchange) -> InternalError:
    """Log an error that is not meant for clients, and return what they are told instead."""
    log.error("request %s to %s failed", request_id(exchange.scope), exchange.path, exc_info=error)
    return InternalError("something went wrong inside Baton")


def _unread_variables(request: OpenAIRequest, prepared: PreparedRequest) -> list[str]:
    """Return the fields that set variables which the chat template doesn't read."""
    template = prepared.text_model.chat_template
    read = template.variables if template is not None else frozenset()
    return [name for variable, name in request.template_fields.items() if variable not in read]
