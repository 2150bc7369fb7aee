"""A decision in words and numbers: one request's record as a JSON object."""

from __future__ import annotations

import math
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any

from baton.api.v1 import common_pb2
from baton.rpc.convert import path_from_pb
from baton.types import PrefillPath
from baton_router.scheduler.decision import RUNNING, Decision, DecisionCandidate, DecisionRecord, Term

_ROLES = {common_pb2.ROLE_PREFILL: "prefill", common_pb2.ROLE_DECODE: "decode"}
_LOCAL_REASONS = {
    "short": "the prompt is shorter than the threshold for a remote prefill",
    "cached": "so much of the prompt was in its cache that less than the threshold was missing",
    "no_candidates": "the router named no prefill instance",
    "adapter": "the request names an adapter, which the call to prefill cannot",
    "prefill_failed": "every prefill candidate failed",
    "unreadable": "nothing came over the pipes of any prefill candidate lately, so they are left alone for a while",
    "prefill_busy": "the prefill instances' queues were too long",
    "prompt_logprobs": "log probabilities of the prompt need every token computed there",
    "store_miss": "the KV store had nothing and no prefill instance was asked",
    "store_failed": "the KV store failed and no prefill instance was asked",
    "store_resting": "the KV store is left alone after failures and no prefill instance was asked",
}


def summary(record: DecisionRecord) -> dict[str, Any]:
    """Return a request in one line, for lists."""
    decision = record.decision
    clock = record.clock
    trace = record.trace or common_pb2.RequestTrace()
    decode = trace.decode_instance or (decision.decode_instance if decision is not None else "")
    path = path_from_pb(trace.path)
    return {
        "id": record.request_id,
        "time": record.began,
        "outcome": record.outcome,
        "policy": decision.policy if decision is not None else None,
        "prefill": _prefill(record, trace),
        "decode": decode or None,
        "path": path,
        "reason": trace.local_reason or None,
        "pipe": trace.pipe or None,
        "kv_bytes": trace.kv_bytes,
        "prompt_tokens": record.prompt_tokens,
        "generated_tokens": clock.generated if clock is not None else 0,
        "match_rate": _match_rate(record, trace),
        "index_state": decision.index_state if decision is not None else None,
        "router_queue_ms": trace.router_queue_us / 1000,
        "ttft_ms": _ms(clock.first_token_s if clock is not None else None),
        "duration_ms": _ms(record.duration_s),
        "placements": len(record.placements),
        "migrations": trace.num_migrations,
        "direct": record.direct,
        "session": record.session or None,
        "grammar": record.grammar or None,
        "tools": record.tools or None,
        "thinking_budget": record.thinking_budget,
    }


def explanation(record: DecisionRecord) -> dict[str, Any]:
    """Return everything that is known of a request: all placements with their reasons, and the outcome."""
    return {
        **summary(record),
        "time_iso": datetime.fromtimestamp(record.began, UTC).isoformat(timespec="milliseconds"),
        "why": _why(record),
        "placements": [_placement(at, decision) for at, decision in record.placements],
        "trace": _trace(record.trace) if record.trace is not None else None,
    }


def _prefill(record: DecisionRecord, trace: common_pb2.RequestTrace) -> str | None:
    if trace.path:
        return trace.prefill_instance or None
    return (record.decision.prefill_instance or None) if record.decision is not None else None


def _match_rate(record: DecisionRecord, trace: common_pb2.RequestTrace) -> float | None:
    """KV match rate of the instance that computed the prompt, or was chosen for it, at the first placement."""
    if not record.placements:
        return None
    decision = record.placements[0][1]
    name = _prefill(record, trace) or decision.decode_instance
    sides = (decision.prefill, decision.decode)
    return next(
        (float(rate) for x in sides for known, rate in zip(x.ids, x.match_rates, strict=True) if known == name), None
    )


def _placement(at: float, decision: Decision) -> dict[str, Any]:
    rows = []
    for candidate in decision.candidates:
        role = _ROLES.get(candidate.role, "unknown")
        winner = decision.prefill_instance if role == "prefill" else decision.decode_instance
        rows.append(
            {
                "instance": candidate.instance_id,
                "role": role,
                "match_rate": _number(candidate.match_rate),
                "tiers": candidate.tiers,
                "load": _number(candidate.load),
                "score": _number(candidate.score),
                "terms": _terms(candidate.terms),
                "partner": candidate.partner or None,
                "own": _terms(candidate.own),
                "partner_terms": _terms(candidate.partner_terms),
                "pair_terms": _terms(candidate.pair_terms),
                "winner": candidate.instance_id == winner,
            }
        )
    return {
        "at_ms": _ms(at),
        "policy": decision.policy,
        "index_state": decision.index_state,
        "prompt_tokens": decision.prompt_tokens,
        "prefill": decision.prefill_instance or None,
        "decode": decision.decode_instance,
        "prefill_order": list(decision.prefill_addresses),
        "path": decision.path.value if decision.path is not None else None,
        "score": _number(decision.score),
        "terms": _terms(decision.terms),
        "candidates": rows,
    }


def _terms(terms: Iterable[Term]) -> dict[str, float | None]:
    return {name: _number(value) for name, value in terms}


def _trace(trace: common_pb2.RequestTrace) -> dict[str, Any]:
    return {
        "path": path_from_pb(trace.path),
        "local_reason": trace.local_reason or None,
        "prefill": trace.prefill_instance or None,
        "decode": trace.decode_instance or None,
        "pipe": trace.pipe or None,
        "pipe_fallback": trace.pipe_fallback or None,
        "kv_bytes": trace.kv_bytes,
        "transfer_ms": trace.transfer_us / 1000,
        "exposed_ms": trace.exposed_us / 1000,
        "cached_tokens": trace.cached_tokens,
        "transferred_tokens": trace.transferred_tokens,
        "recomputed_tokens": trace.recomputed_tokens,
        "prefill_cached_tokens": trace.prefill_cached_tokens,
        "queue_ms": trace.queue_us / 1000,
        "decode_ttft_ms": trace.ttft_us / 1000,
        "preemptions": trace.num_preemptions,
        "reloaded_tokens": trace.reloaded_tokens,
        "repeated_tokens": trace.repeated_tokens,
        "drafted_tokens": trace.drafted_tokens,
        "accepted_tokens": trace.accepted_tokens,
        "migrations": trace.num_migrations,
        "failed_prefills": list(trace.failed_prefills),
    }


# --- in words ---


def _why(record: DecisionRecord) -> list[str]:
    if not record.placements:
        return [f"it was never placed: {record.outcome}"]
    first = record.placements[0][1]
    lines = [_choice(first, role) for role in ("decode", "prefill")]
    for after_s, decision in record.placements[1:]:
        lines.append(f"after {1000 * after_s:.1f} ms it was placed again, on {decision.decode_instance}")
    if record.direct:
        lines.append("its client received the tokens from the decode instance itself, and reported them (direct mode)")
    if record.grammar:
        lines.append(f"its answer is held to a grammar: {record.grammar}")
    if record.session:
        lines.append(f"its conversation is {record.session}")
    if record.tools:
        lines.append(f"its tools are {record.tools}")
    if record.thinking_budget is not None:
        lines.append(f"its reasoning ends after {record.thinking_budget} tokens")
    trace = record.trace
    if trace is not None and trace.router_queue_us:
        lines.insert(0, f"it waited {trace.router_queue_us / 1000:.1f} ms in the router's queue for room")
    if trace is not None and trace.path:
        lines.append(_way(trace))
        lines += [f"tried and failed: {item}" for item in trace.failed_prefills]
    if first.index_state and first.index_state != "exact":
        lines.append(f"the index of an instance that was chosen was {first.index_state}: match rates may be off")
    if record.outcome not in (RUNNING, "done"):
        lines.append(f"it ended with {record.outcome}")
    return lines


def _choice(decision: Decision, role: str) -> str:
    rivals = [x for x in decision.candidates if _ROLES.get(x.role) == role]
    name = decision.prefill_instance if role == "prefill" else decision.decode_instance
    chosen = next((x for x in rivals if x.instance_id == name), None)
    if not name:
        what = "loads from the KV store" if decision.path is PrefillPath.STORE else "computes the prompt by itself"
        return f"prefill: none, decode {what}"
    if chosen is None:
        return f"{role}: {name}, by {decision.policy}"
    others = [x for x in rivals if x is not chosen]
    said = (
        f"{role}: {name}, by {decision.policy}, holds {chosen.match_rate:.0%} of the prompt "
        f"at {chosen.load:.2f} times the mean load"
    )
    if chosen.tiers:
        said += "".join(f", can load {tokens} tokens from {tier}" for tier, tokens in chosen.tiers.items())
    if not others:
        return f"{said}; the only candidate"
    best = max(others, key=lambda x: x.score)
    score = f"{said}; {'pair score' if chosen.partner else 'score'} {chosen.score:.3f}{_with(chosen)}"
    if math.isclose(best.score, chosen.score, rel_tol=1e-9, abs_tol=1e-12):
        return f"{score}, a tie with {best.instance_id}"
    relation = "before" if chosen.score > best.score else "though the score is below that of"
    return f"{score}, {relation} {best.instance_id} ({best.score:.3f}{_with(best)})"


def _with(candidate: DecisionCandidate) -> str:
    """Return with whom a candidate has its score."""
    if candidate.partner in (PrefillPath.LOCAL, PrefillPath.STORE):
        return f" by path {candidate.partner}"
    return f" with {candidate.partner}" if candidate.partner else ""


def _way(trace: common_pb2.RequestTrace) -> str:
    path = path_from_pb(trace.path)
    moved = f"{trace.kv_bytes:,} bytes over {trace.pipe}" if trace.pipe else "no bytes moved"
    if path == "local":
        kind = trace.local_reason.partition(":")[0]
        reason = _LOCAL_REASONS.get(kind, trace.local_reason or "no reason was given")
        return f"path: local, {trace.decode_instance} computed the prompt: {reason}"
    source = trace.prefill_instance if path == "remote" else "the KV store"
    return f"path: {path}, from {source} to {trace.decode_instance}: {moved}"


def _number(value: float) -> float | None:
    """Return ``None`` for infinity, the score of impossible candidates, which JSON does not have."""
    return value if math.isfinite(value) else None


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(1000 * seconds, 3)
