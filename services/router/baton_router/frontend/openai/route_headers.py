"""The ``x-baton-*`` headers: which way the prompts of an HTTP request went."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from baton.api.v1 import common_pb2
from baton.rpc.convert import path_to_pb
from baton.types import PrefillPath
from baton_router.processor.text_request import TextChunk
from baton_router.scheduler.decision import Decision

NONE = "none"
_PATHS: dict[int, str] = {path_to_pb(path): path.value for path in PrefillPath}
_NO_TRACE = common_pb2.RequestTrace()


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
            self.trace = chunk.trace
            self.cached_tokens = chunk.cached_tokens
        if chunk.decision is not None:
            self.decision = chunk.decision

    def row(self) -> tuple[Any, ...]:
        """Return the values of all headers, in the order of ``_HEADERS``."""
        trace = self.trace or _NO_TRACE
        decision = self.decision
        prefill = trace.prefill_instance
        decode = trace.decode_instance
        rate = 0.0
        state = ""
        if decision is not None:
            decode = decode or decision.decode_instance
            if self.trace is None:
                prefill = decision.prefill_instance
            rate = decision.match_rate_of(prefill or decode)
            state = decision.index_state
        return (
            *(_name(prefill), _name(decode), rate, _PATHS.get(trace.path, NONE), _name(trace.pipe), trace.kv_bytes),
            *(trace.transfer_us / 1000, trace.exposed_us / 1000, self.cached_tokens, _name(state)),
            *(_name(trace.order), _name(trace.local_reason), trace.router_queue_us / 1000, trace.num_migrations),
        )


def route_lines(routes: Sequence[Route]) -> bytes:
    """Return the headers for an answer as lines, each with its line break.

    Args:
        routes: One per prompt. Of several, names are listed, amounts added up, and the match rate is their mean; those
            of which nothing is known yet are left out.
    """
    rows = [route.row() for route in routes if route.trace is not None or route.decision is not None]
    if len(rows) == 1:
        return (_LINES % rows[0]).encode("latin-1")
    columns = zip(*(rows or [Route().row()]), strict=True)
    return (_LINES % tuple(merge(column) for merge, column in zip(_MERGES, columns, strict=True))).encode("latin-1")


@functools.lru_cache(1024)  # a few instances' names, again and again
def _name(value: str) -> str:
    return (value if value.isascii() and value.isprintable() else ascii(value)) if value else NONE


def _names(values: Iterable[str]) -> str:
    return ",".join(sorted({value for value in values if value != NONE})) or NONE


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


_HEADERS: tuple[tuple[str, str, Callable[[Any], Any]], ...] = (
    ("x-baton-prefill-instance", "%s", _names),
    ("x-baton-decode-instance", "%s", _names),
    ("x-baton-match-rate", "%.4f", _mean),
    ("x-baton-path", "%s", _names),
    ("x-baton-pipe", "%s", _names),
    ("x-baton-kv-bytes", "%d", sum),
    ("x-baton-transfer-ms", "%.3f", sum),
    ("x-baton-exposed-ms", "%.3f", sum),
    ("x-baton-cached-tokens", "%d", sum),
    ("x-baton-index-state", "%s", _names),
    ("x-baton-order", "%s", _names),
    ("x-baton-local-reason", "%s", _names),
    ("x-baton-queue-ms", "%.3f", sum),
    ("x-baton-migrations", "%d", sum),
)
"""Name, format, and how the values of several prompts become one."""
_LINES = "".join(f"{name}: {form}\r\n" for name, form, _ in _HEADERS)
_MERGES = [merge for _, _, merge in _HEADERS]
