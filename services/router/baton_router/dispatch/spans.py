"""The end of a request's span: what the router knows of the request then."""

from __future__ import annotations

from collections.abc import Iterable

from baton.rpc.convert import trace_attributes
from baton_router.dispatch.attempt import Sequence, TraceMerge
from baton_router.types import RoutedRequest


def end_span(request: RoutedRequest, traces: TraceMerge, sequences: Iterable[Sequence], status: str) -> None:
    """End a request's span, with what its instances told of it and OpenTelemetry's names for what all models have."""
    span = request.span
    if span.recording:
        generated = sum(len(sequence.token_ids) for sequence in sequences) - len(request.output_token_ids)
        if traces.attempts():
            span.attributes.update(trace_attributes(traces.merged()))
        span.attributes["baton.request_id"] = request.request_id
        span.attributes["gen_ai.usage.input_tokens"] = len(request.prompt_token_ids)
        span.attributes["gen_ai.usage.output_tokens"] = generated
        if request.tenant:
            span.attributes["baton.tenant"] = request.tenant
    span.end(status)
