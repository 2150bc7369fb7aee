"""The endpoints that generate: from a request's body to the bytes of its answer, by callbacks.

:class:`PostEndpoints` serves them, and other endpoints with a body in tasks.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import re
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias, TypeVar

import orjson
from starlette.exceptions import HTTPException
from starlette.responses import Response

from baton.allocator import return_free_memory
from baton.api.v1 import common_pb2
from baton.background import create_task
from baton.errors import (
    INTERNAL_TEXT,
    BatonError,
    DeadlineError,
    InternalError,
    OverloadedError,
)
from baton.rpc.convert import path_to_pb
from baton.rpc.multiplex import TokenWriter
from baton.types import PrefillPath
from baton_router.dispatch.event_loop import PREPARE, RESPOND, START, Deadlines, TurnBatcher
from baton_router.dispatch.interface import Running
from baton_router.frontend.http.bodies import (
    INLINE_BYTES,
    MAX_BODY_BYTES,
    SMALL_BYTES,
    BodyBudget,
    BodyDecoder,
    decode_json,
    max_body_bytes,
)
from baton_router.frontend.http.errors import answer_to
from baton_router.frontend.http.middleware import HttpMetrics, HttpOptions, cors_lines, identify, request_id
from baton_router.frontend.http.protocol import Exchange, HttpExchange, check_media
from baton_router.frontend.openai.answer import Choice, EventStream, Formatter, WholeAnswer
from baton_router.frontend.openai.openai_request import OpenAIRequest, apply_headers
from baton_router.frontend.openai.schemas import (
    Body,
    check_strict,
    header_value,
    ignored_fields,
    parse_body,
    unknown_fields,
)
from baton_router.frontend.openai.speculative_prefill import SpeculativePrefill
from baton_router.processor.input_processor import InputProcessor
from baton_router.processor.output_processor import GenerationClock
from baton_router.processor.text_request import PreparedRequest, TextChunk, TextRequest
from baton_router.processor.turns import TurnThreads
from baton_router.scheduler.decision import Decision
from baton_router.types import Account

E = TypeVar("E", bound=BatonError)
Refusal: TypeAlias = Callable[[BatonError | HTTPException], Response]


@dataclass(frozen=True, slots=True)
class FieldNames:
    """Maps field names of chat requests to those of another interface, for errors.

    Attributes:
        patterns: Regular expressions for the beginnings of names, and their replacements; the first match counts.
    """

    patterns: tuple[tuple[re.Pattern[str], str], ...] = ()

    @classmethod
    def make(cls, *pairs: tuple[str, str]) -> FieldNames:
        """Return the mapping of pairs of a regular expression and its replacement."""
        return cls(tuple((re.compile(pattern), name) for pattern, name in pairs))

    def rename(self, error: E) -> E:
        """Return an error with this interface's field names, in its message, too."""
        old = error.field or ""
        for pattern, name in self.patterns:
            if match := pattern.match(old):
                new = match.expand(name) + old[match.end() :]
                # A copy, whatever else its class keeps: refusals are remembered and raised again.
                message = error.message.replace(old, new)
                made = type(error).__new__(type(error), message)
                made.__dict__.update(error.__dict__, message=message, field=new)
                return made.with_traceback(error.__traceback__)
        return error


@dataclass(frozen=True, slots=True)
class GenerationEndpoint:
    """An endpoint that generates.

    Attributes:
        parse: Parses a decoded JSON body for an account; raises ``InvalidRequestError``.
        id_prefix: Prefix of answers' identifiers.
        formatter: Chooses the formatter of a request.
        names: Field names of the interface.
        refusal: Makes the response for an error.
    """

    parse: Callable[[Any, Account | None], OpenAIRequest]
    id_prefix: str
    formatter: Callable[[OpenAIRequest, Sequence[PreparedRequest]], Formatter]
    names: FieldNames = field(default_factory=FieldNames)
    refusal: Refusal = answer_to


@dataclass(frozen=True, slots=True)
class PlainEndpoint:
    """An endpoint that takes a body and generates nothing.

    Attributes:
        schema: Schema of the body.
        answer: Answers a body for an account.
        names: Field names of the interface.
        refusal: Makes the response for an error.
    """

    schema: type[Body]
    answer: Callable[[Any, Account | None], Awaitable[Any]]
    names: FieldNames = field(default_factory=FieldNames)
    refusal: Refusal = answer_to


NONE = "none"
_PATHS: dict[int, str] = {path_to_pb(path): path.value for path in PrefillPath}
_NO_TRACE = common_pb2.RequestTrace()


class Route:
    """How one prompt was served, as far as it is known; makes the ``x-baton-*`` headers."""

    __slots__ = ("cached_tokens", "decision", "trace")

    def __init__(self) -> None:
        self.cached_tokens = 0
        self.trace: common_pb2.RequestTrace | None = None
        self.decision: Decision | None = None

    def add(self, chunk: TextChunk) -> None:
        """Add the trace and decision of a chunk; later traces are more complete."""
        if chunk.trace is not None:
            self.trace = chunk.trace
            self.cached_tokens = chunk.cached_tokens
        if chunk.decision is not None:
            self.decision = chunk.decision

    def row(self) -> tuple[Any, ...]:
        """Return the values of all headers, in the order of ``_HEADERS``."""
        trace = self.trace or _NO_TRACE
        decision = self.decision
        prefill = trace.prefill_instance
        decode = trace.decode_instance
        rate = 0.0
        state = ""
        if decision is not None:
            decode = decode or decision.decode_instance
            if self.trace is None:
                prefill = decision.prefill_instance
            rate = decision.match_rate_of(prefill or decode)
            state = decision.index_state
        return (
            _name(prefill),
            _name(decode),
            rate,
            _PATHS.get(trace.path, NONE),
            _name(trace.pipe),
            trace.kv_bytes,
            trace.transfer_us / 1000,
            trace.exposed_us / 1000,
            self.cached_tokens,
            _name(state),
            _name(trace.order),
            _name(trace.local_reason),
            trace.router_queue_us / 1000,
            trace.num_migrations,
        )


def route_lines(routes: Sequence[Route]) -> bytes:
    """Return the ``x-baton-*`` header lines of an answer.

    Args:
        routes: One per prompt; unknown ones are left out. Of several, names are listed, amounts summed, and match rates
            averaged.
    """
    rows = [route.row() for route in routes if route.trace is not None or route.decision is not None]
    if len(rows) == 1:
        return (_LINES % rows[0]).encode("latin-1")
    columns = zip(*(rows or [Route().row()]), strict=True)
    return (_LINES % tuple(merge(column) for merge, column in zip(_MERGES, columns, strict=True))).encode("latin-1")


@functools.lru_cache(1024)  # a few instances' names, again and again
def _name(value: str) -> str:
    return (value if value.isascii() and value.isprintable() else ascii(value)) if value else NONE


def _names(values: Iterable[str]) -> str:
    return ",".join(sorted({value for value in values if value != NONE})) or NONE


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


_HEADERS: tuple[tuple[str, str, Callable[[Any], Any]], ...] = (
    ("x-baton-prefill-instance", "%s", _names),
    ("x-baton-decode-instance", "%s", _names),
    ("x-baton-match-rate", "%.4f", _mean),
    ("x-baton-path", "%s", _names),
    ("x-baton-pipe", "%s", _names),
    ("x-baton-kv-bytes", "%d", sum),
    ("x-baton-transfer-ms", "%.3f", sum),
    ("x-baton-exposed-ms", "%.3f", sum),
    ("x-baton-cached-tokens", "%d", sum),
    ("x-baton-index-state", "%s", _names),
    ("x-baton-order", "%s", _names),
    ("x-baton-local-reason", "%s", _names),
    ("x-baton-queue-ms", "%.3f", sum),
    ("x-baton-migrations", "%d", sum),
)
"""Name, format, and merge of the values of several prompts, per header."""
_LINES = "".join(f"{name}: {form}\r\n" for name, form, _ in _HEADERS)
_MERGES = [merge for _, _, merge in _HEADERS]


log = logging.getLogger(__name__)

_JSON_HEADER = b"content-type: application/json\r\n"
_EVENT_HEADERS = (
    b"content-type: text/event-stream; charset=utf-8\r\ncache-control: no-cache\r\nx-accel-buffering: no\r\n"
)


_BYTES_PER_TOKEN = 4.0
_INLINE_LOGPROBS = 4096
"""Answers with more log probabilities are encoded in a thread: that takes some microseconds for each."""
_MAX_LOGPROBS = 2**22
"""Log probabilities that answers in one piece hold together, about 130 bytes each; beyond, large ones are refused."""
_LARGE_SHARE = 1 / 16
"""Share of these from which on an answer is large."""


class PostEndpoints:
    """Serves the exchanges of all endpoints that take a body; see ``protocol.Handler``.

    Args:
        processor: Runs the generations.
        options: Limits.
        metrics: Metrics of the HTTP front.
        steps: The router's turn batcher.
        endpoints: Endpoints by path.

    Attributes:
        paths: Paths of the endpoints, from bytes to text.
        deadlines: Deadlines of running requests.
        budget: Memory for bodies.
        encoders: Threads that encode large answers.
        num_logprobs: Log probabilities that answers in one piece hold.
        speculative_prefill: Prefills next turns; ``None``: nothing does.
    """

    def __init__(
        self,
        processor: InputProcessor,
        options: HttpOptions,
        metrics: HttpMetrics,
        steps: TurnBatcher,
        endpoints: Mapping[str, GenerationEndpoint | PlainEndpoint],
    ) -> None:
        self.processor = processor
        self.options = options
        self.metrics = metrics
        self.steps = steps
        self.deadlines = Deadlines(options.request_timeout_s)
        self.budget = BodyBudget()
        self._decoder = BodyDecoder()
        self.encoders = TurnThreads(2, "answer encoder", "large answers encoded", per_tenant=1)
        self.num_logprobs = 0
        self.speculative_prefill: SpeculativePrefill | None = None
        self._endpoints = endpoints
        self._tasks = set[asyncio.Task[None]]()
        self.paths: Mapping[bytes, str] = {path.encode(): path for path in endpoints}

    def check_head(self, exchange: HttpExchange) -> Exception | None:
        """Give a request its id, and check host, API key, its tenant's limits and body headers; return its error."""
        headers = exchange.headers
        options = self.options
        exchange.request_id = request_id(headers)
        exchange.common = b"x-request-id: %b\r\n" % exchange.request_id.encode()
        if exchange.path.startswith("/v1/messages"):  # the header that Anthropic's SDKs read
            exchange.common += b"request-id: %b\r\n" % exchange.request_id.encode()
        if options.cors_origins:
            exchange.common += cors_lines(headers, options.cors_origins)
        try:
            if options.hosts is not None:
                options.hosts.check(headers)
            if options.accounts is not None:
                exchange.account = identify(options.accounts, headers, endpoint=exchange.path, peer=exchange.peer)
            if exchange.in_turn:  # else the requests before may be what the tenant may have at once
                self.processor.check_limits(exchange.account)  # before the body is read, which may be long
        except (BatonError, HTTPException) as error:
            return error.with_traceback(None)  # the request keeps it, but not its frames, which have the bytes read
        except Exception as error:
            return error
        return check_media(headers, exchange.max_body_bytes)

    def max_body_bytes(self) -> int:
        """Return the longest body that is read now: as many bytes as the served model's context can be worth."""
        most = self.options.max_body_bytes
        if most is not None:
            return most
        try:
            return max_body_bytes(self.processor.model_info().max_model_len)
        except BatonError:
            return MAX_BODY_BYTES  # it is refused for that when it is served

    def serve(self, exchange: Exchange, body: bytes | bytearray) -> None:
        """Serve a request, now or later."""
        endpoint = self._endpoints[exchange.path]
        if len(body) > INLINE_BYTES:
            self._begin(exchange, self._serve_large(exchange, endpoint, body))
            return
        if len(body) > SMALL_BYTES:
            self._begin(exchange, self._serve_in_turn(exchange, endpoint, body))
            return
        try:
            value = decode_json(body)
            exchange.close_body()
            if _refers_to_stored(value):
                self._begin(exchange, self._serve_in_turn(exchange, endpoint, value))
            elif isinstance(endpoint, PlainEndpoint):
                self._begin(exchange, self._serve_plain(exchange, endpoint, value))
            else:
                self._prepare(exchange, endpoint, value)
        except Exception as error:
            self.refuse(exchange, error)

    def _prepare(self, exchange: Exchange, endpoint: GenerationEndpoint, value: Any) -> None:
        self.steps.schedule(PREPARE, Generation.prepare, self._generation(exchange, endpoint, value))

    def _generation(self, exchange: Exchange, endpoint: GenerationEndpoint, value: Any) -> Generation:
        request = endpoint.parse(value, exchange.account)
        apply_headers(request.requests, exchange.headers, exchange.account)
        return Generation(self, exchange, endpoint, request)

    async def _serve_large(
        self, exchange: Exchange, endpoint: GenerationEndpoint | PlainEndpoint, body: bytes | bytearray
    ) -> None:
        """Decode a body in a thread, and serve it; one that is refused counts against its tenant's limits, too."""
        try:
            with self.processor.charge(exchange.account, len(body) / _BYTES_PER_TOKEN) as charge:
                value = await self._decoder.decode(exchange.tenant, body)
                exchange.close_body()
                async with self.processor.turns.turn(exchange.tenant):
                    if not isinstance(endpoint, PlainEndpoint):
                        self._prepare(exchange, endpoint, value)
                charge.drop()  # what follows is counted by itself
        except Exception as error:
            self.refuse(exchange, error)
            return
        if isinstance(endpoint, PlainEndpoint):
            await self._serve_plain(exchange, endpoint, value)

    async def _serve_in_turn(
        self, exchange: Exchange, endpoint: GenerationEndpoint | PlainEndpoint, body: bytes | bytearray | Any
    ) -> None:
        """Serve a request whose body, encoded or not, takes milliseconds to parse: one per turn of the event loop.

        So others wait for one of them, however many come at once.
        """
        try:
            async with self.processor.turns.turn(exchange.tenant):
                value = body
                if isinstance(body, bytes | bytearray):
                    value = decode_json(body)
                    exchange.close_body()
                if not isinstance(endpoint, PlainEndpoint):
                    self._prepare(exchange, endpoint, value)
        except Exception as error:
            self.refuse(exchange, error)
            return
        if isinstance(endpoint, PlainEndpoint):
            await self._serve_plain(exchange, endpoint, value)  # its own parsing is in this turn, too

    def _begin(self, exchange: Exchange, work: Coroutine[Any, Any, None]) -> None:
        task = create_task(
            work, "request", detail=exchange.request_id, on_failure=functools.partial(self.refuse, exchange)
        )
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        exchange.on_gone = task.cancel

    async def _serve_plain(self, exchange: Exchange, endpoint: PlainEndpoint, value: Any) -> None:
        try:
            schema = endpoint.schema
            body = parse_body(schema, value)
            headers = self.ignored_fields_header(ignored_fields(unknown_fields(schema, value), schema.outside))
            answer = orjson.dumps(await endpoint.answer(body, exchange.account))
        except Exception as error:
            self.refuse(exchange, error)
        else:
            exchange.respond(200, headers + _JSON_HEADER, answer)

    def refuse(self, exchange: Exchange, error: BaseException) -> None:
        """Respond to a request with an error; with a plain 500 if there is no response for it."""
        try:
            if exchange.status:
                raise InternalError("an answer that has begun cannot become another") from error
            self._respond_error(exchange, error)
        except Exception as failure:
            hide(failure, exchange)
            exchange.fail()

    def _respond_error(self, exchange: Exchange, error: BaseException) -> None:
        if not isinstance(error, BatonError | HTTPException):
            error = hide(error, exchange)
        endpoint = self._endpoints[exchange.path]
        if isinstance(error, BatonError) and error.field:
            error = endpoint.names.rename(error)
        response = endpoint.refusal(error)
        lines = [b"%b: %b\r\n" % header for header in response.raw_headers if header[0] not in _OWN_HEADERS]
        exchange.respond(response.status_code, b"".join(lines), bytes(response.body))

    def ignored_fields_header(self, ignored: list[str]) -> bytes:
        """Return the header line that lists fields without effect; empty if there are none.

        Raises:
            InvalidRequestError: There are some, and the options refuse them.
        """
        if not ignored:
            return b""
        check_strict(ignored, self.options.strict_fields)
        self.metrics.count_ignored(ignored)
        return f"x-baton-ignored-fields: {header_value(ignored)}\r\n".encode("latin-1")


def clipped_header(requests: Sequence[TextRequest]) -> bytes:
    """Return the header line that lists the fields that asked for more than they got; empty if there are none."""
    clipped = {name for request in requests for name in request.clipped}
    return f"x-baton-clipped: {', '.join(sorted(clipped))}\r\n".encode() if clipped else b""


def _refers_to_stored(value: Any) -> bool:
    """Whether a body goes on with a stored conversation, which may be of any length."""
    return isinstance(value, dict) and bool(value.get("previous_response_id") or value.get("thread"))


class Generation:
    """One HTTP request while it is served: all its prompts, and its answer.

    A streamed answer starts with the first chunk, so that errors before it have their own status.
    """

    __slots__ = (
        "_answer",
        "_encoding",
        "_ended",
        "_endpoint",
        "_endpoints",
        "_exchange",
        "_formatter",
        "_headers",
        "_name",
        "_num_logprobs",
        "_num_unfinished",
        "_prepared",
        "_preparing",
        "_request",
        "_routes",
        "_running",
        "_stall_timer",
        "_started",
        "_unsent",
    )

    def __init__(
        self, endpoints: PostEndpoints, exchange: Exchange, endpoint: GenerationEndpoint, request: OpenAIRequest
    ) -> None:
        self._endpoints = endpoints
        self._exchange = exchange
        self._endpoint = endpoint
        self._request = request
        self._name = f"{request.ident or endpoint.id_prefix}-{exchange.request_id}"
        self._headers = b""
        self._answer: Choice | None = None
        """The answer so far, if the next turn is to be prefilled."""
        self._prepared: list[PreparedRequest] = []
        self._preparing: asyncio.Task[None] | None = None
        self._encoding: asyncio.Task[None] | None = None
        self._routes = [Route() for _ in request.requests]
        self._running: list[Running] = []
        self._num_unfinished = len(request.requests)
        self._num_logprobs = 0
        self._formatter: WholeAnswer | EventStream | None = None
        self._ended = self._started = False
        self._stall_timer: asyncio.TimerHandle | None = None
        self._unsent = b""
        exchange.on_gone = self._close
        exchange.on_flow = self._flow
        endpoints.deadlines.add(self)

    def prepare(self) -> None:
        """Check and tokenize the prompts, and start the generation; at once for a single short prompt."""
        if self._ended:
            return
        requests = self._request.requests
        processor = self._endpoints.processor
        try:
            prepared = processor.prepare_now(requests[0], fallback_id=self._name) if len(requests) == 1 else None
        except Exception as error:
            self._fail(error)
            return
        if prepared is not None:
            self._prepared.append(prepared)
            self._endpoints.steps.schedule(START, Generation._start, self)
        else:
            self._preparing = create_task(
                self._prepare(), "preparation", detail=self._exchange.request_id, on_failure=self._fail
            )

    async def _prepare(self) -> None:
        try:
            for request in self._request.requests:
                self._prepared.append(await self._endpoints.processor.prepare(request, fallback_id=self._name))
        except Exception as error:
            self._preparing = None
            self._fail(error)
            return
        self._preparing = None
        self._endpoints.steps.schedule(START, Generation._start, self)

    def _start(self) -> None:
        if self._ended:
            return
        try:
            endpoints = self._endpoints
            request = self._request
            prepared = self._prepared
            ignored = request.ignored
            if request.template_fields or request.reasoning_fields:
                ignored = ignored + _without_effect(request, prepared[0])
            if prepared[0].request.speculative_prefill:
                if endpoints.speculative_prefill is None or not request.chat or request.n > 1:
                    ignored = [*ignored, "nvext.agent_hints.speculative_prefill"]
                else:
                    self._answer = Choice()
            self._headers = endpoints.ignored_fields_header(ignored) + clipped_header(request.requests)
            form = self._endpoint.formatter(request, prepared)
            self._formatter = form(request, prepared, self._name, int(time.time()))
            self._generate()
        except Exception as error:
            self._fail(error)

    def _generate(self) -> None:
        for item in self._prepared:
            running = self._endpoints.processor.start(item, self)
            if self._ended:  # by an error, or because the client has gone
                running.cancel()
                return
            self._running.append(running)
        if self._exchange.paused:  # by the previous answer on the connection
            self._flow(True)

    # --- called by the output processor ---

    def on_chunk(self, chunk: TextChunk) -> None:
        """Write a chunk of one prompt."""
        if self._ended:
            return
        try:
            if chunk.trace is not None or chunk.decision is not None:
                self._routes[chunk.prompt_index].add(chunk)
            if self._answer is not None:
                for delta in chunk.deltas:
                    self._answer.add(delta)
            assert self._formatter is not None
            data = self._formatter.add(chunk)
            if self._request.stream:
                self._send(data)
            elif isinstance(form := self._formatter, WholeAnswer) and form.num_logprobs:
                self._count_logprobs(form.num_logprobs)
        except Exception as error:
            self._fail(error)

    def _count_logprobs(self, count: int) -> None:
        """Count the log probabilities that the answer holds.

        Raises:
            OverloadedError: All answers hold too many, and this one a large part of them.
        """
        endpoints = self._endpoints
        endpoints.num_logprobs += count - self._num_logprobs
        self._num_logprobs = count
        if endpoints.num_logprobs > _MAX_LOGPROBS and count > _MAX_LOGPROBS * _LARGE_SHARE:
            message = f"the answer has more than {count} log probabilities, too many for one piece now: use stream"
            raise OverloadedError(message, retry_after_s=5.0)

    def token_writer(
        self, token_ids: list[int], clock: GenerationClock, count_tokens: Callable[[int], None]
    ) -> TokenWriter | None:
        """Return a writer that makes events of tokens; the events before them are sent in this turn."""
        form = self._formatter
        exchange = self._exchange
        if self._ended or not self._started or not exchange.chunked or not isinstance(form, EventStream):
            return None
        if self._answer is not None:  # it wants all tokens
            return None
        return form.token_writer(exchange.send_chunks, token_ids, clock, count_tokens)

    def _send(self, data: bytes) -> None:
        exchange = self._exchange
        if not self._started:
            self._started = True
            exchange.start(200, self._head() + _EVENT_HEADERS)
            if not data:  # the first token is half a character: the client need not wait for the headers
                exchange.send_head()
        if data:
            if not self._unsent:
                self._endpoints.steps.schedule(RESPOND, Generation._write, self)
            self._unsent += data

    def _write(self) -> None:
        """Send the events of this turn, after those of all other streams are made."""
        data = self._unsent
        self._unsent = b""
        if data and not self._ended:
            self._exchange.send(data)

    def on_end(self, error: Exception | None) -> None:
        """End the generation of one prompt; the first error ends all."""
        if self._ended:
            return
        if error is not None:
            self._fail(error)
            return
        self._num_unfinished -= 1
        if self._num_unfinished:
            return
        if self._request.stream:
            self._finish()
        elif isinstance(form := self._formatter, WholeAnswer) and form.num_logprobs > _INLINE_LOGPROBS:
            self._encoding = create_task(
                self._encode(form), "answer", detail=self._exchange.request_id, on_failure=self._fail
            )
        else:  # written in the same step as others
            self._endpoints.steps.schedule(RESPOND, Generation._finish, self)

    async def _encode(self, form: WholeAnswer) -> None:
        try:
            await self._endpoints.encoders.run(self._exchange.tenant, form.encode)
        except Exception as error:
            self._encoding = None
            self._fail(error)
            return
        self._encoding = None
        self._finish()
        asyncio.get_running_loop().run_in_executor(None, return_free_memory)  # the allocator would keep it

    def _finish(self) -> None:
        if self._ended:
            return
        try:
            assert self._formatter is not None
            data = self._formatter.end()
            head = self._head() if not self._started else b""
        except Exception as failure:
            self._fail(failure)
            return
        self._close()
        try:
            if self._started:
                self._exchange.finish(self._unsent + data)
            else:
                self._exchange.respond(200, head + _JSON_HEADER, data)
        except Exception as failure:
            hide(failure, self._exchange)
            self._exchange.fail()
        if self._answer is not None and (prefill := self._endpoints.speculative_prefill) is not None:
            prefill.start(self._prepared[0], self._answer)

    def _head(self) -> bytes:
        """Return the header lines of an answer, without those of its body."""
        return route_lines(self._routes) + self._headers

    # --- other events ---

    def expire(self) -> None:
        """Fail: the request's deadline has passed."""
        self._fail(DeadlineError(f"the request took longer than {self._endpoints.options.request_timeout_s:g} s"))

    def _flow(self, paused: bool) -> None:
        """Pause the generation while the client reads too slowly, for a limited time."""
        if self._stall_timer is not None:
            self._stall_timer.cancel()
            self._stall_timer = None
        if paused:
            limit = self._endpoints.options.send_timeout_s
            self._stall_timer = asyncio.get_running_loop().call_later(limit, self._stalled)
        for running in list(self._running):
            running.set_paused(paused)

    def _stalled(self) -> None:
        self._close()
        self._exchange.abort()

    def _fail(self, error: BaseException) -> None:
        """Respond with an error, or end a started stream with one."""
        if self._ended:
            return
        self._close()
        exchange = self._exchange
        if not self._started:
            self._endpoints.refuse(exchange, error)
            return
        try:
            exchange.finish(self._unsent + self._error_event(error))
        except Exception as failure:
            hide(failure, exchange)
            exchange.fail()

    def _error_event(self, error: BaseException) -> bytes:
        assert isinstance(self._formatter, EventStream)
        if not isinstance(error, BatonError):
            self._exchange.status = 500  # for the metrics: the head with 200 is sent
            error = hide(error, self._exchange)
        elif error.field:
            error = self._endpoint.names.rename(error)
        return self._formatter.error(error)

    def _close(self) -> None:
        if self._ended:
            return
        self._ended = True
        self._endpoints.num_logprobs -= self._num_logprobs
        self._exchange.on_gone = self._exchange.on_flow = None
        self._endpoints.deadlines.discard(self)
        if self._stall_timer is not None:
            self._stall_timer.cancel()
        if self._preparing is not None:
            self._preparing.cancel()
        if self._encoding is not None:
            self._encoding.cancel()
        for running in self._running:
            try:
                running.cancel()
            except Exception as failure:  # the others must end, too, and the client needs its answer
                hide(failure, self._exchange)
        self._running.clear()  # breaks the reference cycle, so that everything is freed at once


_OWN_HEADERS = frozenset({b"content-length", b"connection"})
"""Headers of error responses that the exchange writes itself."""


def hide(error: BaseException, exchange: Exchange) -> InternalError:
    """Log an error that clients must not see, and return the one for them."""
    log.error(
        "request %s to %s failed",
        exchange.request_id,
        exchange.path,
        exc_info=error,
        extra={"request_id": exchange.request_id},
    )
    return InternalError(INTERNAL_TEXT)


def _without_effect(request: OpenAIRequest, prepared: PreparedRequest) -> list[str]:
    """Return fields without effect: variables that the chat template does not read, and unknown reasoning."""
    template = prepared.text_model.chat_template
    read = template.variables if template is not None else frozenset()
    reasons = prepared.anchors is not None and prepared.anchors.reasoning is not None
    names = [name for variable, name in request.template_fields.items() if variable not in read]
    return names if reasons else names + request.reasoning_fields
