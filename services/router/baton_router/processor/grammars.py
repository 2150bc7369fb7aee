"""What requests say that answers must be, as the grammars that instances know: checked once, then kept."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from typing import TypeAlias

import orjson
from prometheus_client import CollectorRegistry

from baton.dialects.call_grammar import AnswerGrammar
from baton.errors import InvalidRequestError
from baton.grammar import StructuredOutputs, check_grammar
from baton.types import Grammar
from baton_router.metrics.fast_metrics import Counter, Histogram

Asked: TypeAlias = StructuredOutputs | Grammar | AnswerGrammar
MAX_GRAMMARS = 256
MAX_BYTES = 16 * 1024 * 1024
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
    """Makes grammars, and keeps those that were asked for last."""

    def __init__(self, metrics: GrammarMetrics) -> None:
        self._metrics = metrics
        self._lock = threading.Lock()
        self._kept: OrderedDict[bytes, Grammar] = OrderedDict()
        self._bytes = 0

    def find(self, asked: Asked) -> Grammar | None:
        """Return a grammar that was made before; ``None``: it was not."""
        key = _key(asked)
        with self._lock:
            found = self._kept.get(key)
            if found is not None:
                self._kept.move_to_end(key)
                self._metrics.hits.inc()
                self._metrics.requests.labels(found.kind).inc()
        return found

    def make(self, asked: Asked) -> Grammar:
        """Make and check a grammar, in a third of a second of CPU time at most; any thread may.

        Raises:
            InvalidRequestError: It is wrong, not supported or too costly; names field and place.
        """
        started = time.thread_time()
        try:
            found = check_grammar(asked, "sampling.grammar") if isinstance(asked, Grammar) else asked.to_grammar()
        except InvalidRequestError:
            with self._lock:
                self._metrics.refused.labels("grammar" if isinstance(asked, Grammar) else asked.kind).inc()
            raise
        key = _key(asked)
        with self._lock:
            self._metrics.check.observe(time.thread_time() - started)
            self._metrics.requests.labels(found.kind).inc()
            if key not in self._kept:
                self._kept[key] = found
                self._bytes += len(key) + len(found.text)
            while self._kept and (len(self._kept) > MAX_GRAMMARS or self._bytes > MAX_BYTES):
                old, grammar = self._kept.popitem(last=False)
                self._bytes -= len(old) + len(grammar.text)
        return found


def _key(asked: Asked) -> bytes:
    if isinstance(asked, AnswerGrammar):
        return asked.key
    if isinstance(asked, Grammar):
        return orjson.dumps((asked.kind, asked.text, asked.start_token_ids))
    value = getattr(asked, asked.kind)
    return orjson.dumps((asked.kind, value, asked.whitespace_pattern, asked.disable_any_whitespace))
