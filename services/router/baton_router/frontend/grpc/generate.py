"""The text side of the gRPC router service: Generate and Route."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator
from contextlib import aclosing

from baton.api.v1 import router_pb2
from baton.errors import InvalidRequestError
from baton.rpc.convert import finish_to_pb, logprob_to_pb, prompt_logprobs_to_pb, sampling_from_pb
from baton.types import Order, SamplingParams
from baton_router.processor.input_processor import InputProcessor
from baton_router.processor.text_request import ChatPrompt, Prompt, TextChunk, TextDelta, TextRequest
from baton_router.types import Account


async def generate(
    processor: InputProcessor,
    request: router_pb2.RouterGenerateRequest,
    account: Account | None,
    order: Order | None = None,
) -> AsyncIterator[router_pb2.RouterGenerateResponse]:
    """Serve ``RouterService.Generate``; a call that is cancelled cancels the request everywhere.

    Args:
        processor: Does the work.
        request: The call's request.
        account: Whose API key the call showed, if any.
        order: In which it is to be served; ``None``: in the router's own.

    Raises:
        BatonError: Whatever :meth:`InputProcessor.prepare` and :meth:`InputProcessor.stream` raise.
    """
    asked = text_request(request, account)
    asked.order = order
    prepared = await processor.prepare(asked)
    async with aclosing(processor.stream(prepared)) as chunks:
        async for chunk in chunks:
            yield _response(asked.request_id, chunk)


def text_request(request: router_pb2.RouterGenerateRequest, account: Account | None) -> TextRequest:
    """Read a request.

    Args:
        request: The call's request.
        account: Whose API key the call showed, if any.

    Raises:
        InvalidRequestError: A field is wrong; names it.
    """
    sampling = sampling_from_pb(request.sampling, stop=tuple(request.stop))
    kind = request.WhichOneof("prompt")
    output = list(request.output_token_ids)
    if output and (kind != "token_ids" or sampling.n != 1 or sampling.seed is None):
        raise InvalidRequestError("resumed output needs token_ids, a seed and n = 1", field="output_token_ids")
    if output and sampling.max_tokens is not None and len(output) >= sampling.max_tokens:
        raise InvalidRequestError("all max_tokens have been generated", field="output_token_ids")
    return TextRequest(
        prompt=_prompt(request),
        sampling=sampling,
        request_id=request.request_id or f"gen-{uuid.uuid4().hex}",
        model=request.model,
        add_special_tokens=kind == "text",
        include_stop=request.include_stop_in_output,
        account=account,
        cache_salt=_salt(request.cache_salt, account),
        priority=request.priority,
        ttft_ms=request.ttft_ms or None,
        itl_ms=request.itl_ms or None,
        user=request.user,
        session=request.session_id,
        output_token_ids=output,
        prompt_field=kind or "prompt",
        field_prefix="sampling.",
    )


async def route(
    processor: InputProcessor, request: router_pb2.RouteRequest, account: Account | None
) -> router_pb2.RouteResponse:
    """Serve ``RouterService.Route``.

    Raises:
        BatonError: Whatever :meth:`InputProcessor.prepare` raises.
    """
    asked = TextRequest(
        prompt=_prompt(request),
        sampling=SamplingParams(),
        model=request.model,
        add_special_tokens=request.WhichOneof("prompt") == "text",
        account=account,
        cache_salt=_salt(request.cache_salt, account),
        session=request.session_id,
        prompt_field=request.WhichOneof("prompt") or "prompt",
    )
    prepared = await processor.prepare(asked)
    return router_pb2.RouteResponse(decision=(await processor.route(prepared)).to_pb())


def list_models(processor: InputProcessor) -> router_pb2.ListModelsResponse:
    """Serve ``RouterService.ListModels``.

    Raises:
        UnavailableError: No instance is ready.
    """
    info = processor.model_info()
    model = router_pb2.ModelDescription(
        name=info.name,
        max_model_len=info.max_model_len,
        vocab_size=info.vocab_size,
        eos_token_ids=sorted(info.eos_token_ids),
    )
    return router_pb2.ListModelsResponse(models=[model])


def _salt(given: str, account: Account | None) -> str:
    return given if account is None else account.salt(given)


def _prompt(request: router_pb2.RouterGenerateRequest | router_pb2.RouteRequest) -> Prompt:
    kind = request.WhichOneof("prompt")
    if kind == "text":
        return request.text
    if kind == "token_ids":
        return list(request.token_ids.ids)
    if kind == "chat":
        return ChatPrompt([{"role": item.role, "content": item.content} for item in request.chat.messages])
    raise InvalidRequestError("the request has no prompt: set text, token_ids or chat", field="prompt")


def _response(request_id: str, chunk: TextChunk) -> router_pb2.RouterGenerateResponse:
    response = router_pb2.RouterGenerateResponse(
        request_id=request_id,
        deltas=[_delta(delta) for delta in chunk.deltas],
        trace=chunk.trace,
        decision=chunk.decision.to_pb() if chunk.decision is not None else None,
    )
    if chunk.prompt_logprobs is not None:
        response.prompt_logprobs.extend(prompt_logprobs_to_pb(chunk.prompt_logprobs))
    return response


def _delta(delta: TextDelta) -> router_pb2.TextDelta:
    return router_pb2.TextDelta(
        index=delta.index,
        text=delta.text,
        token_ids=delta.token_ids,
        logprobs=[logprob_to_pb(item) for item in delta.logprobs],
        finish_reason=finish_to_pb(delta.finish_reason),
        stop_reason=delta.stop_reason if isinstance(delta.stop_reason, str) else "",
    )
