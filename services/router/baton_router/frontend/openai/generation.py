"""The endpoints that generate: one job, streamed or not."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing, suppress
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from baton.errors import BatonError, InternalError
from baton_router.frontend.http.body import read_json
from baton_router.frontend.http.disconnect import ClientGone, RequestGuard
from baton_router.frontend.http.metrics import HttpMetrics
from baton_router.frontend.http.middleware import request_id
from baton_router.frontend.http.options import HttpOptions
from baton_router.frontend.http.protocol import DISCONNECT
from baton_router.frontend.openai.answer import AnswerBuilder
from baton_router.frontend.openai.batch import run_all
from baton_router.frontend.openai.events import EventWriter
from baton_router.frontend.openai.openai_request import Job, chat_job, completion_job
from baton_router.frontend.openai.request_headers import with_headers
from baton_router.frontend.openai.response_headers import Route, route_headers
from baton_router.frontend.openai.unsupported_params import check_strict, header_value
from baton_router.processor.input_processor import InputProcessor
from baton_router.processor.text_request import PreparedRequest, TextChunk

CLIENT_GONE_STATUS = 499


class Generations:
    """Serves ``/v1/chat/completions`` and ``/v1/completions``."""

    def __init__(self, pipeline: InputProcessor, options: HttpOptions, metrics: HttpMetrics) -> None:
        self.pipeline = pipeline
        self._options = options
        self._metrics = metrics

    async def chat(self, request: Request) -> Response:
        """Serve ``POST /v1/chat/completions``."""
        return await self._serve(request, self.chat_job, "chatcmpl")

    async def completions(self, request: Request) -> Response:
        """Serve ``POST /v1/completions``."""
        return await self._serve(request, self.completion_job, "cmpl")

    def chat_job(self, value: Any) -> Job:
        """Return the job of a chat request; see :func:`chat_job`."""
        return chat_job(value)

    def completion_job(self, value: Any) -> Job:
        """Return the job of a completion request; see :func:`completion_job`."""
        return completion_job(value, self._options.max_prompts)

    async def _serve(self, request: Request, parse: Callable[[Any], Job], prefix: str) -> Response:
        try:
            job = parse(await read_json(request, self._options))
            return await self._answer(request, job, f"{prefix}-{request_id(request.scope)}")
        except ClientGone:
            return Response(status_code=CLIENT_GONE_STATUS)  # nobody reads it; the metrics count it

    async def _answer(self, request: Request, job: Job, ident: str) -> Response:
        requests = with_headers(request.scope, job.requests)
        prepared = [await self.pipeline.prepare(item, fallback_id=ident) for item in requests]
        headers = self.headers_of(job, prepared[0])
        run = GenerationRun(self.pipeline, prepared, self._options, headers)
        created = int(time.time())
        if job.stream:
            return EventResponse(run, EventWriter(job, prepared, ident, created))
        builder = AnswerBuilder(job, prepared, ident, created)
        async with run.guard(request.scope, request.receive), aclosing(run.chunks()) as chunks:
            async for at, chunk in chunks:
                run.note(at, chunk)
                builder.add(at, chunk)
        content = orjson.dumps(builder.build())
        return Response(content, media_type="application/json", headers=run.headers())

    def headers_of(self, job: Job, prepared: PreparedRequest) -> dict[str, str]:
        """Return the headers that name a request's fields without effect.

        Raises:
            InvalidRequestError: There are some, and they are refused.
        """
        ignored = job.ignored
        if job.template_fields:
            ignored = ignored + _unread_variables(job, prepared)
        if not ignored:
            return {}
        check_strict(ignored, self._options.strict_fields)
        self._metrics.count_ignored(ignored)
        return {"x-baton-ignored-fields": header_value(ignored)}


class GenerationRun:
    """The generations of one job, and what is known of the way they went."""

    def __init__(
        self,
        pipeline: InputProcessor,
        prepared: Sequence[PreparedRequest],
        options: HttpOptions,
        headers: dict[str, str],
    ) -> None:
        self._pipeline = pipeline
        self._prepared = prepared
        self._options = options
        self._headers = headers
        self._routes = [Route() for _ in prepared]

    @property
    def send_timeout_s(self) -> float:
        """Seconds that sending a piece of the answer may take."""
        return self._options.send_timeout_s

    def guard(self, scope: Scope, receive: Receive) -> RequestGuard:
        """Return the guard under which to run."""
        return RequestGuard(
            receive,
            limit_s=self._options.request_timeout_s,
            send_timeout_s=self._options.send_timeout_s,
            on_disconnect=scope.get("extensions", {}).get(DISCONNECT, {}).get("call"),
        )

    def chunks(self) -> AsyncGenerator[tuple[int, TextChunk], None]:
        """Return the chunks of all prompts as they come, each with its prompt's place; tell :meth:`note` of them."""
        return run_all(self._pipeline, self._prepared)

    def note(self, at: int, chunk: TextChunk) -> None:
        """Remember which way a prompt's generation went."""
        if chunk.trace is not None or chunk.decision is not None:
            self._routes[at].add(chunk)

    def headers(self) -> dict[str, str]:
        """Return the response headers, with what is known by now."""
        return {**self._headers, **route_headers(self._routes)}


class EventResponse(Response):
    """A stream of events. It begins with the first token, so that errors before it have their own status."""

    media_type = "text/event-stream"

    def __init__(self, run: GenerationRun, writer: EventWriter) -> None:
        super().__init__()
        self._run = run
        self._writer = writer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the generation and send what comes."""
        started = False
        try:
            async with self._run.guard(scope, receive) as guard:
                async with aclosing(self._run.chunks()) as chunks:
                    async for at, chunk in chunks:
                        self._run.note(at, chunk)
                        data = self._writer.add(at, chunk)
                        first, started = not started, True
                        if first:
                            await guard.send(send, self._start())
                        if data or first:  # the client may wait for its headers, not for the first whole character
                            await guard.send(send, _body(data))
                await guard.send(send, _body(self._writer.end(), more=False))
        except ClientGone:
            return
        except Exception as error:
            if not started:
                raise
            known = isinstance(error, BatonError)
            shown = error if known else InternalError("something went wrong inside Baton")
            assert isinstance(shown, BatonError)
            with suppress(TimeoutError):  # who takes nothing is cut off: the server closes what was not ended
                async with asyncio.timeout(self._run.send_timeout_s):
                    await send(_body(self._writer.error(shown), more=False))
            if not known:
                raise

    def _start(self) -> dict[str, Any]:
        self.init_headers({**self._run.headers(), "cache-control": "no-cache", "x-accel-buffering": "no"})
        # The length of an empty body is no length of a stream.
        headers = [(name, value) for name, value in self.raw_headers if name != b"content-length"]
        return {"type": "http.response.start", "status": 200, "headers": headers}


def _body(data: bytes, *, more: bool = True) -> dict[str, Any]:
    return {"type": "http.response.body", "body": data, "more_body": more}


def _unread_variables(job: Job, prepared: PreparedRequest) -> list[str]:
    """Return the fields that set variables which the chat template doesn't read."""
    template = prepared.text_model.chat_template
    read = template.variables if template is not None else frozenset()
    return [name for variable, name in job.template_fields.items() if variable not in read]
