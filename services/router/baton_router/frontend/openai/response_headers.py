"""The ``x-baton-*`` headers: which way a request went."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from baton.api.v1 import common_pb2
from baton.rpc.convert import path_to_pb
from baton.types import PrefillPath
from baton_router.processor.text_request import TextChunk
from baton_router.scheduler.decision import Decision

NONE = "none"
_PATHS: dict[int, str] = {path_to_pb(path): path.value for path in PrefillPath}


class Route:
    """How one prompt was served, as far as it is known."""

    __slots__ = ("cached_tokens", "decision", "trace")

    def __init__(self) -> None:
        self.cached_tokens = 0
        self.trace: common_pb2.RequestTrace | None = None
        self.decision: Decision | None = None

    def add(self, chunk: TextChunk) -> None:
        """Take what a chunk tells; later traces are more complete."""
        if chunk.trace is not None:
            self.trace, self.cached_tokens = chunk.trace, chunk.cached_tokens
        if chunk.decision is not None:
            self.decision = chunk.decision

    def prefill(self) -> str:
        """Return the instance that computed the prompt, or was chosen for it."""
        if self.trace is not None:
            return self.trace.prefill_instance
        return self.decision.prefill_instance if self.decision else ""

    def decode(self) -> str:
        """Return the instance that generates."""
        if self.trace is not None and self.trace.decode_instance:
            return self.trace.decode_instance
        return self.decision.decode_instance if self.decision else ""

    def match_rate(self) -> float:
        """Return the KV match rate of the instance that computed the prompt."""
        if self.decision is None:
            return 0.0
        return self.decision.match_rate_of(self.prefill() or self.decode())


def route_headers(routes: Sequence[Route]) -> dict[str, str]:
    """Return the headers for an answer; of several prompts, names are listed and amounts added up.

    Args:
        routes: One per prompt; those of which nothing is known yet are left out.
    """
    known = [route for route in routes if route.trace is not None or route.decision is not None]
    traces = [route.trace for route in known if route.trace is not None]
    states = (route.decision.index_state for route in known if route.decision is not None)
    mean_rate = sum(route.match_rate() for route in known) / len(known) if known else 0.0
    return {
        "x-baton-prefill-instance": _names(route.prefill() for route in known),
        "x-baton-decode-instance": _names(route.decode() for route in known),
        "x-baton-match-rate": f"{mean_rate:.4f}",
        "x-baton-path": _names(_PATHS.get(trace.path, "") for trace in traces),
        "x-baton-pipe": _names(trace.pipe for trace in traces),
        "x-baton-kv-bytes": _total(traces, lambda trace: trace.kv_bytes),
        "x-baton-transfer-ms": _ms(sum(trace.transfer_us for trace in traces)),
        "x-baton-exposed-ms": _ms(sum(trace.exposed_us for trace in traces)),
        "x-baton-cached-tokens": str(sum(route.cached_tokens for route in known)),
        "x-baton-index-state": _names(states),
        "x-baton-local-reason": _names(trace.local_reason for trace in traces),
        "x-baton-queue-ms": _ms(sum(trace.router_queue_us for trace in traces)),
        "x-baton-migrations": _total(traces, lambda trace: trace.num_migrations),
    }


def route_lines(route: Route) -> bytes:
    """Return the headers for an answer to one prompt as lines, each with its line break."""
    trace, decision = route.trace, route.decision
    if trace is None or decision is None:
        headers = route_headers([route])
        return "".join(f"{name}: {value}\r\n" for name, value in headers.items()).encode("latin-1")
    prefill, decode = trace.prefill_instance, trace.decode_instance or decision.decode_instance
    return (
        f"x-baton-prefill-instance: {_name(prefill)}\r\n"
        f"x-baton-decode-instance: {_name(decode)}\r\n"
        f"x-baton-match-rate: {decision.match_rate_of(prefill or decode):.4f}\r\n"
        f"x-baton-path: {_PATHS.get(trace.path, NONE)}\r\n"
        f"x-baton-pipe: {_name(trace.pipe)}\r\n"
        f"x-baton-kv-bytes: {trace.kv_bytes}\r\n"
        f"x-baton-transfer-ms: {_ms(trace.transfer_us)}\r\n"
        f"x-baton-exposed-ms: {_ms(trace.exposed_us)}\r\n"
        f"x-baton-cached-tokens: {route.cached_tokens}\r\n"
        f"x-baton-index-state: {decision.index_state}\r\n"
        f"x-baton-local-reason: {_name(trace.local_reason)}\r\n"
        f"x-baton-queue-ms: {_ms(trace.router_queue_us)}\r\n"
        f"x-baton-migrations: {trace.num_migrations}\r\n"
    ).encode("latin-1")


def _ms(micros: int) -> str:
    return f"{micros / 1000:.3f}" if micros else "0.000"  # most are 0, and writing a float takes long


def _name(value: str) -> str:
    return (value if value.isascii() and value.isprintable() else ascii(value)) if value else NONE


def _names(values: Iterable[str]) -> str:
    names = sorted({value for value in values if value})
    text = ",".join(names) or NONE
    return text if text.isascii() and text.isprintable() else ascii(text)


def _total(traces: Sequence[common_pb2.RequestTrace], amount: Callable[[common_pb2.RequestTrace], int]) -> str:
    return str(sum(amount(trace) for trace in traces))
