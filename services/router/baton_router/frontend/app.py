"""The HTTP app."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from prometheus_client import CollectorRegistry
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response

from baton.version import __version__
from baton_router.dispatch.interface import Dispatcher
from baton_router.dispatch.turn_batching import Steps
from baton_router.frontend.http import errors
from baton_router.frontend.http.direct import DirectApp, Endpoint, RouterHttp
from baton_router.frontend.http.metrics import HttpMetrics
from baton_router.frontend.http.middleware import Front
from baton_router.frontend.http.options import HttpOptions
from baton_router.frontend.openai.express import Express
from baton_router.frontend.openai.generation import Generations
from baton_router.frontend.openai.meta import Health, Models, TokenizerEndpoints
from baton_router.frontend.openai.schemas import Body, ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from baton_router.processor.input_processor import InputProcessor


def create_app(
    pipeline: InputProcessor,
    dispatcher: Dispatcher,
    *,
    registry: CollectorRegistry,
    options: HttpOptions | None = None,
    ready: Callable[[], bool] | None = None,
    lifespan: Any = None,
    steps: Steps | None = None,
) -> RouterHttp:
    """Build the app.

    Args:
        pipeline: Runs the requests.
        dispatcher: The one below the pipeline; asked for readiness if ``ready`` is not given.
        registry: Takes the HTTP metrics, and is what ``/metrics`` shows.
        options: Options; default: all defaults.
        ready: Whether at least one decode instance is ready.
        lifespan: Starts and stops what belongs to the app, as FastAPI takes it.
        steps: Of this router's requests; default: HTTP has its own.
    """
    options = options or HttpOptions()
    metrics = HttpMetrics(registry)
    app = RouterHttp(
        send_timeout_s=options.send_timeout_s, title="Baton", version=__version__, lifespan=lifespan, redoc_url=None
    )
    errors.install(app)
    app.add_middleware(Front, accounts=options.accounts, metrics=metrics)
    if options.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(options.cors_origins),
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=["*"],
        )

    generations = Generations(pipeline, options, metrics)
    tokenizer = TokenizerEndpoints(pipeline, options, metrics)
    models = Models(pipeline)
    health = Health(ready or (lambda: dispatcher.model_info() is not None), registry)
    _add(app, "POST", "/v1/chat/completions", generations.chat, ChatBody)
    _add(app, "POST", "/v1/completions", generations.completions, CompletionBody)
    _add(app, "POST", "/tokenize", tokenizer.tokenize, TokenizeBody)
    _add(app, "POST", "/detokenize", tokenizer.detokenize, DetokenizeBody)
    _add(app, "GET", "/v1/models", models.list)
    _add(app, "GET", "/v1/models/{model:path}", models.get)
    _add(app, "GET", "/health", health.health)
    _add(app, "GET", "/readyz", health.ready)
    _add(app, "GET", "/metrics", health.metrics)
    _add(app, "GET", "/version", health.version)
    if not options.cors_origins:  # which a middleware of the framework looks after
        direct = DirectApp({"/v1/chat/completions": generations.chat, "/v1/completions": generations.completions})
        front = Front(direct, accounts=options.accounts, metrics=metrics)
        app.serve_directly(direct, front, Express(generations, front, options, steps or Steps()))
    return app


def _add(app: RouterHttp, method: str, path: str, endpoint: Endpoint, body: type[Body] | None = None) -> None:
    """Add a route that takes the bare request; the body's schema is for the documentation alone."""
    extra: dict[str, Any] = {}
    if body is not None:
        schema = body.model_json_schema(ref_template="#/components/schemas/{model}")
        schema.pop("$defs", None)
        extra["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
    app.add_api_route(path, endpoint, methods=[method], response_class=Response, openapi_extra=extra)
    if method == "GET":  # whatever can be got can be asked for without its body
        app.add_api_route(path, endpoint, methods=["HEAD"], response_class=Response, include_in_schema=False)
