"""Requests and outputs of an engine, and the check of a request before any block is allocated for it."""

from __future__ import annotations

from collections.abc import Sequence as Sequence
from dataclasses import dataclass, field

import numpy as np

from baton.engine.grammar.constraint import Constraint
from baton.errors import InvalidRequestError
from baton.kv_cache.connector import PrefilledPrompt, TransferStats
from baton.seeds import request_seed
from baton.types import FinishReason, RequestId, SamplingParams, Tenant, TokenLogprob


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """A request to an engine.

    Attributes:
        request_id: Unique id among unfinished requests.
        prompt_token_ids: The prompt, at least one token.
        sampling: Sampling parameters.
        output_token_ids: Tokens that another instance generated: they count as output (``max_tokens``, penalties,
            seeds) but are not reported again.
        prefill_only: Compute the prompt, sample one token, finish; the connector may keep the blocks.
        cache_salt: Separates prefix caches: only requests with the same salt share blocks.
        candidates: Addresses of prefill instances, best first.
        threshold: Missing prompt tokens from which a remote prefill is used; ``None``: the connector's default.
        priority: Lower runs first.
        tenant: Owner of the request's blocks; ``None``: none.
        session_key: The same in all requests of a conversation; empty: unknown.
        retention_s: Seconds for which eviction should spare the conversation's KV; below 0: this is its last request.
        prefilled: Instance that already holds the prompt's KV; ``None``: none.
        constraint: Compiled grammar of ``sampling``, advanced by ``output_token_ids``; compiled by the caller.
        adapter: Id of the adapter whose KV this is, part of the request's block hashes; ``None``: the model's own.
        traceparent: W3C trace context that loads of KV are part of; empty: they are not traced.
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
    session_key: bytes = b""
    retention_s: float = 0.0
    prefilled: PrefilledPrompt | None = None
    adapter: str | None = None
    constraint: Constraint | None = None
    traceparent: str = ""

    @property
    def tenant_id(self) -> str:
        """Id of the tenant; empty: none."""
        return "" if self.tenant is None else self.tenant.id


@dataclass(frozen=True, slots=True)
class RequestMetrics:
    """Figures of one request, reported with its first token and at its end. Times in microseconds."""

    prompt_tokens: int
    arrived_ns: int = 0
    """When it came to the engine, by ``time.monotonic_ns``."""
    cached_tokens: int = 0
    """Found in this engine's prefix cache at admission."""
    transferred_tokens: int = 0
    """Came from outside."""
    computed_tokens: int = 0
    """Prompt tokens computed by this engine (first pass, preemptions not counted)."""
    queue_us: int = 0
    ttft_us: int = 0
    num_preemptions: int = 0
    reloaded_tokens: int = 0
    """Of prompt and output, came from outside once more after a preemption."""
    repeated_tokens: int = 0
    """Of prompt and output, were computed once more after a preemption."""
    drafted_tokens: int = 0
    """Draft tokens of speculative decoding that were verified, of all sequences."""
    accepted_tokens: int = 0
    """Draft tokens that were accepted, of all sequences."""
    transfer: TransferStats = field(default_factory=TransferStats)


@dataclass(frozen=True, slots=True)
class SequenceOutput:
    """New tokens of one sequence from one step.

    Attributes:
        index: Index of the sequence, 0 to n-1.
        token_ids: New tokens; a stop token is included.
        logprobs: Parallel to ``token_ids``, if asked for.
        stop_token_id: The token that ended the sequence, if one did.
        metrics: Set with the first token of sequence 0 and at every end.
        prompt_logprobs: Set with the first token of sequence 0, if asked for; the first entry is ``None``.
        unfit: Whether the error is caused by the request, so that another instance would fail too.
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
    unfit: bool = False


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Counters of an engine at one moment."""

    num_running: int
    num_waiting: int
    num_loading: int
    num_blocks: int
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
    num_bounded_steps: int = 0
    """Steps in which the budget in time left prompt tokens for later, since start."""
    early_evictions: int = 0
    """Blocks evicted before older ones since their session's usual gap is long."""
    spared_blocks: int = 0
    """Times that a hint spared a block that was to be evicted."""


def check_request(request: EngineRequest, *, vocab_size: int, max_model_len: int, seed: int) -> SamplingParams:
    """Check a request and fill in defaults of its sampling parameters.

    Args:
        request: The request.
        vocab_size: Token ids must be below it.
        max_model_len: Most tokens of prompt and output together.
        seed: The engine's seed, for requests that bring none.

    Returns:
        The sampling parameters with ``max_tokens`` and ``seed`` set; ``n`` is 1 for ``prefill_only``.

    Raises:
        InvalidRequestError: Names the field.
    """
    sampling = request.sampling
    if not request.request_id:
        raise InvalidRequestError("request_id is empty", field="request_id")
    if len(request.prompt_token_ids) == 0:
        raise InvalidRequestError("prompt is empty: at least one token is needed", field="prompt")
    _check_tokens(request.prompt_token_ids, vocab_size, "prompt")
    _check_tokens(request.output_token_ids, vocab_size, "output_token_ids")
    sampling.validate(vocab_size=vocab_size)
    if sampling.grammar is not None and request.constraint is None:
        raise InvalidRequestError("this instance has no support for grammars", field="grammar")
    num_prompt = len(request.prompt_token_ids)
    num_output = len(request.output_token_ids)
    if request.prefill_only:
        sampling = sampling.replace(n=1)
        limit = max_model_len
    else:
        limit = max_model_len - 1
    if num_prompt > limit:
        raise InvalidRequestError(
            f"prompt has {num_prompt} tokens, but at most {limit} fit into max_model_len ({max_model_len})",
            field="prompt",
        )
    max_tokens = sampling.max_tokens if sampling.max_tokens is not None else max(1, max_model_len - num_prompt)
    if not request.prefill_only and num_prompt + max_tokens > max_model_len:
        raise InvalidRequestError(
            f"max_tokens is {max_tokens}, but after a prompt of {num_prompt} tokens only "
            f"{max_model_len - num_prompt} fit into max_model_len ({max_model_len})",
            field="max_tokens",
        )
    if num_output and (num_output >= max_tokens or num_prompt + num_output > limit):
        raise InvalidRequestError(
            f"output_token_ids has {num_output} tokens: nothing is left to generate", field="output_token_ids"
        )
    if num_output and sampling.n > 1:
        raise InvalidRequestError(
            "a request with output_token_ids continues one sequence: n must be 1 "
            "(send each sequence with its own seed)",
            field="n",
        )
    return sampling.replace(
        max_tokens=max_tokens,
        seed=sampling.seed if sampling.seed is not None else request_seed(seed, request.request_id),
    )


def _check_tokens(token_ids: Sequence[int], vocab_size: int, field: str) -> None:
    try:
        array = np.asarray(token_ids if len(token_ids) else np.empty(0, np.int64))
    except (ValueError, OverflowError) as error:
        raise InvalidRequestError(f"{field} must be a flat list of token ids", field=field) from error
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise InvalidRequestError(f"{field} must be a flat list of token ids", field=field)
    wrong = array[(array < 0) | (array >= vocab_size)]
    if len(wrong):
        raise InvalidRequestError(
            f"{field} has token id {wrong[0]}, which is not in the vocabulary (0 to {vocab_size - 1})", field=field
        )
