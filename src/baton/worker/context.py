"""Parts that one instance shares: its context, the base class of its roles, and admission of calls."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import ClassVar

from baton.api.v1 import worker_pb2
from baton.config import EngineConfig
from baton.config.worker import WorkerConfig
from baton.engine.executor.base import Executor
from baton.engine.request import EngineRequest, RequestMetrics, SequenceOutput
from baton.engine.speculation.drafter import Drafter
from baton.errors import BatonError, InternalError, InvalidRequestError, UnavailableError
from baton.kv_cache.arena import Arena
from baton.kv_cache.connector import KVConnector, TransferStats
from baton.kv_cache.events import BlocksStored
from baton.kv_cache.fingerprint import Fingerprint
from baton.kv_cache.shards import KVShards
from baton.kv_transfer.blocks import BlockFetcher, BlockServer, BlockSource, LinkOptions
from baton.rpc.service_token import Token
from baton.rpc.tls import Tls
from baton.tracing import UNTRACED, Attribute, Span, SpanExporter, continue_span
from baton.types import FinishReason, InstanceId, RequestId, Role
from baton.worker.engine_thread import EngineThread
from baton.worker.events import KvEventLog
from baton.worker.metrics import WorkerMetrics

MAX_PROMPT_TOKENS_PER_CALL = 4_000_000


class Admission:
    """Counts the calls in progress, and refuses new ones while the instance drains.

    Attributes:
        active: Number of calls in progress.
    """

    def __init__(self) -> None:
        self.draining = False
        self.active = 0
        self._idle = asyncio.Event()
        self._idle.set()

    @contextmanager
    def admit(self) -> Iterator[None]:
        """Count a call while the context is open.

        Raises:
            UnavailableError: The instance is draining.
        """
        if self.draining:
            raise UnavailableError("the instance is draining", retry_after_s=1.0)
        self.active += 1
        self._idle.clear()
        try:
            yield
        finally:
            self.active -= 1
            if self.active == 0:
                self._idle.set()

    async def drain(self, timeout_s: float) -> int:
        """Stop admission and wait for the calls in progress.

        Args:
            timeout_s: Longest wait in seconds.

        Returns:
            Number of calls still in progress at the timeout.
        """
        self.draining = True
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            return self.active
        return 0


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A loaded model, and the memory of its KV pool.

    Attributes:
        executor: Runs the model on all ranks.
        drafter: Drafts tokens for speculative decoding, if it is used.
        shards: Memory of the KV pool on all ranks.
    """

    executor: Executor
    drafter: Drafter | None
    shards: KVShards

    @property
    def arena(self) -> Arena:
        """This process's part of the KV pool; its generations fence the blocks of all ranks."""
        return self.shards.primary

    @property
    def fingerprint(self) -> Fingerprint:
        """Format of the model's KV."""
        return self.executor.fingerprint

    @property
    def state_blocks(self) -> int:
        """Number of blocks that a sequence's recurrent states take; 0: the model has none."""
        return getattr(self.executor, "state_blocks", 0)

    @property
    def num_blocks(self) -> int:
        """Number of whole KV blocks in the pool."""
        return self.arena.num_blocks // self.executor.layout.num_groups


@dataclass(frozen=True, kw_only=True)
class InstanceContext:
    """Parts of an instance that exist before its engine; connectors are built from them.

    Attributes:
        role: Role in which the instance starts.
        instance_id: Name of the instance.
        config: Configuration of the service.
        engine_config: Configuration of the engine.
        model: Model and KV pool.
        token: Shared token, if the services use one.
        tls: Certificates, if the services use them.
        loop: Event loop of the instance.
        wake_engine: Makes the engine poll its connector; any thread may call it.
        get_source: Returns where this instance's blocks can be read, once the instance listens.
        links: Options of connections to other instances' blocks.
        events: Log of KV events; connectors append events of blocks that they keep outside the pool.
        tiers: Return the blocks that connectors keep outside the pool, for snapshots; a change must be appended to
            ``events`` in the same step of the loop.
        metrics: Metrics of the instance.
        spans: Exports the spans of traced requests; ``None``: tracing is off.
    """

    role: Role
    instance_id: InstanceId
    config: WorkerConfig
    engine_config: EngineConfig
    model: LoadedModel
    token: Token | None
    tls: Tls | None
    loop: asyncio.AbstractEventLoop
    wake_engine: Callable[[], None]
    get_source: Callable[[], BlockSource]
    links: LinkOptions
    events: KvEventLog
    tiers: list[Callable[[], list[BlocksStored]]] = field(default_factory=list)
    metrics: WorkerMetrics
    spans: SpanExporter | None


@dataclass(frozen=True, kw_only=True)
class WorkerContext:
    """Parts of a running instance that its calls use.

    Attributes:
        base: Parts that exist before the engine.
        engine: The engine in its thread.
        fetcher: Copies other instances' blocks into the pool.
        block_server: Serves this instance's blocks to other instances.
        admission: Counts calls, and refuses them while the instance drains.
        tokenizer_digest: Digest of the model's tokenizer; routers compare it between instances.
    """

    base: InstanceContext
    engine: EngineThread
    fetcher: BlockFetcher
    block_server: BlockServer
    admission: Admission
    tokenizer_digest: str

    async def constrain(self, request: EngineRequest) -> EngineRequest:
        """Return a request with its grammar compiled, outside the engine's thread.

        Raises:
            InvalidRequestError: The grammar is invalid or too costly, or this instance does not support grammars.
        """
        grammar = request.sampling.grammar
        compiler = self.engine.core.grammars
        if grammar is None:
            return request
        if compiler is None:
            raise InvalidRequestError("this instance has no support for grammars", field="grammar")
        grammar.validate(vocab_size=self.base.model.executor.vocab_size)
        constraint = None if request.output_token_ids else compiler.find(grammar, request.cache_salt)
        if constraint is None:
            constraint = await asyncio.to_thread(
                compiler.constraint, grammar, request.output_token_ids, request.cache_salt
            )
        return dataclasses.replace(request, constraint=constraint)

    @contextmanager
    def call(self, method: str, trace_context: Mapping[str, str]) -> Iterator[CallOutcome]:
        """Admit a call and count it by its outcome: ``ok``, ``cancelled`` or the error's code.

        Args:
            method: Label of the call in metrics, and name of its span.
            trace_context: The caller's trace context (``traceparent``); empty: the call is not traced.

        Raises:
            UnavailableError: The instance is draining.
        """
        span = continue_span(method, trace_context["traceparent"], self.base.spans) if trace_context else UNTRACED
        outcome = CallOutcome(span)
        try:
            with self.admission.admit():
                yield outcome
            outcome.code = "ok"
        except BatonError as error:
            outcome.code = error.code
            raise
        finally:
            self.base.metrics.requests.labels(method, outcome.code).inc()
            if span.recording:
                span.attributes["baton.instance"] = self.base.instance_id
                span.end(outcome.code)


@dataclass(slots=True)
class CallOutcome:
    """A call's span, and the code that it is counted under when it ends now."""

    span: Span
    code: str = "cancelled"


class InstanceRole:
    """Calls of a prefill or decode instance; this base refuses them all, a role overrides its own.

    Attributes:
        role: The role.
        connector: Point-to-point hand-over of KV.
        next_step: Returns the arena's progress counter before the step that begins next, if blocks may be read layer by
            layer; ``None``: they are read when they are complete.
    """

    role: ClassVar[Role]
    connector: KVConnector
    next_step: Callable[[], int] | None = None

    def generate(self, request: worker_pb2.GenerateRequest) -> AsyncGenerator[worker_pb2.GenerateResponse, None]:
        """Run a request and stream its tokens."""
        raise self._refusal("generate")

    def prefill(self, request: worker_pb2.PrefillRequest) -> AsyncGenerator[worker_pb2.PrefillResponse, None]:
        """Offer a prompt's blocks, and keep them until the caller closes the stream."""
        raise self._refusal("prefill for others")

    async def prefill_first(self, request: worker_pb2.PrefillFirstRequest) -> worker_pb2.PrefillFirstResponse:
        """Compute a prompt and keep it for the decode instance that claims it."""
        raise self._refusal("prefill for others")

    def withdraw(self, request_id: RequestId) -> bool:
        """Drop an unclaimed prompt; returns whether there was one with this id."""
        return False

    def set_silent_prefills(self, router: object, addresses: frozenset[str]) -> None:
        """Set the addresses of prefill instances that do not answer a router now; replaces that router's last set."""

    def unreadable_prefills(self) -> list[str]:
        """Return the addresses of prefill instances whose KV cannot be read now, for routers."""
        return []

    def num_kept(self) -> int:
        """Return the number of prompts whose blocks are kept for other instances."""
        return 0

    async def close(self) -> None:
        """Release the role's resources; its connector was closed before."""

    def _refusal(self, what: str) -> InvalidRequestError:
        return InvalidRequestError(f"this is a {self.role} instance: it does not {what}", field="role")


def require_request(request_id: str, num_tokens: int) -> RequestId:
    """Check the id and prompt length of a request.

    Raises:
        InvalidRequestError: The id is missing, too long or not printable, or the number of tokens is out of bounds.
    """
    if not 1 <= len(request_id) <= 256:
        raise InvalidRequestError("request_id must have 1 to 256 characters", field="request_id")
    if not request_id.isprintable():
        raise InvalidRequestError("request_id must have printable characters alone", field="request_id")
    if not 1 <= num_tokens <= MAX_PROMPT_TOKENS_PER_CALL:
        raise InvalidRequestError(
            f"prompt_token_ids must be 1 to {MAX_PROMPT_TOKENS_PER_CALL} ids, got {num_tokens}",
            field="prompt_token_ids",
        )
    return RequestId(request_id)


def require_success(output: SequenceOutput) -> None:
    """Raise for an engine error or an abort by others, so that the caller can continue on another instance."""
    if output.finish_reason is FinishReason.ERROR:
        if output.unfit:  # an internal error would open the circuit breakers of all instances that the router tries
            raise InvalidRequestError(output.error or "it cannot be answered", field="grammar")
        raise InternalError(output.error or "the engine failed the request")
    if output.finish_reason is FinishReason.ABORT:
        raise UnavailableError("the request was aborted on this instance")


def record_engine_times(span: Span, metrics: RequestMetrics) -> None:
    """Add a request's engine times to a recording span as events, and its KV loads as child spans."""
    if metrics.queue_us:
        span.event("admitted", at_ns=metrics.arrived_ns + 1000 * metrics.queue_us)
    if metrics.ttft_us:
        span.event("first_token", at_ns=metrics.arrived_ns + 1000 * metrics.ttft_us)
    for load in metrics.transfer.loads:
        if load.kind:
            span.part(load.kind, load.began_ns, load.ended_ns, _load_attributes(load))


def _load_attributes(load: TransferStats) -> dict[str, Attribute]:
    attributes: dict[str, Attribute] = {
        "baton.path": str(load.path),
        "baton.kv_bytes": load.kv_bytes,
        "baton.transferred_tokens": load.transferred_tokens,
        "baton.transfer_us": load.transfer_us,
        "baton.exposed_us": load.exposed_us,
    }
    texts = {
        "baton.source": load.source,
        "baton.pipe": load.pipe,
        "baton.pipe_fallback": load.pipe_fallback,
        "baton.local_reason": load.local_reason,
    }
    attributes |= {name: text for name, text in texts.items() if text}
    if load.failures:
        attributes["baton.failures"] = load.failures
    return attributes
