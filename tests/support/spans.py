"""Where spans go in tests."""

from __future__ import annotations

from baton.tracing import Span


class MemoryExporter:
    """Keeps the spans that have ended."""

    def __init__(self) -> None:
        self.spans: list[Span] = []

    def export(self, span: Span) -> None:
        """Keep a span."""
        self.spans.append(span)
