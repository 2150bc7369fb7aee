"""What the parts of one instance share, and what a role adds to it."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import ClassVar

from baton.api.v1 import worker_pb2
from baton.config import EngineConfig
from baton.config.worker import WorkerConfig
from baton.engine.executor.base import Executor
from baton.engine.request import EngineRequest
from baton.errors import BatonError, InvalidRequestError, UnavailableError
from baton.kv_cache.arena import Arena
from baton.kv_cache.connector import KVConnector
from baton.kv_cache.events import BlocksStored
from baton.kv_cache.shards import KVShards
from baton.kv_transfer.blocks import BlockFetcher, BlockServer, BlockSource, LinkOptions
from baton.rpc.service_token import Token
from baton.rpc.tls import Tls
from baton.tracing import UNTRACED, Span, SpanExporter, continue_span
from baton.types import InstanceId, RequestId, Role
from baton.worker.engine_thread import EngineThread
from baton.worker.events import KvEventLog
from baton.worker.metrics import WorkerMetrics

MAX_PROMPT_TOKENS_PER_CALL = 4_000_000


class Admission:
    """Counts the calls in progress, and refuses new ones while the instance drains."""

    def __init__(self) -> None:
        self.draining = False
        self._active = 0
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def active(self) -> int:
        """Calls in progress."""
        return self._active

    @contextmanager
    def admit(self) -> Iterator[None]:
        """Count one call.

        Raises:
            UnavailableError: The instance drains.
        """
        if self.draining:
            raise UnavailableError("the instance is draining", retry_after_s=1.0)
        self._active += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._active -= 1
            if self._active == 0:
                self._idle.set()

    async def drain(self, timeout_s: float) -> int:
        """Admit no call any more and wait for those in progress.

        Returns:
            Calls still in progress when the time was up.
        """
        self.draining = True
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            return self._active
        return 0


@dataclass(frozen=True, kw_only=True)
class InstanceContext:
    """What exists before the engine; connectors are built from it.

    Attributes:
        role: In which the instance starts.
        shards: The KV pool's memory, of all ranks.
        arena: This process's part of it, whose generations fence all parts.
        wake: Makes the engine poll its connector; any thread may call it.
        source: Returns where this instance's blocks can be read, once it listens.
        links: How other instances' blocks are reached.
        events: The log of KV events; connectors tell there what they keep outside the pool.
        tiers: Return what connectors keep there, for snapshots: each change must be told in the same step of the loop.
        tls: Certificates, if the services use some.
        spans: Takes the spans of traced requests; ``None``: nothing is traced here.
    """

    role: Role
    config: WorkerConfig
    engine_config: EngineConfig
    executor: Executor
    shards: KVShards
    arena: Arena
    token: Token | None
    loop: asyncio.AbstractEventLoop
    wake: Callable[[], None]
    source: Callable[[], BlockSource]
    links: LinkOptions
    tls: Tls | None
    events: KvEventLog
    tiers: list[Callable[[], list[BlocksStored]]]
    spans: SpanExporter | None = None


@dataclass(frozen=True, kw_only=True)
class WorkerContext(InstanceContext):
    """The parts of a running instance that its calls use.

    Attributes:
        fetcher: Copies other instances' blocks into the pool.
    """

    instance_id: InstanceId
    engine: EngineThread
    fetcher: BlockFetcher
    block_server: BlockServer
    admission: Admission
    metrics: WorkerMetrics
    tokenizer_digest: str

    async def constrain(self, request: EngineRequest) -> EngineRequest:
        """Return a request with its grammar compiled, outside the engine's thread.

        Raises:
            InvalidRequestError: The grammar is wrong or costs too much, or this instance has no support for grammars.
        """
        grammar, compiler = request.sampling.grammar, self.engine.core.grammars
        if grammar is None:
            return request
        if compiler is None:
            raise InvalidRequestError("this instance has no support for grammars", field="grammar")
        grammar.validate(vocab_size=self.executor.vocab_size)
        found = None if request.output_token_ids else compiler.find(grammar, request.cache_salt)
        if found is None:
            found = await asyncio.to_thread(compiler.constraint, grammar, request.output_token_ids, request.cache_salt)
        return dataclasses.replace(request, constraint=found)

    @contextmanager
    def call(self, method: str, trace_context: Mapping[str, str]) -> Iterator[CallOutcome]:
        """Admit a call and count it by its outcome, which is an error's code or ``ok`` at its end.

        Args:
            method: Which; also the name of its span.
            trace_context: That it is part of.

        Raises:
            UnavailableError: The instance drains.
        """
        span = continue_span(method, trace_context["traceparent"], self.spans) if trace_context else UNTRACED
        outcome = CallOutcome(span)
        try:
            with self.admission.admit():
                yield outcome
            outcome.code = "ok"
        except BatonError as error:
            outcome.code = error.code
            raise
        finally:
            self.metrics.requests.labels(method, outcome.code).inc()
            if span.recording:
                span.attributes["baton.instance"] = self.instance_id
                span.end(outcome.code)


@dataclass(slots=True)
class CallOutcome:
    """What a call counts as that is cancelled now, and its span."""

    span: Span
    code: str = "cancelled"


class InstanceRole:
    """What an instance does as prefill or as decode instance; calls of the other role are refused.

    Attributes:
        role: Which.
        connector: Its point-to-point hand-over.
        next_step: Returns the arena's progress before the step that begins next, where blocks may be read layer by
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
        """Compute a prompt and let it wait for the decode instance that claims it."""
        raise self._refusal("prefill for others")

    def withdraw(self, request_id: RequestId) -> bool:
        """Drop a prompt that waits under this id; ``False``: there is none."""
        return False

    def silent_prefills(self, router: object, addresses: frozenset[str]) -> None:
        """Hear which prefill instances do not answer a router now; replaces what it said before."""

    def num_kept(self) -> int:
        """Prompts whose blocks are kept for others."""
        return 0

    async def close(self) -> None:
        """Release what the role opened; its connector is closed by then."""

    def _refusal(self, what: str) -> InvalidRequestError:
        return InvalidRequestError(f"this is a {self.role} instance: it does not {what}", field="role")


def require_request(request_id: str, num_tokens: int) -> RequestId:
    """Check what every call with a request carries.

    Raises:
        InvalidRequestError: The id is missing, too long or not printable, or there are no tokens.
    """
    if not 1 <= len(request_id) <= 256:
        raise InvalidRequestError("request_id must have 1 to 256 characters", field="request_id")
    if not request_id.isprintable():
        raise InvalidRequestError("request_id must have printable characters alone", field="request_id")
    if not 1 <= num_tokens <= MAX_PROMPT_TOKENS_PER_CALL:
        raise InvalidRequestError("prompt_token_ids must not be empty", field="prompt_token_ids")
    return RequestId(request_id)
