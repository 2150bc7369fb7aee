"""The inference engine: scheduler, model runner, sampler, loader, attention.

``from baton.engine import LLM, SamplingParams`` is the offline way to use it. Names load on first use: torch comes
with the first that needs it.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from baton.config import EngineConfig
    from baton.engine.core import EngineCore
    from baton.engine.llm import LLM, RequestOutput
    from baton.engine.request import EngineRequest
    from baton.types import SamplingParams

for _package in ("torch", "transformers", "safetensors"):
    if importlib.util.find_spec(_package) is None:
        raise ModuleNotFoundError(
            f"engines need {_package}, which is not installed: pip install 'baton-serve[engine]'", name=_package
        )

__all__ = ["LLM", "EngineConfig", "EngineCore", "EngineRequest", "RequestOutput", "SamplingParams"]

_HOMES = {
    "LLM": "baton.engine.llm",
    "RequestOutput": "baton.engine.llm",
    "EngineCore": "baton.engine.core",
    "EngineRequest": "baton.engine.request",
    "EngineConfig": "baton.config",
    "SamplingParams": "baton.types",
}


def __getattr__(name: str) -> Any:
    """Load a public name when it is asked for."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
