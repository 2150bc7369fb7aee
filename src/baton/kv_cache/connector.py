"""What the engine knows of the outside world of KV: where more of a prompt may come from, and who wants it.

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
(:class:`baton.kv_cache.fault_isolation.GuardedConnector`). A load that was begun ends with its ``LoadUpdate`` all
the same, and with nothing else: its blocks stay where they are until it comes.

Every method is called in the engine's thread and must not block. ``wake`` (given to the connector by whoever builds
it) may be called from any thread to make the engine poll.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from baton.errors import InternalError
from baton.types import BlockHash, BlockId, PrefillPath, RequestId, SamplingParams, Tenant, TokenLogprob


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
            block_ids: All blocks of the request, from its first token on.
        """
        raise InternalError(f"{type(self).__name__} plans loads and does not say how one starts")

    def cancel_load(self, request_id: RequestId) -> None:
        """Stop a load. Its ``LoadUpdate`` still comes, once nobody writes into the blocks any more."""

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
        """Tell whose blocks the next call of :meth:`blocks_computed` is about; without it they are nobody's."""

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
