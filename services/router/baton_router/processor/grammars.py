"""Compiles the constraints of requests to the grammars that instances use, and caches them."""

from __future__ import annotations

import hashlib
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable

import orjson
from prometheus_client import CollectorRegistry

from baton.dialects.call_grammar import AnswerGrammar
from baton.errors import InvalidRequestError
from baton.grammar import StructuredOutputs
from baton.grammar.json_schema import too_long
from baton.types import MAX_GRAMMAR_BYTES, Grammar
from baton_router.metrics import Counter, Histogram
from baton_router.processor.grammar_process import Asked, GrammarProcesses

MAX_GRAMMARS = 256
MAX_BYTES = 16 * 1024 * 1024
MAX_REFUSED = 1024
REFUSED_S = 600.0
"""Seconds for which a refusal is remembered: the limit of CPU time may refuse what is just below it."""
MAX_SCHEMA_BYTES = 4 * MAX_GRAMMAR_BYTES
"""Bytes of a schema as UTF-8 beyond which its grammar is certainly too long."""
_LABELS = frozenset({"json", "json_schema", "json_object", "regex", "choice", "grammar"}) | {
    "structural_tag",
    "tools",
    "reasoning",
}
_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0)


class GrammarMetrics:
    """Metrics of grammars.

    Args:
        registry: Registry for the metrics.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        name = "baton_router_grammar"
        self.requests = Counter(name + "s", "Requests with a grammar, by its source", ["kind"], registry)
        self.refused = Counter(name + "s_refused", "Grammars refused, by their source", ["reason"], registry)
        self.hits = Counter(name + "_cache_hits", "Grammars that were known", [], registry).labels()
        self.check = Histogram(
            name + "_check_seconds", "CPU time of a grammar's making and check", [], registry, buckets=_SECONDS
        ).labels()


class GrammarCache:
    """Makes grammars, and caches the latest ones per tenant.

    Tenants share no entries, so that response times do not reveal other tenants' grammars.

    Refusals are remembered for a while, so that the same grammar is compiled once.

    Args:
        metrics: Metrics of grammars.
        now: Monotonic clock, in seconds.
    """

    def __init__(self, metrics: GrammarMetrics, now: Callable[[], float] = time.monotonic) -> None:
        self._metrics = metrics
        self._now = now
        self._lock = threading.Lock()
        self._processes = GrammarProcesses()
        self._cached: OrderedDict[tuple[str, bytes], Grammar] = OrderedDict()
        self._bytes = 0
        self._refused: OrderedDict[bytes, tuple[float, InvalidRequestError]] = OrderedDict()
        """By digest of tenant and constraint."""

    def find(self, asked: Asked, tenant: str) -> Grammar | None:
        """Return the cached grammar of a tenant; ``None`` if there is none.

        Raises:
            InvalidRequestError: The constraint is not JSON, far too long, or was refused before.
        """
        key = tenant, _key(asked)
        if isinstance(asked, StructuredOutputs) and asked.kind == "json" and len(key[1]) > MAX_SCHEMA_BYTES:
            with self._lock:
                self._metrics.refused.labels(asked.kind).inc()
            raise too_long(asked.place)
        with self._lock:
            grammar = self._cached.get(key)
            if grammar is not None:
                self._cached.move_to_end(key)
                self._metrics.hits.inc()
                self._metrics.requests.labels(_label(grammar.kind)).inc()
            elif self._refused:
                self._check_refused(asked, _digest(key))
        return grammar

    def _check_refused(self, asked: Asked, digest: bytes) -> None:
        entry = self._refused.get(digest)
        if entry is None:
            return
        if entry[0] < self._now():
            del self._refused[digest]
            return
        self._metrics.refused.labels(_source(asked)).inc()
        raise InvalidRequestError(entry[1].message, field=entry[1].field)

    def make(self, asked: Asked, tenant: str) -> tuple[Grammar, float]:
        """Make, check and cache a grammar for a tenant; return it and the CPU time, less than a second. Thread-safe.

        Raises:
            RefusedGrammarError: The constraint is wrong, not supported or too costly; names field and place.
            UnavailableError: The process that makes grammars was killed.
        """
        known = self.find(asked, tenant)  # by a request before this one in the tenant's line
        if known is not None:
            return known, 0.0
        key = tenant, _key(asked)
        try:
            grammar, seconds = self._processes.make(asked)
        except InvalidRequestError as error:
            with self._lock:
                self._metrics.refused.labels(_source(asked)).inc()
                self._refused[_digest(key)] = self._now() + REFUSED_S, error.with_traceback(None)
                while len(self._refused) > MAX_REFUSED:
                    self._refused.popitem(last=False)
            raise
        with self._lock:
            self._metrics.check.observe(seconds)
            self._metrics.requests.labels(_label(grammar.kind)).inc()
            if key not in self._cached:
                self._cached[key] = grammar
                self._bytes += sys.getsizeof(key[1]) + sys.getsizeof(grammar.text)
            while self._cached and (len(self._cached) > MAX_GRAMMARS or self._bytes > MAX_BYTES):
                (_, old_key), old = self._cached.popitem(last=False)
                self._bytes -= sys.getsizeof(old_key) + sys.getsizeof(old.text)
        return grammar, seconds

    def close(self) -> None:
        """End the processes that make grammars."""
        self._processes.close()


def _digest(key: tuple[str, bytes]) -> bytes:
    return hashlib.sha256(key[0].encode() + b"\0" + key[1]).digest()


def _source(asked: Asked) -> str:
    return "grammar" if isinstance(asked, Grammar) else asked.kind


def _label(kind: str) -> str:
    """Return the label of a kind; gRPC clients may send any name."""
    return kind if kind in _LABELS else "other"


def _key(asked: Asked) -> bytes:
    try:
        if isinstance(asked, AnswerGrammar):
            return asked.key
        if isinstance(asked, Grammar):
            return orjson.dumps((asked.kind, asked.text, asked.start_token_ids))
        value = getattr(asked, asked.kind)
        return orjson.dumps((asked.kind, value, asked.whitespace_pattern, asked.disable_any_whitespace))
    except (TypeError, RecursionError) as error:
        place = "sampling.grammar" if isinstance(asked, Grammar) else asked.place
        raise InvalidRequestError(f"{place} is nested too deep, or no JSON", field=place) from error
