"""The endpoints that don't generate: models, tokenizer, health."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import orjson
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from starlette.requests import Request
from starlette.responses import Response

from baton.errors import BatonError, InvalidRequestError
from baton.tokenizer import Tokenizer
from baton.types import SamplingParams
from baton.version import __version__
from baton_router.frontend.http.body import read_json
from baton_router.frontend.http.metrics import HttpMetrics
from baton_router.frontend.http.middleware import account_of
from baton_router.frontend.http.options import HttpOptions
from baton_router.frontend.openai.messages import parse_messages
from baton_router.frontend.openai.schemas import Body, DetokenizeBody, TokenizeBody, parse_body, unknown_fields
from baton_router.frontend.openai.unsupported_params import check_strict, header_value
from baton_router.processor.input_processor import InputProcessor, count_chars
from baton_router.processor.text_request import ChatPrompt, Prompt, TextRequest
from baton_router.types import ModelInfo

_INLINE_TOKENS = 4096
_LEAST_BOUND = 2**20
"""Characters, and tokens, that can be tokenized and turned back whatever the model's context."""


class Models:
    """Serves ``/v1/models``."""

    def __init__(self, processor: InputProcessor) -> None:
        self._processor = processor
        self._created = int(time.time())

    async def list(self, request: Request) -> Response:
        """Serve ``GET /v1/models``."""
        return _json({"object": "list", "data": [self._model(self._processor.model_info())]})

    async def get(self, request: Request) -> Response:
        """Serve ``GET /v1/models/{id}``; without an id it is the list."""
        model = request.path_params["model"]
        return _json(self._model(self._processor.model_info(model))) if model else await self.list(request)

    def _model(self, info: ModelInfo) -> dict[str, Any]:
        return {
            "id": info.name,
            "object": "model",
            "created": self._created,
            "owned_by": "baton",
            "max_model_len": info.max_model_len,
        }


class TokenizerEndpoints:
    """Serves ``/tokenize`` and ``/detokenize``."""

    def __init__(self, processor: InputProcessor, options: HttpOptions, metrics: HttpMetrics) -> None:
        self._processor = processor
        self._options = options
        self._metrics = metrics

    async def tokenize(self, request: Request) -> Response:
        """Serve ``POST /tokenize``."""
        body = parse_body(TokenizeBody, value := await read_json(request, self._options))
        headers = self._ignored(TokenizeBody, value)
        info = self._processor.model_info(body.model or "")
        prompt, field = _prompt(body), "prompt" if body.messages is None else "messages"
        most = max(_LEAST_BOUND, 8 * info.max_model_len)
        if count_chars(prompt) > most:
            raise InvalidRequestError(f"{field} must have at most {most} characters", field=field)
        account = account_of(request.scope)
        text_request = TextRequest(
            prompt=prompt,
            sampling=SamplingParams(),
            cache_salt=account.salt("") if account is not None else "",
            prompt_field=field,
            # As the completion endpoints do it: a rendered conversation has its special tokens already.
            add_special_tokens=(body.messages is None if body.add_special_tokens is None else body.add_special_tokens),
        )
        ids = list(await self._processor.tokenize(text_request, info))
        answer: dict[str, Any] = {"count": len(ids), "max_model_len": info.max_model_len, "tokens": ids}
        if body.return_token_strs:
            tokenizer = (await self._processor.text_model(info)).tokenizer
            answer["token_strs"] = [tokenizer.token_text(token_id) for token_id in ids]
        return _json(answer, headers)

    async def detokenize(self, request: Request) -> Response:
        """Serve ``POST /detokenize``."""
        body = parse_body(DetokenizeBody, value := await read_json(request, self._options))
        headers = self._ignored(DetokenizeBody, value)
        info = self._processor.model_info(body.model or "")
        if body.tokens is None:
            raise InvalidRequestError("tokens is required", field="tokens")
        most = max(_LEAST_BOUND, info.max_model_len)
        if len(body.tokens) > most:
            raise InvalidRequestError(f"tokens must be at most {most}, got {len(body.tokens)}", field="tokens")
        for at, token_id in enumerate(body.tokens):
            if not 0 <= token_id < info.vocab_size:
                field = f"tokens[{at}]"
                raise InvalidRequestError(f"{field} must be between 0 and {info.vocab_size - 1}", field=field)
        tokenizer = (await self._processor.text_model(info)).tokenizer
        return _json({"prompt": await _decode(tokenizer, body.tokens, bool(body.skip_special_tokens))}, headers)

    def _ignored(self, schema: type[Body], value: dict[str, Any]) -> dict[str, str]:
        ignored = list(unknown_fields(schema, value))
        check_strict(ignored, self._options.strict_fields)
        self._metrics.count_ignored(ignored)
        return {"x-baton-ignored-fields": header_value(ignored)} if ignored else {}


class Health:
    """Serves what probes and scrapers ask for."""

    def __init__(self, ready: Callable[[], bool], registry: CollectorRegistry) -> None:
        self._ready = ready
        self._registry = registry

    async def health(self, request: Request) -> Response:
        """Serve ``GET /health``: the process is up."""
        return _json({"status": "ok"})

    async def ready(self, request: Request) -> Response:
        """Serve ``GET /readyz``: a decode instance is ready, and its model's tokenizer is loaded."""
        try:
            ready = self._ready()
        except BatonError:
            ready = False
        return _json({"status": "ready" if ready else "not ready"}, status=200 if ready else 503)

    async def metrics(self, request: Request) -> Response:
        """Serve ``GET /metrics``."""
        return Response(generate_latest(self._registry), media_type=CONTENT_TYPE_LATEST)

    async def version(self, request: Request) -> Response:
        """Serve ``GET /version``."""
        return _json({"version": __version__})


def _prompt(body: TokenizeBody) -> Prompt:
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequestError("send prompt or messages, one of them", field="prompt")
    if body.prompt is not None:
        return body.prompt
    go_on = bool(body.continue_final_message)
    return ChatPrompt(
        messages=parse_messages(body.messages),
        add_generation_prompt=not go_on if body.add_generation_prompt is None else body.add_generation_prompt,
        continue_final_message=go_on,
        variables=body.chat_template_kwargs or {},
    )


async def _decode(tokenizer: Tokenizer, ids: list[int], skip_special_tokens: bool) -> str:
    if len(ids) > _INLINE_TOKENS:
        return await asyncio.to_thread(tokenizer.decode, ids, skip_special_tokens)
    return tokenizer.decode(ids, skip_special_tokens)


def _json(value: Any, headers: dict[str, str] | None = None, *, status: int = 200) -> Response:
    return Response(orjson.dumps(value), status, media_type="application/json", headers=headers)
