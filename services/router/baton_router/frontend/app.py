"""The HTTP app: what generates by callbacks, all other endpoints by FastAPI."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI
from prometheus_client import CollectorRegistry
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response

from baton.errors import InternalError
from baton.version import __version__
from baton_router.dispatch.event_loop import TurnBatcher
from baton_router.dispatch.interface import Dispatcher
from baton_router.frontend.http import errors
from baton_router.frontend.http.metrics import HttpMetrics
from baton_router.frontend.http.middleware import AccessCheck, HttpMiddleware
from baton_router.frontend.http.options import HttpOptions
from baton_router.frontend.openai.generation import GenerationEndpoints
from baton_router.frontend.openai.other_endpoints import Health, Models, TokenizerEndpoints
from baton_router.frontend.openai.schemas import (
    Body,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    TokenizeBody,
    json_schemas,
)
from baton_router.processor.input_processor import InputProcessor

Endpoint = Callable[[Request], Awaitable[Response]]


@dataclass(frozen=True, slots=True)
class HttpFront:
    """The HTTP interface, for ``uvicorn.Config(front.app, http=HttpProtocol.serving(front.generation))``.

    Attributes:
        app: All endpoints but those that generate, which it has in its documentation alone.
        generation: The endpoints that generate.
    """

    app: FastAPI
    generation: GenerationEndpoints


def create_app(
    processor: InputProcessor,
    dispatcher: Dispatcher,
    *,
    registry: CollectorRegistry,
    options: HttpOptions | None = None,
    ready: Callable[[], bool] | None = None,
    steps: TurnBatcher | None = None,
) -> HttpFront:
    """Build the HTTP interface.

    Args:
        processor: Runs the requests.
        dispatcher: The one below the processor; asked for readiness if ``ready`` is not given.
        registry: Takes the HTTP metrics, and is what ``/metrics`` shows.
        options: Options; default: all defaults.
        ready: Whether at least one decode instance is ready.
        steps: Of this router's requests; default: HTTP has its own.
    """
    options = options or HttpOptions()
    metrics, access = HttpMetrics(registry), AccessCheck(options.accounts)
    app = _DocumentedApp(title="Baton", version=__version__, redoc_url=None)
    errors.install(app)
    app.add_middleware(HttpMiddleware, access=access, metrics=metrics)
    if options.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(options.cors_origins),
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=["*"],
        )
    tokenizer = TokenizerEndpoints(processor, options, metrics)
    models = Models(processor)
    health = Health(ready or (lambda: dispatcher.model_info() is not None), registry)
    _add(app, "POST", "/v1/chat/completions", _served_by_the_protocol, ChatBody)
    _add(app, "POST", "/v1/completions", _served_by_the_protocol, CompletionBody)
    _add(app, "POST", "/tokenize", tokenizer.tokenize, TokenizeBody)
    _add(app, "POST", "/detokenize", tokenizer.detokenize, DetokenizeBody)
    _add(app, "GET", "/v1/models", models.list)
    _add(app, "GET", "/v1/models/{model:path}", models.get)
    _add(app, "GET", "/health", health.health)
    _add(app, "GET", "/readyz", health.ready)
    _add(app, "GET", "/metrics", health.metrics)
    _add(app, "GET", "/version", health.version)
    return HttpFront(app, GenerationEndpoints(processor, options, metrics, access, steps or TurnBatcher()))


class _DocumentedApp(FastAPI):
    """An app whose ``/openapi.json`` has the schemas of bodies that FastAPI doesn't read."""

    def openapi(self) -> dict[str, Any]:
        """Return the OpenAPI document."""
        document = super().openapi()
        schemas = document.setdefault("components", {}).setdefault("schemas", {})
        schemas.update(json_schemas((ChatBody, CompletionBody, TokenizeBody, DetokenizeBody)))
        return document


async def _served_by_the_protocol(request: Request) -> Response:
    """Stand for an endpoint in the documentation: its requests reach it only where the server is set up wrongly."""
    raise InternalError("this server does not use Baton's HTTP protocol, which serves this endpoint")


def _add(app: FastAPI, method: str, path: str, endpoint: Endpoint, body: type[Body] | None = None) -> None:
    """Add a route that takes the bare request; the body's schema is for the documentation alone."""
    extra: dict[str, Any] = {}
    if body is not None:
        schema = {"$ref": f"#/components/schemas/{body.__name__}"}
        extra["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
    name = path.strip("/").replace("/", "_")
    app.add_api_route(path, endpoint, methods=[method], response_class=Response, openapi_extra=extra, name=name)
    if method == "GET":  # whatever can be got can be asked for without its body
        app.add_api_route(path, endpoint, methods=["HEAD"], response_class=Response, include_in_schema=False)
