"""The inference engine, and the protocols that its plug-ins implement.

Offline use::

    from baton.engine import LLM, SamplingParams

    with LLM("meta-llama/Llama-3.2-1B", dtype="bfloat16") as llm:
        for output in llm.generate(["The capital of France is"], SamplingParams(max_tokens=16)):
            print(output.text)

Services step an :class:`EngineCore` themselves (:func:`baton.engine.build.build_engine`). Other packages extend the
engine by entry points: attention backends (``baton.attention_backends``), executors (``baton.executors``), drafters
(``baton.drafters``) and grammar backends (``baton.grammars``).

Names are loaded on first use, and torch with the first one that needs it.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from baton.config import EngineConfig
    from baton.engine.attention import AttentionContext, AttentionFactory
    from baton.engine.core import EngineCore
    from baton.engine.executor.base import Executor
    from baton.engine.grammar.base import GrammarBackend, GrammarMatcher
    from baton.engine.llm import LLM, RequestOutput, SequenceResult
    from baton.engine.request import EngineRequest, EngineStats, RequestMetrics, SequenceOutput
    from baton.engine.speculation.drafter import Drafter, Proposal
    from baton.types import SamplingParams

for _package in ("torch", "transformers", "safetensors"):
    if importlib.util.find_spec(_package) is None:
        raise ModuleNotFoundError(
            f"engines need {_package}, which is not installed: pip install 'baton-serve[engine]'", name=_package
        )

__all__ = [
    "LLM",
    "AttentionContext",
    "AttentionFactory",
    "Drafter",
    "EngineConfig",
    "EngineCore",
    "EngineRequest",
    "EngineStats",
    "Executor",
    "GrammarBackend",
    "GrammarMatcher",
    "Proposal",
    "RequestMetrics",
    "RequestOutput",
    "SamplingParams",
    "SequenceOutput",
    "SequenceResult",
]

_MODULES = {
    "AttentionContext": "baton.engine.attention",
    "AttentionFactory": "baton.engine.attention",
    "Drafter": "baton.engine.speculation.drafter",
    "EngineConfig": "baton.config",
    "EngineCore": "baton.engine.core",
    "EngineRequest": "baton.engine.request",
    "EngineStats": "baton.engine.request",
    "Executor": "baton.engine.executor.base",
    "GrammarBackend": "baton.engine.grammar.base",
    "GrammarMatcher": "baton.engine.grammar.base",
    "LLM": "baton.engine.llm",
    "Proposal": "baton.engine.speculation.drafter",
    "RequestMetrics": "baton.engine.request",
    "RequestOutput": "baton.engine.llm",
    "SamplingParams": "baton.types",
    "SequenceOutput": "baton.engine.request",
    "SequenceResult": "baton.engine.llm",
}
"""Module of each public name."""


def __getattr__(name: str) -> Any:
    """Load a public name on first use."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)
