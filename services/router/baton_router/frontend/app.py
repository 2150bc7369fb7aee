"""The HTTP app. Endpoints with a body are served by the protocol (``openai/generation.py``), others by FastAPI."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import grpc.aio
import msgspec
import orjson
from fastapi import FastAPI
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response

from baton.api.v1 import worker_pb2
from baton.dialects.tool_use import read_tools
from baton.errors import BatonError, InternalError, InvalidRequestError, UnavailableError
from baton.rpc.audit import audit
from baton.rpc.errors import call_unary, from_rpc_error
from baton.types import SamplingParams
from baton.version import __version__
from baton_router.dispatch.event_loop import TurnBatcher
from baton_router.dispatch.interface import Dispatcher
from baton_router.frontend.anthropic.answer import message_formatter
from baton_router.frontend.anthropic.errors import refusal
from baton_router.frontend.anthropic.messages import NAMES as MESSAGE_NAMES
from baton_router.frontend.anthropic.messages import count_request, parse_message
from baton_router.frontend.anthropic.schemas import CountTokensBody
from baton_router.frontend.batches.endpoints import BatchEndpoints, BatchLimits
from baton_router.frontend.batches.schemas import CreateBatchBody
from baton_router.frontend.document import OPERATIONS, openapi
from baton_router.frontend.http import errors
from baton_router.frontend.http.errors import json_response
from baton_router.frontend.http.middleware import (
    HttpMetrics,
    HttpMiddleware,
    HttpOptions,
    account_of,
    require_admin,
)
from baton_router.frontend.openai.answer import chat_formatter, plain_formatter
from baton_router.frontend.openai.generation import GenerationEndpoint, PlainEndpoint, PostEndpoints
from baton_router.frontend.openai.openai_request import chat_prompt, parse_chat, parse_completion
from baton_router.frontend.openai.response_store import ResponseStore
from baton_router.frontend.openai.responses import NAMES as RESPONSE_NAMES
from baton_router.frontend.openai.responses import ResponsesBody, parse_response, read_response, response_formatter
from baton_router.frontend.openai.schemas import DetokenizeBody, TokenizeBody, invalid_field
from baton_router.processor.input_processor import InputProcessor, about_tokens, count_chars
from baton_router.processor.text_request import Prompt, TextRequest
from baton_router.registry.instance import Instance, Status
from baton_router.registry.registry import Registry
from baton_router.types import Account, ModelInfo

_INLINE_TOKENS = 4096
_RESET_S = 30.0
_LEAST_BOUND = 2**20
"""Characters and tokens that ``/tokenize`` and ``/detokenize`` accept, whatever the model's context."""

Endpoint = Callable[[Request], Awaitable[Response]]


@dataclass(frozen=True, slots=True)
class HttpFront:
    """The HTTP interface, for ``uvicorn.Config(front.app, http=HttpProtocol.serving(front.posts))``.

    Attributes:
        app: All endpoints but those that take a body.
        posts: The endpoints that take a body.
    """

    app: FastAPI
    posts: PostEndpoints


def create_app(
    processor: InputProcessor,
    dispatcher: Dispatcher,
    *,
    registry: CollectorRegistry,
    options: HttpOptions | None = None,
    ready: Callable[[], bool] | None = None,
    refused: Callable[[], Mapping[str, int]] = dict,
    steps: TurnBatcher | None = None,
    batches: BatchEndpoints | None = None,
) -> HttpFront:
    """Build the HTTP interface.

    Args:
        processor: Runs the requests.
        dispatcher: The processor's dispatcher; tells readiness if ``ready`` is not given.
        registry: Registry for the HTTP metrics, which ``/metrics`` shows.
        options: Options of the HTTP front.
        ready: Returns whether at least one decode instance is ready.
        refused: Returns the number of refused instances per role.
        steps: The router's turn batcher; ``None`` creates one.
        batches: Endpoints of files and batches; ``None``: they refuse all requests.
    """
    batches = batches or BatchEndpoints(None, BatchLimits())
    options = options or HttpOptions()
    metrics = HttpMetrics(registry)
    # A redirect to the path without its slash would contain the host that the client named.
    app = FastAPI(openapi_url=None, redirect_slashes=False)
    errors.install(app, [f"{method} {path}" for method, path in OPERATIONS])
    app.add_middleware(HttpMiddleware, options=options, metrics=metrics, turns=processor.turns)
    if options.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(options.cors_origins),
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],
            expose_headers=["*"],
        )
    tokenizer = TokenizerEndpoints(processor)
    models = Models(processor)
    health = Health(ready or (lambda: dispatcher.model_info() is not None), refused, registry)
    document = orjson.dumps(openapi(keyed=options.accounts is not None, metrics_port=options.metrics_port))
    store = ResponseStore(metrics.count_kept)
    endpoints: dict[str, GenerationEndpoint | PlainEndpoint] = {
        **openai_endpoints(options, store),
        "/v1/messages": GenerationEndpoint(
            functools.partial(parse_message, store=store), "msg", message_formatter, MESSAGE_NAMES, refusal
        ),
        "/v1/messages/count_tokens": PlainEndpoint(CountTokensBody, tokenizer.count, MESSAGE_NAMES, refusal),
        "/v1/responses/input_tokens": PlainEndpoint(
            ResponsesBody, functools.partial(tokenizer.count_input, store=store), RESPONSE_NAMES
        ),
        "/v1/batches": PlainEndpoint(CreateBatchBody, batches.create),
        "/tokenize": PlainEndpoint(TokenizeBody, tokenizer.tokenize),
        "/detokenize": PlainEndpoint(DetokenizeBody, tokenizer.detokenize),
    }
    for path in endpoints:
        if path != "/v1/batches":  # below, with its other methods
            _add(app, "POST", path, _served_by_the_protocol)
    app.add_api_route("/v1/responses", _refuse_socket, methods=["GET"], response_class=Response)
    _add(app, "GET", "/v1/responses/{response_id}/input_items", store.list_inputs)
    _add(app, "POST", "/v1/responses/{response_id}/cancel", store.cancel)
    # One route for both, so that the error for other methods lists all allowed ones.
    methods = ["GET", "HEAD", "DELETE"]
    app.add_api_route("/v1/responses/{response_id}", store.serve, methods=methods, response_class=Response)

    lists = ["GET", "HEAD", "POST"]
    app.add_api_route("/v1/files", batches.serve_files, methods=lists, response_class=Response)
    app.add_api_route("/v1/batches", batches.list_batches, methods=lists, response_class=Response)
    app.add_api_route("/v1/files/{file_id}", batches.serve_file, methods=methods, response_class=Response)
    _add(app, "GET", "/v1/files/{file_id}/content", batches.read_file)
    _add(app, "GET", "/v1/batches/{batch_id}", batches.serve_batch)
    _add(app, "POST", "/v1/batches/{batch_id}/cancel", batches.cancel)

    async def describe_interface(request: Request) -> Response:
        return Response(document, media_type="application/json")

    _add(app, "GET", "/openapi.json", describe_interface)
    _add(app, "GET", "/v1/models", models.list)
    _add(app, "GET", "/v1/models/{model:path}", models.get)
    _add(app, "GET", "/health", health.health)
    _add(app, "GET", "/readyz", health.ready)
    _add(app, "GET", "/metrics", health.metrics)
    _add(app, "GET", "/version", health.version)
    return HttpFront(app, PostEndpoints(processor, options, metrics, steps or TurnBatcher(), endpoints))


def openai_endpoints(options: HttpOptions, store: ResponseStore) -> dict[str, GenerationEndpoint]:
    """Return OpenAI's endpoints that generate, by path."""
    bounds = {"max_prompts": options.max_prompts, "max_sequences": options.max_sequences}
    return {
        "/v1/chat/completions": GenerationEndpoint(lambda value, _: parse_chat(value), "chatcmpl", chat_formatter),
        "/v1/completions": GenerationEndpoint(
            lambda value, _: parse_completion(value, **bounds), "cmpl", plain_formatter
        ),
        "/v1/responses": GenerationEndpoint(
            functools.partial(parse_response, store=store), "resp", response_formatter, RESPONSE_NAMES
        ),
    }


async def _refuse_socket(request: Request) -> Response:
    """Refuse a WebSocket for responses; with this status clients go on by POST at once, instead of trying again."""
    if "sec-websocket-key" in request.headers:  # the protocol ignores offers of upgrades and has removed this one
        raise HTTPException(426, "this server has no WebSocket for responses: POST them", {"upgrade": "HTTP/1.1"})
    raise HTTPException(405, headers={"allow": "POST"})


async def _served_by_the_protocol(request: Request) -> Response:
    """Placeholder of an endpoint that the protocol serves; requests reach it only in a misconfigured server."""
    raise InternalError("this server does not use Baton's HTTP protocol, which serves this endpoint")


def _add(app: FastAPI, method: str, path: str, endpoint: Endpoint) -> None:
    """Add a route that takes the bare request; ``document.py`` describes it."""
    # Whatever can be got can be asked for without its body.
    methods = ["GET", "HEAD"] if method == "GET" else [method]
    app.add_api_route(path, endpoint, methods=methods, response_class=Response)


_ANTHROPIC = "anthropic-version"
"""Header of Anthropic's clients: they get the fields of their interface, too."""


class Models:
    """Serves ``/v1/models``."""

    def __init__(self, processor: InputProcessor) -> None:
        self._processor = processor
        self._created = int(time.time())

    async def list(self, request: Request) -> Response:
        """Serve ``GET /v1/models``."""
        models = [self._model(info, request) for info in self._processor.model_info().aliases]
        body: dict[str, Any] = {"object": "list", "data": models}
        if _ANTHROPIC in request.headers:
            body |= {"has_more": False, "first_id": models[0]["id"], "last_id": models[-1]["id"]}
        return json_response(body)

    async def get(self, request: Request) -> Response:
        """Serve ``GET /v1/models/{id}``; without an id it is the list."""
        model = request.path_params["model"]
        if not model:
            return await self.list(request)
        return json_response(self._model(self._processor.model_info(model), request))

    def _model(self, info: ModelInfo, request: Request) -> dict[str, Any]:
        model = {
            "id": info.name,
            "object": "model",
            "created": self._created,
            "owned_by": "baton",
            "max_model_len": info.max_model_len,
        }
        if _ANTHROPIC in request.headers:
            created = datetime.fromtimestamp(self._created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
            model |= {"type": "model", "display_name": info.name, "created_at": created}
            model |= {"lifecycle": "active", "max_input_tokens": info.max_model_len, "max_tokens": info.max_model_len}
        return model


class TokenizerEndpoints:
    """Serves ``/tokenize`` and ``/detokenize``."""

    def __init__(self, processor: InputProcessor) -> None:
        self._processor = processor

    async def tokenize(self, body: TokenizeBody, account: Account | None) -> dict[str, Any]:
        info = self._processor.model_info(body.model or "")
        prompt = _prompt(body)
        field = "prompt" if body.messages is None else "messages"
        _check_length(prompt, info, field)
        text_request = TextRequest(
            prompt=prompt,
            sampling=SamplingParams(),
            cache_salt=_salt(account),
            account=account,
            prompt_field=field,
            # As in the completion endpoints: a rendered conversation has its special tokens already.
            add_special_tokens=(body.messages is None if body.add_special_tokens is None else body.add_special_tokens),
            allow_special_tokens=body.allow_special_tokens,
        )
        with self._processor.charge(account, about_tokens(prompt)) as charge:
            ids = list(await self._processor.tokenize(text_request, info))
            charge.tokens = len(ids)
            answer: dict[str, Any] = {"count": len(ids), "max_model_len": info.max_model_len, "tokens": ids}
            if body.return_token_strs:
                tokenizer = (await self._processor.text_model(info)).tokenizer

                def texts() -> list[str]:
                    return [tokenizer.token_text(token_id) for token_id in ids]

                few = len(ids) <= _INLINE_TOKENS
                answer["token_strs"] = texts() if few else await self._processor.in_turn(text_request, texts)
        return answer

    async def count(self, body: CountTokensBody, account: Account | None) -> dict[str, Any]:
        """Serve ``/v1/messages/count_tokens``: all tokens of the prompt, those of tools and template included."""
        return {"input_tokens": await self._count(count_request(body), account)}

    async def count_input(self, body: ResponsesBody, account: Account | None, store: ResponseStore) -> dict[str, Any]:
        """Serve ``/v1/responses/input_tokens``."""
        (request,) = read_response(body, account, store, []).requests
        request.sampling.validate()
        return {"object": "response.input_tokens", "input_tokens": await self._count(request, account)}

    async def _count(self, text_request: TextRequest, account: Account | None) -> int:
        info = self._processor.model_info(text_request.model)
        _check_length(text_request.prompt, info, text_request.prompt_field)
        text_request.account = account
        text_request.cache_salt = _salt(account)
        with self._processor.charge(account, about_tokens(text_request.prompt)) as charge:
            charge.tokens = len(await self._processor.tokenize(text_request, info))
            return int(charge.tokens)

    async def detokenize(self, body: DetokenizeBody, account: Account | None) -> dict[str, Any]:
        info = self._processor.model_info(body.model or "")
        most = max(_LEAST_BOUND, info.max_model_len)
        if len(body.tokens) > most:
            raise InvalidRequestError(f"tokens must be at most {most}, got {len(body.tokens)}", field="tokens")
        for at, token_id in enumerate(body.tokens):
            if not 0 <= token_id < info.vocab_size:
                raise invalid_field(f"tokens[{at}]", f"must be between 0 and {info.vocab_size - 1}")
        tokenizer = (await self._processor.text_model(info)).tokenizer
        decode = functools.partial(tokenizer.decode, body.tokens, bool(body.skip_special_tokens))
        with self._processor.charge(account, len(body.tokens)):
            if len(body.tokens) <= _INLINE_TOKENS:
                return {"prompt": decode()}
            request = TextRequest(body.tokens, SamplingParams(), account=account, cache_salt=_salt(account))
            return {"prompt": await self._processor.in_turn(request, decode)}


def _salt(account: Account | None) -> str:
    return account.salt("") if account is not None else ""


def _check_length(prompt: Prompt, info: ModelInfo, field: str) -> None:
    most = max(_LEAST_BOUND, 8 * info.max_model_len)
    if count_chars(prompt) > most:
        raise invalid_field(field, f"must have at most {most} characters")


class Health:
    """Serves the endpoints of probes and scrapers."""

    def __init__(
        self, ready: Callable[[], bool], refused: Callable[[], Mapping[str, int]], registry: CollectorRegistry
    ) -> None:
        self._ready = ready
        self._refused = refused
        self._registry = registry

    async def health(self, request: Request) -> Response:
        """Serve ``GET /health``: the process is up."""
        return json_response({"status": "ok"})

    async def ready(self, request: Request) -> Response:
        """Serve ``GET /readyz``: a decode instance is ready, and its model's tokenizer is loaded.

        Instances that are refused are counted by role: what is left serves without them.
        """
        try:
            ready = self._ready()
        except BatonError:
            ready = False
        refused = self._refused()
        body: dict[str, Any] = {"status": "ready" if ready else "not ready"}
        return json_response(body | ({"refused": refused} if refused else {}), 200 if ready else 503)

    async def metrics(self, request: Request) -> Response:
        """Serve ``GET /metrics``, which has all tenants' counters: with API keys, for administrators only."""
        require_admin(request)
        encode, media_type = choose_encoder(request.headers.get("accept", ""))
        return Response(encode(self._registry), media_type=media_type, headers={"vary": "Accept"})

    async def version(self, request: Request) -> Response:
        return json_response({"version": __version__})


def administer(app: FastAPI, processor: InputProcessor, registry: Registry) -> None:
    """Add ``/reset_prefix_cache`` (vLLM's name), ``/flush_cache`` (SGLang's) and ``/tokenizer_info`` to an app.

    Args:
        app: The app.
        processor: Processor with the tokenizer.
        registry: Registry of the instances.
    """

    async def reset(request: Request) -> Response:
        """Have every instance drop the cached blocks that no request uses; an error names those that did not."""
        require_admin(request)
        account = account_of(request)
        audit("deleted", over="http", account=account.name if account is not None else "", what="prefix caches")
        instances = [x for x in registry.instances() if x.status is Status.READY]
        if not instances:
            raise UnavailableError("no instance is ready")
        answers = await asyncio.gather(*(_reset(x) for x in instances))
        failed = [
            f"{x.instance_id} ({x.address}): {y}" for x, y in zip(instances, answers, strict=True) if isinstance(y, str)
        ]
        if failed:
            raise UnavailableError(f"these kept their prefix caches: {'; '.join(failed)}")
        return json_response({"blocks": {x.instance_id: y for x, y in zip(instances, answers, strict=True)}})

    async def tokenizer_info(request: Request) -> Response:
        """Return the model's ``tokenizer_config.json``, with its chat template."""
        require_admin(request)
        model = await processor.text_model(processor.model_info())
        template = model.chat_template.source if model.chat_template is not None else None
        tokenizer_class = model.config.get("tokenizer_class")
        return json_response({**model.config, "tokenizer_class": tokenizer_class, "chat_template": template})

    for path in ("/reset_prefix_cache", "/flush_cache"):
        _add(app, "POST", path, reset)
    _add(app, "GET", "/tokenizer_info", tokenizer_info)


async def _reset(instance: Instance) -> int | str:
    """Return the number of blocks that an instance dropped, or its error."""
    try:
        request = worker_pb2.ResetPrefixCacheRequest()
        answer = await call_unary(instance.stub.ResetPrefixCache, request, timeout=_RESET_S)
    except grpc.aio.AioRpcError as error:
        return from_rpc_error(error).message
    return int(answer.num_blocks)


def _prompt(body: TokenizeBody) -> Prompt:
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequestError("send prompt or messages, one of them", field="prompt")
    if body.prompt is not None:
        if body.tools:
            raise invalid_field("tools", "are for messages")
        return body.prompt
    use = read_tools(body.tools, None, None)
    return msgspec.structs.replace(chat_prompt(body, body.chat_template_kwargs or {}), tools=use.tools)
