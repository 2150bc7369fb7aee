"""Endpoints for administrators: drop cached prefixes, and show the tokenizer's configuration."""

from __future__ import annotations

import asyncio

import grpc.aio
import orjson
from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from baton.api.v1 import worker_pb2
from baton.errors import UnavailableError
from baton.rpc.audit import audit
from baton.rpc.errors import from_rpc_error, readable
from baton_router.frontend.http.middleware import account_of, require_admin
from baton_router.processor.input_processor import InputProcessor
from baton_router.registry.instance import Instance, Status
from baton_router.registry.registry import Registry

_RESET_S = 30.0


class AdminEndpoints:
    """Serves ``/reset_prefix_cache`` (vLLM's name), ``/flush_cache`` (SGLang's) and ``/tokenizer_info``.

    Args:
        processor: Processor with the tokenizer.
        registry: Registry of the instances.
    """

    def __init__(self, processor: InputProcessor, registry: Registry) -> None:
        self._processor = processor
        self._registry = registry

    async def reset(self, request: Request) -> Response:
        """Serve ``POST /reset_prefix_cache``: every instance drops the cached blocks that no request uses.

        Raises:
            PermissionDeniedError: The API key is not an administrator's.
            UnavailableError: No instance is ready, or some failed; names these.
        """
        require_admin(request)
        account = account_of(request)
        audit("deleted", over="http", account=account.name if account is not None else "", what="prefix caches")
        instances = [x for x in self._registry.instances() if x.status is Status.READY]
        if not instances:
            raise UnavailableError("no instance is ready")
        answers = await asyncio.gather(*(_reset(x) for x in instances))
        failed = [
            f"{x.instance_id} ({x.address}): {y}" for x, y in zip(instances, answers, strict=True) if isinstance(y, str)
        ]
        if failed:
            raise UnavailableError(f"these kept their prefix caches: {'; '.join(failed)}")
        blocks = {x.instance_id: y for x, y in zip(instances, answers, strict=True)}
        return Response(orjson.dumps({"blocks": blocks}), media_type="application/json")

    async def tokenizer_info(self, request: Request) -> Response:
        """Serve ``GET /tokenizer_info``: the model's ``tokenizer_config.json``, with its chat template."""
        require_admin(request)
        model = await self._processor.text_model(self._processor.model_info())
        template = model.chat_template.source if model.chat_template is not None else None
        info = {**model.config, "tokenizer_class": model.config.get("tokenizer_class"), "chat_template": template}
        return Response(orjson.dumps(info), media_type="application/json")


def administer(app: FastAPI, processor: InputProcessor, registry: Registry) -> None:
    """Add the endpoints to an app."""
    endpoints = AdminEndpoints(processor, registry)
    for path in ("/reset_prefix_cache", "/flush_cache"):
        app.add_api_route(path, endpoints.reset, methods=["POST"], response_class=Response)
    app.add_api_route("/tokenizer_info", endpoints.tokenizer_info, methods=["GET", "HEAD"], response_class=Response)


async def _reset(instance: Instance) -> int | str:
    """Return the number of blocks that an instance dropped, or its error."""
    try:
        answer = readable(await instance.stub.ResetPrefixCache(worker_pb2.ResetPrefixCacheRequest(), timeout=_RESET_S))
    except grpc.aio.AioRpcError as error:
        return from_rpc_error(error).message
    return int(answer.num_blocks)
