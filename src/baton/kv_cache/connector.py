"""The interface between the engine and KV from outside: loading KV of a prompt, and keeping KV for other readers.

The engine's scheduler calls a connector; transports implement it; services connect the two.

Life of a load (decode): ``plan_load`` says how many tokens could come from outside -> the scheduler reserves blocks
-> ``start_load`` -> the connector writes into those blocks and reports through ``poll_loads`` -> the request runs.
A load that failed reports how many leading tokens are valid; the engine computes the rest.

Life of a save (prefill): ``step_begins`` before a step, with the blocks that it will compute -> ``layer_computed`` when
each layer's KV is in the pool -> after the step ``blocks_computed``, with the complete blocks -> at the end
``request_finished`` returns ``True`` if the connector wants the blocks kept -> ``poll_releases`` releases them. These
are called for requests that are prefilled for other instances, and for all requests if ``follows_all`` is set: the KV
of generated tokens is then reported at the end of their request.

A connector has two sides: :class:`SchedulerSide` decides what is loaded and what is kept, :class:`WorkerSide` follows
the computation. Everything has a default that does nothing, so a connector overrides only what it uses: one that saves
overrides ``blocks_computed``, one that loads the five methods from ``plan_load`` to ``has_pending``.

A method that raises is logged and costs only what it was called for: ``plan_load`` and ``start_load`` a local prefill,
the others a save or a notification. No request fails for it, and the engine goes on (:class:`GuardedConnector`). A load
that was started still ends with its ``LoadUpdate``, and only with that: its blocks are kept until then.

Every method is called in the engine's thread and must not block. ``wake`` (given to the connector at its
construction) may be called from any thread to make the engine poll.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from baton.errors import InternalError
from baton.types import BlockHash, BlockId, PrefillPath, RequestId, SamplingParams, Tenant, TokenLogprob

log = logging.getLogger(__name__)

_TRACE_EVERY_S = 10.0
"""A hook that fails is called again for the next layer or step: its trace is logged once in this many seconds."""


@dataclass(frozen=True, slots=True)
class TransferStats:
    """Statistics of moving one request's KV."""

    path: PrefillPath = PrefillPath.LOCAL
    source: str = ""
    """Instance that the KV came from."""
    pipe: str = ""
    pipe_fallback: str = ""
    """Why a kind of pipe preferred over ``pipe`` was not used."""
    kv_bytes: int = 0
    transfer_us: int = 0
    transferred_tokens: int = 0
    source_cached_tokens: int = 0
    """Tokens that the source found in its prefix cache."""
    exposed_us: int = 0
    """Time from the end of the computation to the last byte, which the transfer added to the time to first token."""
    failures: tuple[str, ...] = ()
    """Sources that failed: ``"instance: reason"``."""
    local_reason: str = ""
    """Why nothing came from outside."""
    kind: str = ""
    """Kind of transfer, successful or not: ``kv_transfer`` from an instance, ``kv_store``; empty: none was tried."""
    began_ns: int = 0
    """Begin of the first fetch, or of the query to a store; ``time.perf_counter_ns``."""
    ended_ns: int = 0
    """End of the last fetch."""
    parts: tuple[TransferStats, ...] = ()
    """The loads that these statistics are the sum of, in order; empty: there was one."""

    @property
    def loads(self) -> tuple[TransferStats, ...]:
        """All loads of the request, in order."""
        return self.parts or (self,)

    def then(self, later: TransferStats) -> TransferStats:
        """Return the sum with a later load of the same request; path, source and pipe stay those of this one."""
        return replace(
            self,
            kv_bytes=self.kv_bytes + later.kv_bytes,
            transfer_us=self.transfer_us + later.transfer_us,
            failures=self.failures + later.failures,
            parts=self.loads + later.loads,
        )


@dataclass(frozen=True, slots=True)
class PrefilledPrompt:
    """A prompt whose KV was computed beforehand and waits at a prefill instance.

    Attributes:
        address: ``host:port`` of the prefill instance.
        key: Key of the prompt there; empty: it is found by its tokens.
    """

    address: str
    key: str = ""


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """A request, as a connector sees it.

    Attributes:
        request_id: Id of the request.
        token_ids: Prompt and resumed output: all tokens whose KV is wanted.
        num_output_tokens: Number of these tokens that were generated before.
        sampling: Sampling parameters of the request.
        hashes: Chained hashes of the full blocks.
        candidates: Addresses of prefill instances to ask, best first.
        threshold: Smallest number of missing tokens for a remote prefill; ``None``: the connector's own.
        cache_salt: Salt that separates the request's KV from that of other requests.
        priority: Priority of the request.
        tenant: Tenant that owns the blocks; ``None``: no tenant.
        session_key: The same in all requests of a conversation; empty: unknown.
        retention_s: Seconds for which eviction should spare the conversation's KV; below 0: this is its last request.
        prefilled: Where the prompt's KV waits; ``None``: it was not computed beforehand.
        adapter: Id of the adapter whose KV is wanted; ``hashes`` begin with it. ``None``: the model's own.
        traceparent: W3C trace context of the load; empty: not traced.
    """

    request_id: RequestId
    token_ids: Sequence[int]
    num_output_tokens: int
    sampling: SamplingParams
    hashes: Sequence[BlockHash]
    candidates: tuple[str, ...] = ()
    threshold: int | None = None
    cache_salt: str = ""
    priority: int = 0
    tenant: Tenant | None = None
    session_key: bytes = b""
    retention_s: float = 0.0
    prefilled: PrefilledPrompt | None = None
    adapter: str | None = None
    traceparent: str = ""


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """Tokens that may come from outside.

    Attributes:
        num_tokens: Number of leading tokens of the request whose KV will be in the pool after a successful load, local
            ones included; blocks for all of them are reserved before ``start_load``.
        with_first_token: Whether the load also brings the next token.
    """

    num_tokens: int
    with_first_token: bool = False


@dataclass(frozen=True, slots=True)
class LoadUpdate:
    """The end of a load, good or bad.

    Attributes:
        request_id: Id of the request.
        num_valid_tokens: Number of leading tokens whose KV is in the pool now, local ones included.
        first_token: The next token, if the source sampled it.
        stats: Statistics of the load.
        error: Why the load fell short, for log and metrics; ``None`` if it did not.
    """

    request_id: RequestId
    num_valid_tokens: int
    first_token: TokenLogprob | None = None
    stats: TransferStats = field(default_factory=TransferStats)
    error: str | None = None


@dataclass(frozen=True, slots=True)
class PlannedSave:
    """Blocks of one request that a step is going to compute.

    Attributes:
        request_id: Id of the request.
        block_ids: All blocks of the request, from its first token on.
        num_tokens: Number of leading tokens whose KV will be complete after the step.
        num_computed: Number of leading tokens whose KV is complete before the step.
        hashes: Hashes of the leading blocks that will be complete.
        tenant: Tenant that owns the blocks; ``None``: no tenant.
    """

    request_id: RequestId
    block_ids: Sequence[BlockId]
    num_tokens: int
    num_computed: int = 0
    hashes: Sequence[BlockHash] = ()
    tenant: Tenant | None = None


class SchedulerSide:
    """Calls of the scheduler: loads, and which blocks must be kept."""

    def plan_load(self, request: LoadRequest, num_local_tokens: int) -> LoadPlan | None:
        """Return what to load for a request; ``None``: nothing.

        Args:
            request: Request that is about to be scheduled.
            num_local_tokens: Number of leading tokens in the engine's own prefix cache.
        """
        return None

    def start_load(self, request: LoadRequest, num_local_tokens: int, block_ids: Sequence[BlockId]) -> None:
        """Begin to load KV into a request's blocks.

        Args:
            request: Request of the last :meth:`plan_load`.
            num_local_tokens: Number of leading tokens already in the pool; their blocks must not be written.
            block_ids: All blocks of the request, from its first token on; with layer groups, the blocks of one group
                after the other, with -1 for blocks that no later token attends to.
        """
        raise InternalError(f"{type(self).__name__} plans loads but does not implement start_load")

    def cancel_load(self, request_id: RequestId) -> None:
        """Stop a load. Its ``LoadUpdate`` is still reported, after the last write into the blocks."""

    def poll_loads(self) -> list[LoadUpdate]:
        """Return the loads that ended since the last call."""
        return []

    def request_finished(self, request_id: RequestId) -> bool:
        """Handle the end of a request; ``True``: keep its blocks until ``poll_releases`` returns it."""
        return False

    def poll_releases(self) -> list[RequestId]:
        """Return finished requests whose blocks need not be kept any more."""
        return []

    def has_pending(self) -> bool:
        """Return whether loads are running or blocks of finished requests are kept."""
        return False


class WorkerSide:
    """Notifications of the computation.

    Attributes:
        follows_all: Whether to be called for every request, instead of only for those that are prefilled for other
            instances. If one of several connectors sets it, all of them are called.
    """

    follows_all: bool = False

    def step_begins(self, saves: Sequence[PlannedSave]) -> None:
        """Handle the start of a step that computes prompts. After a failed step ``blocks_computed`` is not called.

        Args:
            saves: Blocks of each request whose prompt makes progress; not empty.
        """

    def layer_computed(self, layer: int) -> None:
        """Handle the completion of one layer's KV of the running step, on every rank.

        Layers are reported in order. Some may be left out, for example those of later pipeline stages: the next step,
        or ``blocks_computed``, implies that they are complete too.
        """

    def blocks_belong(self, request_id: RequestId, tenant: Tenant) -> None:
        """Set the tenant of the blocks in the next call of :meth:`blocks_computed`; without it they have none."""

    def blocks_computed(
        self, request_id: RequestId, block_ids: Sequence[BlockId], hashes: Sequence[BlockHash], num_tokens: int
    ) -> None:
        """Handle the completion of KV up to a token.

        Called after each step in which a prompt made progress, and at the end of a request that generated.

        Args:
            request_id: Id of the request; for its sequences beyond the first, followed by ``#`` and their number.
            block_ids: All blocks of the request, from its first token on.
            hashes: Hashes of the leading complete blocks.
            num_tokens: Number of leading tokens whose KV is complete.
        """


class KVConnector(SchedulerSide, WorkerSide):
    """Moves KV between an engine's pool and other instances, stores or files."""

    def close(self) -> None:
        """Cancel all loads and release all blocks."""


class GuardedConnector(KVConnector):
    """Calls another connector and isolates its failures: they do not reach the engine, or connectors beside it.

    A hook that raises is logged, and counts as one that did nothing. Only ``plan_load`` and ``start_load`` raise, since
    their caller reports to the request why nothing was loaded.

    Args:
        connector: The connector; closed with this object.
    """

    def __init__(self, connector: KVConnector) -> None:
        self._connector = connector
        self._traced_at: dict[str, float] = {}
        self._ownerless: RequestId | None = None
        self.name = type(connector).__name__
        self.follows_all = connector.follows_all

    def plan_load(self, request: LoadRequest, num_local_tokens: int) -> LoadPlan | None:
        """Call the connector.

        Raises:
            Exception: The connector's own; InternalError if its answer is no plan.
        """
        plan: object = self._connector.plan_load(request, num_local_tokens)
        if plan is None or isinstance(plan, LoadPlan):
            return plan
        raise InternalError(f"{self.name} planned a load with a {type(plan).__name__}")

    def start_load(self, request: LoadRequest, num_local_tokens: int, block_ids: Sequence[BlockId]) -> None:
        """Call the connector.

        Raises:
            Exception: The connector's own.
        """
        self._connector.start_load(request, num_local_tokens, block_ids)

    def cancel_load(self, request_id: RequestId) -> None:
        """Call the connector. The load's update is still waited for: only it says when the last write has ended."""
        with self._guard("cancel_load"):
            self._connector.cancel_load(request_id)

    def poll_loads(self) -> list[LoadUpdate]:
        """Return the loads that ended; entries of another type are left out."""
        updates: list[LoadUpdate] = []
        with self._guard("poll_loads"):
            updates = [update for update in self._connector.poll_loads() if self._is(update, LoadUpdate, "poll_loads")]
        return updates

    def request_finished(self, request_id: RequestId) -> bool:
        """Return whether the blocks are to be kept; ``False`` if the connector failed."""
        answer = False
        with self._guard("request_finished"):
            answer = bool(self._connector.request_finished(request_id))
        return answer

    def poll_releases(self) -> list[RequestId]:
        """Return requests whose blocks are released; entries of another type are left out."""
        released: list[RequestId] = []
        with self._guard("poll_releases"):
            released = [name for name in self._connector.poll_releases() if self._is(name, str, "poll_releases")]
        return released

    def has_pending(self) -> bool:
        """Return whether something is outstanding; ``False`` if the connector failed."""
        answer = False
        with self._guard("has_pending"):
            answer = bool(self._connector.has_pending())
        return answer

    def step_begins(self, saves: Sequence[PlannedSave]) -> None:
        with self._guard("step_begins"):
            self._connector.step_begins(saves)

    def layer_computed(self, layer: int) -> None:
        try:  # not the guard: this is called for every layer of every step
            self._connector.layer_computed(layer)
        except Exception as error:
            self._note("layer_computed", error)

    def blocks_belong(self, request_id: RequestId, tenant: Tenant) -> None:
        """Call the connector; if that fails, the next blocks are not saved: they would have no owner."""
        self._ownerless = request_id
        with self._guard("blocks_belong"):
            self._connector.blocks_belong(request_id, tenant)
            self._ownerless = None

    def blocks_computed(
        self, request_id: RequestId, block_ids: Sequence[BlockId], hashes: Sequence[BlockHash], num_tokens: int
    ) -> None:
        ownerless = self._ownerless
        self._ownerless = None
        if ownerless == request_id:
            return
        with self._guard("blocks_computed"):
            self._connector.blocks_computed(request_id, block_ids, hashes, num_tokens)

    def close(self) -> None:
        with self._guard("close"):
            self._connector.close()

    @contextlib.contextmanager
    def _guard(self, hook: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self._note(hook, error)

    def _note(self, hook: str, error: Exception) -> None:
        now = time.monotonic()
        if now - self._traced_at.get(hook, -_TRACE_EVERY_S) >= _TRACE_EVERY_S:
            self._traced_at[hook] = now
            log.error("%s of connector %s failed", hook, self.name, exc_info=error)

    def _is(self, item: object, kind: type, hook: str) -> bool:
        if isinstance(item, kind):
            return True
        log.error("%s of connector %s returned a %s", hook, self.name, type(item).__name__)
        return False
