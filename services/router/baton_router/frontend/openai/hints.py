"""What agents know of their requests: ``nvext.agent_hints``, which Dynamo's clients send, and cache retention.

Hints ask; what is beyond the bounds or the rights of a tenant is clipped, and the answer says so. Dynamo's priorities
rise with importance, Baton's fall. A ``strict_priority`` goes before all ``priority``.
"""

from __future__ import annotations

from typing import Any

from baton.errors import InvalidRequestError, shown
from baton_router.frontend.openai.schemas import AgentHints, Extensions, GenerationBody, unknown_fields
from baton_router.processor.text_request import TextRequest

_MOST_STRICT = 2**14 - 1
_MOST_PRIORITY = 2**15 - 1
_PER_STRICT = 2**16
"""Priorities between two strict ones: all that ``priority`` may be, so that a strict one outweighs it."""


_RETENTION_S = {"in_memory": 0.0, "in-memory": 0.0, "1h": 3600.0, "24h": 86400.0}
"""Values of ``prompt_cache_retention``; ``1h`` is Anthropic's longest. The shortest one is no wish."""


def apply_hints(body: GenerationBody, request: TextRequest) -> None:
    """Put the hints of a body into its generation; a field of the body, or a header, goes before a hint.

    Raises:
        InvalidRequestError: ``prompt_cache_retention`` is none.
    """
    retention = body.prompt_cache_retention
    if retention is not None and retention not in _RETENTION_S:
        raise InvalidRequestError(
            f"prompt_cache_retention must be one of {', '.join(_RETENTION_S)}, got {shown(retention)}",
            field="prompt_cache_retention",
        )
    request.retention_s = _RETENTION_S[retention or "in_memory"]
    hints = body.nvext.agent_hints if body.nvext is not None else None
    if hints is None:
        return
    if body.priority is None:
        request.priority = _priority(hints, request)
    request.expected_tokens = hints.osl
    request.speculative_prefill = bool(hints.speculative_prefill)


def _priority(hints: AgentHints, request: TextRequest) -> int:
    asked = hints.priority
    if asked is None:
        asked = round(hints.latency_sensitivity or 0.0)
    strict = min(hints.strict_priority or 0, _MOST_STRICT)
    priority = max(-_MOST_PRIORITY, min(asked, _MOST_PRIORITY))
    if (strict, priority) != (hints.strict_priority or 0, asked):
        request.clipped += ("priority",)
    return -(strict * _PER_STRICT + priority)


def ignored_hints(value: Any) -> list[str]:
    """Return the names of fields without effect in a body's ``nvext``, which has been checked."""
    if value is None:
        return []
    ignored = [f"nvext.{name}" for name in unknown_fields(Extensions, value)]
    hints = unknown_fields(AgentHints, value.get("agent_hints") or {})
    return ignored + [f"nvext.agent_hints.{name}" for name, item in hints.items() if item not in (None, False)]
