"""The gRPC router service: generation, registration of instances, and the router's state."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator, Sized
from contextlib import aclosing
from typing import Any, Protocol

import orjson
from google.protobuf.message import Message

from baton.api.v1 import router_pb2, router_pb2_grpc
from baton.errors import BatonError, ContextLengthError, InternalError, InvalidRequestError
from baton.grammar import StructuredOutputs
from baton.rpc.audit import audit, peer_of
from baton.rpc.auth import HEADER, Admits
from baton.rpc.convert import MODEL_DEFAULTED, prompt_logprobs_to_pb, sampling_from_pb, text_delta_to_pb
from baton.types import MAX_LOGIT_BIAS, MAX_STOP_TOKEN_IDS, ORDER_HEADER, Order, SamplingParams
from baton_router.accounts import Accounts
from baton_router.frontend.grpc.ticket import TicketDesk
from baton_router.frontend.http.middleware import log_access
from baton_router.processor.input_processor import InputProcessor
from baton_router.processor.text_request import (
    MAX_MESSAGES,
    MAX_STOP_STRINGS,
    ChatPrompt,
    Prompt,
    TextChunk,
    TextRequest,
    check_role,
)
from baton_router.registry.registry import Registry
from baton_router.types import Account

SERVICE = "baton.api.v1.RouterService"
_FOR_CLIENTS = frozenset(f"/{SERVICE}/{name}" for name in ("Generate", "Route", "NoteDirect", "ListModels", "Explain"))
_FOR_ADMINISTRATORS = frozenset(f"/{SERVICE}/{name}" for name in ("ListInstances", "GetStats"))
_FEW_IDS = 4096
"""Token ids that are checked with everything else: the model need not be known for them."""
_WINDOW_S = 60.0
_LONGEST_WINDOW_S = 180.0


class Insight(Protocol):
    """Explains requests and returns statistics."""

    def explain(self, name: str, tenant: str | None) -> dict[str, Any]:
        """Return everything that is known of a request, of one tenant or of all; raises ``NotFoundError``."""

    def stats(self, window_s: float) -> dict[str, Any]:
        """Return rates, percentiles in milliseconds, and the queue, over the last ``window_s`` seconds."""


class RouterServicer(router_pb2_grpc.RouterServiceServicer):
    """Answers ``baton.api.v1.RouterService``; the server's interceptors turn errors into statuses.

    Args:
        processor: Runs Generate and Route.
        registry: Registry of the instances.
        tickets: Places requests that their clients run (direct mode).
        accounts: Accounts of the API keys; ``None`` without API keys.
        access_log: Write a line per request.

    Attributes:
        insight: Answers Explain and GetStats; must be set before the first call.
    """

    insight: Insight

    def __init__(
        self,
        processor: InputProcessor,
        registry: Registry,
        tickets: TicketDesk,
        accounts: Accounts | None = None,
        *,
        access_log: bool = False,
    ) -> None:
        self._processor = processor
        self._registry = registry
        self._tickets = tickets
        self._accounts = accounts
        self._access_log = access_log

    async def Generate(
        self, request: router_pb2.RouterGenerateRequest, context: Any
    ) -> AsyncIterator[router_pb2.RouterGenerateResponse]:
        """Generate; cancelling the call cancels the request on all instances."""
        account = self.account(context)
        self.check_sizes(request)
        asked = text_request(request, account)
        if order := _metadata(context, ORDER_HEADER):
            asked.order = Order.parse(ORDER_HEADER, order)
        asked.traceparent = _metadata(context, "traceparent")
        begun = time.perf_counter()
        peer = peer_of(context) if self._access_log else ""
        status = "cancelled"
        try:
            prepared = await self._processor.prepare(asked)
            async with aclosing(self._processor.stream(prepared)) as chunks:
                async for chunk in chunks:
                    yield _response(asked.request_id, chunk)
            status = "ok"
        except Exception as error:
            status = error.code if isinstance(error, BatonError) else InternalError.code
            raise
        finally:
            if self._access_log:
                log_access(
                    peer=peer,
                    method="grpc",
                    path="Generate",
                    status=status,
                    seconds=time.perf_counter() - begun,
                    request_id=asked.request_id,
                    account=account,
                )

    async def Route(self, request: router_pb2.RouteRequest, context: Any) -> router_pb2.RouteResponse:
        """Return where a prompt would be placed, or place it and return a ticket."""
        account = self.account(context)
        self.check_sizes(request)
        if request.HasField("direct"):
            direct = text_request(request.direct, account)
            direct.traceparent = _metadata(context, "traceparent")
            return await self._tickets.place(direct)
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
        prepared = await self._processor.prepare(asked)
        with self._processor.charge(account, prepared.prompt_tokens):  # not placed, so nothing else counts it
            return router_pb2.RouteResponse(decision=(await self._processor.route(prepared)).to_pb())

    async def NoteDirect(self, request: router_pb2.NoteDirectRequest, context: Any) -> router_pb2.NoteDirectResponse:
        """Record a client's notice of a request with a ticket."""
        return router_pb2.NoteDirectResponse(known=self._tickets.note(request, self.account(context)))

    async def ListModels(self, request: router_pb2.ListModelsRequest, context: Any) -> router_pb2.ListModelsResponse:
        models = [
            router_pb2.ModelDescription(
                name=info.name,
                max_model_len=info.max_model_len,
                vocab_size=info.vocab_size,
                eos_token_ids=sorted(info.eos_token_ids),
            )
            for info in self._processor.model_info().aliases
        ]
        return router_pb2.ListModelsResponse(models=models)

    async def Register(self, request: router_pb2.RegisterRequest, context: Any) -> router_pb2.RegisterResponse:
        return self._registry.register(request)

    async def Heartbeat(self, request: router_pb2.HeartbeatRequest, context: Any) -> router_pb2.HeartbeatResponse:
        return router_pb2.HeartbeatResponse(known=self._registry.heartbeat(request.lease_id))

    async def Deregister(self, request: router_pb2.DeregisterRequest, context: Any) -> router_pb2.DeregisterResponse:
        self._registry.deregister(request.lease_id)
        return router_pb2.DeregisterResponse()

    async def ListInstances(
        self, request: router_pb2.ListInstancesRequest, context: Any
    ) -> router_pb2.ListInstancesResponse:
        self._audit_admin(context, "ListInstances")
        return router_pb2.ListInstancesResponse(instances=[x.describe() for x in self._registry.instances()])

    async def GetStats(self, request: router_pb2.GetStatsRequest, context: Any) -> router_pb2.GetStatsResponse:
        """Return rates and latencies of recent requests."""
        self._audit_admin(context, "GetStats")
        window_s = request.window_s or _WINDOW_S
        if not 0 < window_s <= _LONGEST_WINDOW_S:
            raise InvalidRequestError(f"window_s must be at most {_LONGEST_WINDOW_S:g}", field="window_s")
        stats = self.insight.stats(window_s)
        answer = router_pb2.GetStatsResponse(
            window_s=stats["window_s"],
            requests_per_s=stats["requests_per_s"] or 0.0,
            tokens_per_s=stats["tokens_per_s"] or 0.0,
            hit_rate=stats["hit_rate"],
            num_failed=round(stats["failed"]),
            num_waiting=stats["queued"],
            waiting_prompt_tokens=stats["queued_tokens"],
        )
        for name in ("ttft_ms", "itl_ms"):
            if stats[name] is not None:
                getattr(answer, name).CopyFrom(router_pb2.Quantiles(**stats[name]))
        return answer

    async def Explain(self, request: router_pb2.ExplainRequest, context: Any) -> router_pb2.ExplainResponse:
        account = self.account(context)
        tenant = None if account is None or account.admin else account.name
        if tenant is None:
            self._audit_admin(context, "Explain")
        return router_pb2.ExplainResponse(json=orjson.dumps(self.insight.explain(request.request_id, tenant)))

    def check_sizes(self, request: Message) -> None:
        """Check how much a message has, before anything is made of it; the bounds are those of HTTP.

        Raises:
            BatonError: It has too much; names the field.
        """
        if isinstance(request, router_pb2.RouteRequest) and request.HasField("direct"):
            request = request.direct
        assert isinstance(request, router_pb2.RouterGenerateRequest | router_pb2.RouteRequest)
        kind = request.WhichOneof("prompt")
        if kind == "chat":
            check_count(request.chat.messages, MAX_MESSAGES, "chat.messages")
        elif kind == "token_ids":
            self._check_ids(request.token_ids.ids, request.model, kind)
        if isinstance(request, router_pb2.RouterGenerateRequest):
            check_count(request.stop, MAX_STOP_STRINGS, "stop")
            check_count(request.sampling.stop_token_ids, MAX_STOP_TOKEN_IDS, "sampling.stop_token_ids")
            check_count(request.sampling.logit_bias, MAX_LOGIT_BIAS, "sampling.logit_bias")
            self._check_ids(request.output_token_ids, request.model, "output_token_ids")

    def _check_ids(self, ids: Sized, model: str, field: str) -> None:
        if len(ids) > _FEW_IDS:
            most = self._processor.model_info(model).max_model_len
            if len(ids) >= most:
                message = f"this model's context is {most} tokens and {field} has {len(ids)}"
                raise ContextLengthError(message, field=field)

    def _audit_admin(self, context: Any, method: str) -> None:
        """Write to the audit log that a call with an API key reads all tenants' data."""
        account = self.account(context)
        if account is not None:
            audit("admin_read", over="grpc", account=account.name, method=method, peer=peer_of(context))

    def account(self, context: Any) -> Account | None:
        """Return the account of a call's API key; ``None`` without API keys, or if a service calls."""
        if self._accounts is None:
            return None
        return self._accounts.identify(_metadata(context, HEADER))


def text_request(request: router_pb2.RouterGenerateRequest, account: Account | None) -> TextRequest:
    """Convert a request.

    Args:
        request: Message of the call.
        account: Account of the call's API key, if any.

    Raises:
        InvalidRequestError: A field is wrong; names it.
    """
    sampling = sampling_from_pb(request.sampling, stop=tuple(request.stop))
    kind = request.WhichOneof("prompt")
    output = list(request.output_token_ids)
    chars = request.output_chars if request.HasField("output_chars") else None
    if output and (sampling.n != 1 or sampling.seed is None):
        raise InvalidRequestError("resumed output needs a seed and n = 1", field="output_token_ids")
    if output and kind != "token_ids" and chars is None:
        raise InvalidRequestError("resumed output needs token_ids or output_chars", field="output_token_ids")
    if chars is not None and sampling.n != 1:
        raise InvalidRequestError("output_chars needs n = 1", field="output_chars")
    if output and sampling.max_tokens is not None and len(output) >= sampling.max_tokens:
        raise InvalidRequestError("all max_tokens have been generated", field="output_token_ids")
    return TextRequest(
        prompt=_prompt(request),
        sampling=sampling,
        unset=tuple(name for name in ("max_tokens", *MODEL_DEFAULTED) if not request.sampling.HasField(name)),  # type: ignore[arg-type]
        request_id=request.request_id or f"gen-{uuid.uuid4().hex}",
        model=request.model,
        add_special_tokens=kind == "text",
        allow_special_tokens=request.allow_special_tokens if request.HasField("allow_special_tokens") else None,
        include_stop=request.include_stop_in_output,
        account=account,
        cache_salt=_salt(request.cache_salt, account),
        priority=request.priority,
        ttft_ms=request.ttft_ms or None,
        itl_ms=request.itl_ms or None,
        user=request.user,
        session=request.session_id,
        output_token_ids=output,
        output_chars=chars,
        structured=_structured(request),
        prompt_field=kind or "prompt",
        field_prefix="sampling.",
    )


def check_count(items: Sized, most: int, field: str) -> None:
    """Check the length of a list.

    Raises:
        InvalidRequestError: It has more than ``most`` entries; names the field.
    """
    if len(items) > most:
        raise InvalidRequestError(f"{field} must have at most {most} entries, got {len(items)}", field=field)


def _structured(request: router_pb2.RouterGenerateRequest) -> StructuredOutputs | None:
    if not request.HasField("structured_outputs"):
        return None
    field = "structured_outputs"
    if request.sampling.HasField("grammar"):
        raise InvalidRequestError(f"{field} and sampling.grammar contradict each other", field=field)
    asked = request.structured_outputs
    value: dict[str, Any] = {
        "whitespace_pattern": asked.whitespace_pattern or None,
        "disable_any_whitespace": asked.disable_any_whitespace,
    }
    if kind := asked.WhichOneof("kind"):
        value[kind] = list(asked.choice.texts) if kind == "choice" else getattr(asked, kind)
    return StructuredOutputs.from_mapping(value, field)


def _salt(given: str, account: Account | None) -> str:
    return given if account is None else account.salt(given)


def _prompt(request: router_pb2.RouterGenerateRequest | router_pb2.RouteRequest) -> Prompt:
    kind = request.WhichOneof("prompt")
    if kind == "text":
        return request.text
    if kind == "token_ids":
        return list(request.token_ids.ids)
    if kind == "chat":
        for at, item in enumerate(request.chat.messages):
            check_role(item.role, f"chat.messages[{at}].role")
        return ChatPrompt([{"role": item.role, "content": item.content} for item in request.chat.messages])
    raise InvalidRequestError("the request has no prompt: set text, token_ids or chat", field="prompt")


def _response(request_id: str, chunk: TextChunk) -> router_pb2.RouterGenerateResponse:
    response = router_pb2.RouterGenerateResponse(
        request_id=request_id,
        deltas=[text_delta_to_pb(delta) for delta in chunk.deltas],
        trace=chunk.trace,
        decision=chunk.decision.to_pb() if chunk.decision is not None else None,
    )
    if chunk.prompt_logprobs is not None:
        response.prompt_logprobs.extend(prompt_logprobs_to_pb(chunk.prompt_logprobs))
    return response


def admits_clients(accounts: Accounts | None) -> Admits | None:
    """Return the check of calls without the services' token: they need an API key; ``None`` if there are no keys.

    Args:
        accounts: Accounts of the API keys. All may generate, administrators may also list
            instances and read statistics.
    """
    if accounts is None:
        return None

    def admits(method: str, header: str | bytes | None) -> bool:
        account = accounts.identify(_text(header))
        return account is not None and (method in _FOR_CLIENTS or (account.admin and method in _FOR_ADMINISTRATORS))

    return admits


def _metadata(context: Any, name: str) -> str:
    return _text(next((value for key, value in context.invocation_metadata() or () if key == name), None))


def _text(header: str | bytes | None) -> str:
    return header.decode("latin-1") if isinstance(header, bytes) else header or ""
