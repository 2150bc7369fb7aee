"""The contract between the engine and KV from outside: where more of a prompt may come from, and which readers want it.

The engine's scheduler calls a connector; transports implement it; services put the two together.

Life of a load (decode): ``plan_load`` says how many tokens could come from outside -> the scheduler reserves blocks
-> ``start_load`` -> the connector writes into those blocks and reports through ``poll_loads`` -> the request runs.
A load that failed reports how many leading tokens are valid; the engine computes the rest.

Life of a save (prefill): ``step_begins`` tells what a step is going to compute -> ``layer_computed`` as each layer's KV
is in the pool -> after the step ``blocks_computed`` tells which blocks are complete -> at the end ``request_finished``
returns ``True`` if the connector wants the blocks kept -> ``poll_releases`` gives them back. That is told of requests
that are prefilled for others, and of all if ``follows_all`` says so: of those that generate, the KV of their output is
told of at their end.

A connector has two sides: :class:`SchedulerSide` decides what is loaded and what is kept, :class:`WorkerSide` follows
the computation. Everything has a default that does nothing, so a connector says only what it does: one that saves
overrides ``blocks_computed``, one that loads the five methods from ``plan_load`` to ``has_pending``.

A method that raises is logged and costs what it was called for: ``plan_load`` and ``start_load`` a prefill here, all
others a save, or a word that the connector did not hear. No request fails for it, and the engine goes on
(:class:`GuardedConnector`). A load that was begun ends with its ``LoadUpdate`` all
the same, and with nothing else: its blocks stay where they are until it comes.

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
"""A hook that fails is called again for the next layer or step: its trace once in so many seconds is enough."""


@dataclass(frozen=True, slots=True)
class TransferStats:
    """What moving one request's KV took."""

    path: PrefillPath = PrefillPath.LOCAL
    source: str = ""
    """Instance the KV came from."""
    pipe: str = ""
    pipe_fallback: str = ""
    """Why a pipe preferred over ``pipe`` was not used."""
    kv_bytes: int = 0
    transfer_us: int = 0
    transferred_tokens: int = 0
    source_cached_tokens: int = 0
    """Prefix hits at the source."""
    exposed_us: int = 0
    """From the end of the computation to the last byte: what the transfer added to the time to first token."""
    failures: tuple[str, ...] = ()
    """Sources that were tried in vain: ``"instance: reason"``."""
    local_reason: str = ""
    """Why nothing came from outside."""
    kind: str = ""
    """What brought it, or tried to: ``kv_transfer`` from an instance, ``kv_store``; empty: nothing was tried."""
    began_ns: int = 0
    """When the first fetch, or the question to a store, began; ``time.perf_counter_ns``."""
    ended_ns: int = 0
    """When the last byte was there, or nothing more was to come."""
    parts: tuple[TransferStats, ...] = ()
    """The loads that these are the sum of, in order; empty: there was one."""

    @property
    def loads(self) -> tuple[TransferStats, ...]:
        """Every load, in order."""
        return self.parts or (self,)

    def then(self, later: TransferStats) -> TransferStats:
        """Return these with what a later load of the same request took; how its prompt came stays as it was."""
        return replace(
            self,
            kv_bytes=self.kv_bytes + later.kv_bytes,
            transfer_us=self.transfer_us + later.transfer_us,
            failures=self.failures + later.failures,
            parts=self.loads + later.loads,
        )


@dataclass(frozen=True, slots=True)
class PrefilledPrompt:
    """Where a prompt's KV waits that was computed beforehand.

    Attributes:
        address: host:port of the prefill instance.
        key: Names it there; empty: it is found by its tokens.
    """

    address: str
    key: str = ""


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """What a connector needs to know of a request.

    Attributes:
        token_ids: Prompt and resumed output: all tokens whose KV is wanted.
        num_output_tokens: How many of them were generated before.
        hashes: Chained hashes of its full blocks.
        candidates: Addresses of instances to ask, best first.
        threshold: Missing tokens from which a remote prefill pays; ``None``: the connector's own.
        tenant: Whose blocks these are; ``None``: no tenant's.
        prefilled: Where the KV waits already; ``None``: nowhere.
        adapter: Id of the adapter whose KV is wanted; ``hashes`` begin with it. ``None``: the model's own.
        traceparent: W3C trace context that the load is part of; empty: it is not traced.
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
    prefilled: PrefilledPrompt | None = None
    adapter: str | None = None
    traceparent: str = ""


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """Tokens that may come from outside.

    Attributes:
        num_tokens: Leading tokens of the request whose KV will be there when the load has ended well, those found
            locally included; blocks for all of them are reserved before ``start_load``.
        with_first_token: Whether the load brings the next token too.
    """

    num_tokens: int
    with_first_token: bool = False


@dataclass(frozen=True, slots=True)
class LoadUpdate:
    """The end of a load, good or bad.

    Attributes:
        num_valid_tokens: Leading tokens whose KV is in the pool now, the local ones included.
        first_token: The next token, if the source sampled it.
        error: Why the load fell short, for log and metrics; ``None`` if it did not.
    """

    request_id: RequestId
    num_valid_tokens: int
    first_token: TokenLogprob | None = None
    stats: TransferStats = field(default_factory=TransferStats)
    error: str | None = None


@dataclass(frozen=True, slots=True)
class PlannedSave:
    """What a step will have computed of one request.

    Attributes:
        block_ids: All blocks of the request, from its first token on.
        num_tokens: Leading tokens whose KV will be complete after the step.
        num_computed: Those of them whose KV is complete before it.
        hashes: Of the blocks that will be complete.
        tenant: Owner of the request's blocks; ``None``: none.
    """

    request_id: RequestId
    block_ids: Sequence[BlockId]
    num_tokens: int
    num_computed: int = 0
    hashes: Sequence[BlockHash] = ()
    tenant: Tenant | None = None


class SchedulerSide:
    """What the scheduler asks: where KV may come from, and which blocks must stay."""

    def plan_load(self, request: LoadRequest, num_local_tokens: int) -> LoadPlan | None:
        """Say how much could come from outside, or ``None`` if nothing should.

        Args:
            request: The request.
            num_local_tokens: Leading tokens found in the engine's own prefix cache.
        """
        return None

    def start_load(self, request: LoadRequest, num_local_tokens: int, block_ids: Sequence[BlockId]) -> None:
        """Begin to fill blocks.

        Args:
            request: The request.
            num_local_tokens: Leading tokens already there; blocks before them must not be written.
            block_ids: All blocks of the request, from its first token on; for each layer group, one after the other,
                where -1 stands for blocks that no later token will see.
        """
        raise InternalError(f"{type(self).__name__} plans loads and does not say how one starts")

    def cancel_load(self, request_id: RequestId) -> None:
        """Stop a load. Its ``LoadUpdate`` still comes, once the last write into the blocks has ended."""

    def poll_loads(self) -> list[LoadUpdate]:
        """Return the loads that ended since the last call."""
        return []

    def request_finished(self, request_id: RequestId) -> bool:
        """Tell that a request ended; ``True``: keep its blocks until ``poll_releases`` names it."""
        return False

    def poll_releases(self) -> list[RequestId]:
        """Return finished requests whose blocks are not needed any more."""
        return []

    def has_pending(self) -> bool:
        """Whether loads or held blocks are outstanding."""
        return False


class WorkerSide:
    """What the computation tells.

    Attributes:
        follows_all: Whether to tell of every request, and not only of those that are prefilled for others. Beside a
            connector that wants that, others are told too.
    """

    follows_all: bool = False

    def step_begins(self, saves: Sequence[PlannedSave]) -> None:
        """Tell what a step is about to compute of prompts. A step that fails is not followed by ``blocks_computed``.

        Args:
            saves: One entry per request whose prompt makes progress; not empty.
        """

    def layer_computed(self, layer: int) -> None:
        """Tell that one layer's KV of the running step is in the pool, on every rank.

        Layers come in order. Some may be left out (those of later pipeline stages, for one): the next step, or
        ``blocks_computed``, says that they are done too.
        """

    def blocks_belong(self, request_id: RequestId, tenant: Tenant) -> None:
        """Tell whose blocks the next call of :meth:`blocks_computed` is about; without it they have none."""

    def blocks_computed(
        self, request_id: RequestId, block_ids: Sequence[BlockId], hashes: Sequence[BlockHash], num_tokens: int
    ) -> None:
        """Tell that KV is complete up to a token.

        Called after each step in which a prompt made progress, and at the end of a request that generated.

        Args:
            request_id: The request; of its ``n`` sequences beyond the first, with ``#`` and the sequence's number.
            block_ids: All blocks of the request, from its first token on.
            hashes: Hashes of its full blocks, as far as they are complete.
            num_tokens: Leading tokens whose KV is complete.
        """


class KVConnector(SchedulerSide, WorkerSide):
    """Moves KV between an engine's pool and the outside."""

    def close(self) -> None:
        """End all loads and give everything back."""


class GuardedConnector(KVConnector):
    """Calls another connector and isolates its failures: they do not reach the engine, or connectors beside it.

    A hook that raises is logged, and counts as one that did nothing or had nothing to say. ``plan_load`` and
    ``start_load`` alone raise, since their caller has to tell the request why nothing was loaded.

    Args:
        connector: Belongs to this object from now on.
    """

    def __init__(self, connector: KVConnector) -> None:
        self._connector = connector
        self._traced_at: dict[str, float] = {}
        self._ownerless: RequestId | None = None
        self.name = type(connector).__name__
        self.follows_all = connector.follows_all

    def plan_load(self, request: LoadRequest, num_local_tokens: int) -> LoadPlan | None:
        """Pass on; see :meth:`SchedulerSide.plan_load`.

        Raises:
            Exception: Whatever the connector raised; InternalError if its answer is no plan.
        """
        plan: object = self._connector.plan_load(request, num_local_tokens)
        if plan is None or isinstance(plan, LoadPlan):
            return plan
        raise InternalError(f"{self.name} planned a load with a {type(plan).__name__}")

    def start_load(self, request: LoadRequest, num_local_tokens: int, block_ids: Sequence[BlockId]) -> None:
        """Pass on; see :meth:`SchedulerSide.start_load`.

        Raises:
            Exception: Whatever the connector raised.
        """
        self._connector.start_load(request, num_local_tokens, block_ids)

    def cancel_load(self, request_id: RequestId) -> None:
        """Pass on. The load's update is waited for all the same: only it says when the last write has ended."""
        with self._guard("cancel_load"):
            self._connector.cancel_load(request_id)

    def poll_loads(self) -> list[LoadUpdate]:
        """Return the loads that ended; entries that are no updates are left out."""
        found: list[LoadUpdate] = []
        with self._guard("poll_loads"):
            found = [update for update in self._connector.poll_loads() if self._is(update, LoadUpdate, "poll_loads")]
        return found

    def request_finished(self, request_id: RequestId) -> bool:
        """Whether the blocks are to be kept; ``False`` where the connector could not say."""
        answer = False
        with self._guard("request_finished"):
            answer = bool(self._connector.request_finished(request_id))
        return answer

    def poll_releases(self) -> list[RequestId]:
        """Return requests that were let go; entries that are no names are left out."""
        found: list[RequestId] = []
        with self._guard("poll_releases"):
            found = [name for name in self._connector.poll_releases() if self._is(name, str, "poll_releases")]
        return found

    def has_pending(self) -> bool:
        """Whether something is outstanding; ``False`` where the connector could not say."""
        answer = False
        with self._guard("has_pending"):
            answer = bool(self._connector.has_pending())
        return answer

    def step_begins(self, saves: Sequence[PlannedSave]) -> None:
        """Pass on; errors are logged."""
        with self._guard("step_begins"):
            self._connector.step_begins(saves)

    def layer_computed(self, layer: int) -> None:
        """Pass on; errors are logged."""
        try:  # not the guard: this is called for every layer of every step
            self._connector.layer_computed(layer)
        except Exception as error:
            self._note("layer_computed", error)

    def blocks_belong(self, request_id: RequestId, tenant: Tenant) -> None:
        """Pass on; if that fails, what the next call is about is not saved: it would be saved without an owner."""
        self._ownerless = request_id
        with self._guard("blocks_belong"):
            self._connector.blocks_belong(request_id, tenant)
            self._ownerless = None

    def blocks_computed(
        self, request_id: RequestId, block_ids: Sequence[BlockId], hashes: Sequence[BlockHash], num_tokens: int
    ) -> None:
        """Pass on; errors are logged."""
        ownerless, self._ownerless = self._ownerless, None
        if ownerless == request_id:
            return
        with self._guard("blocks_computed"):
            self._connector.blocks_computed(request_id, block_ids, hashes, num_tokens)

    def close(self) -> None:
        """Pass on; errors are logged."""
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
