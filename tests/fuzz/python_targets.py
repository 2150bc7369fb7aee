"""The Python targets by name; each takes an input, and fails where a parser does not refuse it as documented."""

from __future__ import annotations

import importlib
from collections.abc import Callable

TARGETS = {
    "http": "http",
    "openai": "requests",
    "messages": "requests",
    "tickets": "requests",
    "text": "requests",
    "responses": "requests",
    "anthropic": "requests",
    "traces": "requests",
    "grammars": "grammar",
    "tools": "grammar",
    "templates": "grammar",
    "handshake": "transfer",
    "reads": "transfer",
    "layouts": "transfer",
    "events": "state",
    "replicas": "state",
    "registrations": "state",
    "kubernetes": "state",
    "calls": "calls",
    "http2": "http2",
    "kvstore": "store",
    "answers": "client",
    "proof": "client",
    "forms": "batches",
    "batch_lines": "batches",
    "disk": "files",
    "kv_files": "files",
    "gguf": "gguf",
}
"""Where each stands. What it imports is imported when it runs: coverage is told of what is imported after it began."""


def load(name: str) -> Callable[[bytes], None]:
    """Return a target."""
    target: Callable[[bytes], None] = getattr(importlib.import_module(f"tests.fuzz.targets.{TARGETS[name]}"), name)
    return target
