"""What goes into an engine and what comes out."""

from __future__ import annotations

from dataclasses import dataclass, field

from baton.kv_cache.connector import PrefilledPrompt, TransferStats
from baton.types import FinishReason, RequestId, SamplingParams, Tenant, TokenLogprob


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """A request as an engine takes it.

    Attributes:
        prompt_token_ids: The prompt.
        output_token_ids: Tokens that another instance generated before: they count as output (``max_tokens``,
            penalties, seeds) but are not reported again.
        prefill_only: Compute the prompt, sample one token, finish; the connector may keep the blocks.
        candidates: Addresses of prefill instances, best first.
        threshold: Missing prompt tokens from which a remote prefill is used; ``None``: the connector's own.
        priority: Lower runs first.
        tenant: Owner of the request's blocks; ``None``: none.
        prefilled: Where the prompt's KV waits already; ``None``: nowhere.
        adapter: Id of the adapter whose KV this is, part of the request's block hashes; ``None``: the model's own.
    """

    request_id: RequestId
    prompt_token_ids: list[int]
    sampling: SamplingParams
    output_token_ids: list[int] = field(default_factory=list)
    prefill_only: bool = False
    cache_salt: str = ""
    priority: int = 0
    candidates: tuple[str, ...] = ()
    threshold: int | None = None
    tenant: Tenant | None = None
    prefilled: PrefilledPrompt | None = None
    adapter: str | None = None


@dataclass(frozen=True, slots=True)
class RequestMetrics:
    """How a request fared, reported with its first token and with its end. Times in microseconds."""

    prompt_tokens: int
    cached_tokens: int = 0
    """Found in this engine's prefix cache at admission."""
    transferred_tokens: int = 0
    """Came from outside."""
    computed_tokens: int = 0
    """Prompt tokens computed by this engine (first pass, preemptions not counted)."""
    queue_us: int = 0
    ttft_us: int = 0
    num_preemptions: int = 0
    transfer: TransferStats = field(default_factory=TransferStats)


@dataclass(frozen=True, slots=True)
class SequenceOutput:
    """What one step gave to one sequence.

    Attributes:
        index: Which of the ``n`` sequences.
        token_ids: New tokens; a stop token is included.
        logprobs: Parallel to ``token_ids``, if asked for.
        stop_token_id: The token that ended the sequence, if one did.
        metrics: With the first token of sequence 0 and with every end.
        prompt_logprobs: With the first token of sequence 0, if asked for; ``None`` for the first prompt token.
    """

    request_id: RequestId
    index: int
    token_ids: list[int]
    logprobs: list[TokenLogprob] | None = None
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    error: str | None = None
    metrics: RequestMetrics | None = None
    prompt_logprobs: list[TokenLogprob | None] | None = None


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A moment's view of an engine."""

    num_running: int
    num_waiting: int
    num_loading: int
    blocks_total: int
    blocks_active: int
    blocks_cached: int
    waiting_prompt_tokens: int
    num_preemptions: int
    prefill_tokens: int
    """Prompt tokens computed since start."""
    decode_tokens: int
    """Tokens generated since start."""
    prefix_hit_tokens: int
    prefix_query_tokens: int
