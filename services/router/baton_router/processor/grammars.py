"""What requests say that answers must be, as the grammars that instances know: checked once, then kept."""

from __future__ import annotations

import threading
from collections import OrderedDict

import orjson
from prometheus_client import CollectorRegistry

from baton.dialects.call_grammar import AnswerGrammar
from baton.errors import InvalidRequestError
from baton.grammar import StructuredOutputs
from baton.grammar.json_schema import too_long
from baton.types import MAX_GRAMMAR_BYTES, Grammar
from baton_router.metrics.fast_metrics import Counter, Histogram
from baton_router.processor.grammar_process import Asked, GrammarProcesses

MAX_GRAMMARS = 256
MAX_BYTES = 16 * 1024 * 1024
MAX_SCHEMA_BYTES = 4 * MAX_GRAMMAR_BYTES
"""As UTF-8: a schema that has more is longer than grammars may be, whatever its letters."""
_LABELS = frozenset({"json", "json_schema", "json_object", "regex", "choice", "grammar"}) | {
    "structural_tag",
    "tools",
    "reasoning",
}
_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0)


class GrammarMetrics:
    """Metrics of grammars, in the registry that was passed in."""

    def __init__(self, registry: CollectorRegistry) -> None:
        name = "baton_router_grammar"
        self.requests = Counter(name + "s", "Requests with a grammar, by its source", ["kind"], registry)
        self.refused = Counter(name + "s_refused", "Grammars refused, by their source", ["reason"], registry)
        self.hits = Counter(name + "_cache_hits", "Grammars that were known", [], registry).labels()
        self.check = Histogram(
            name + "_check_seconds", "CPU time of a grammar's making and check", [], registry, buckets=_SECONDS
        ).labels()


class GrammarCache:
    """Makes grammars, and keeps those that were asked for last.

    What one tenant asked for is to the others as if it were not there: they cannot tell by the time what he asks for.
    """

    def __init__(self, metrics: GrammarMetrics) -> None:
        self._metrics = metrics
        self._lock = threading.Lock()
        self._processes = GrammarProcesses()
        self._kept: OrderedDict[tuple[str, bytes], Grammar] = OrderedDict()
        self._bytes = 0

    def find(self, asked: Asked, tenant: str) -> Grammar | None:
        """Return a grammar that was made before for the same tenant; ``None``: it was not.

        Raises:
            InvalidRequestError: It is no JSON, or so long that no process need look at it.
        """
        key = tenant, _key(asked)
        if isinstance(asked, StructuredOutputs) and asked.kind == "json" and len(key[1]) > MAX_SCHEMA_BYTES:
            with self._lock:
                self._metrics.refused.labels(asked.kind).inc()
            raise too_long(asked.place)
        with self._lock:
            found = self._kept.get(key)
            if found is not None:
                self._kept.move_to_end(key)
                self._metrics.hits.inc()
                self._metrics.requests.labels(_label(found.kind)).inc()
        return found

    def make(self, asked: Asked, tenant: str) -> Grammar:
        """Make and check a grammar for a tenant, in less than a second of CPU time; any thread may.

        Raises:
            InvalidRequestError: It is wrong, not supported or too costly; names field and place.
            UnavailableError: What checks it was ended.
        """
        try:
            found, seconds = self._processes.make(asked)
        except InvalidRequestError:
            with self._lock:
                self._metrics.refused.labels("grammar" if isinstance(asked, Grammar) else asked.kind).inc()
            raise
        key = tenant, _key(asked)
        with self._lock:
            self._metrics.check.observe(seconds)
            self._metrics.requests.labels(_label(found.kind)).inc()
            if key not in self._kept:
                self._kept[key] = found
                self._bytes += len(key[1]) + len(found.text)
            while self._kept and (len(self._kept) > MAX_GRAMMARS or self._bytes > MAX_BYTES):
                (_, old), grammar = self._kept.popitem(last=False)
                self._bytes -= len(old) + len(grammar.text)
        return found

    def close(self) -> None:
        """End the processes that make them."""
        self._processes.close()


def _label(kind: str) -> str:
    """Return a kind as metrics have it: clients of the gRPC interface send what they like."""
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
