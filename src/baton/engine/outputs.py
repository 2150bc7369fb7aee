"""What the engine reports of a sequence."""

from __future__ import annotations

from baton.engine.request import RequestMetrics, SequenceOutput
from baton.engine.sequence import Sequence
from baton.types import TokenLogprob


def token_output(sequence: Sequence, token: int, logprob: TokenLogprob | None, *, first: bool) -> SequenceOutput:
    """Report a token that was just appended.

    Args:
        sequence: The sequence; its ``finish_reason`` is set if this token ended it.
        token: The token.
        logprob: Its log probability, if asked for.
        first: Whether it is the request's first token here.
    """
    group = sequence.group
    reason = sequence.finish_reason
    return SequenceOutput(
        request_id=group.request.request_id,
        index=sequence.index,
        token_ids=[token],
        logprobs=[logprob] if logprob is not None else None,
        finish_reason=reason,
        stop_token_id=token if reason is not None and token in group.stop_ids else None,
        metrics=request_metrics(sequence) if first or reason is not None else None,
        prompt_logprobs=group.prompt_logprobs if first else None,
    )


def end_output(sequence: Sequence, error: str | None) -> SequenceOutput:
    """Report an end without a token: abort or error."""
    return SequenceOutput(
        request_id=sequence.group.request.request_id,
        index=sequence.index,
        token_ids=[],
        finish_reason=sequence.finish_reason,
        error=error,
        metrics=request_metrics(sequence),
    )


def request_metrics(sequence: Sequence) -> RequestMetrics:
    """Return how a sequence fared so far; times are those of its request."""
    group = sequence.group
    return RequestMetrics(
        prompt_tokens=sequence.num_prompt,
        cached_tokens=min(sequence.num_cached, sequence.num_prompt),
        transferred_tokens=sequence.num_transferred,
        computed_tokens=sequence.num_prompt_computed,
        queue_us=_microseconds(group.arrived_ns, group.admitted_ns),
        ttft_us=_microseconds(group.arrived_ns, group.first_token_ns),
        num_preemptions=sequence.num_preemptions,
        transfer=group.transfer,
    )


def _microseconds(start_ns: int, end_ns: int) -> int:
    return max(0, end_ns - start_ns) // 1000
