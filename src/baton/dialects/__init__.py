"""How models write tool calls and reasoning: dialects as data, and one incremental parser over them.

Only the router and the SDK handle text. Nothing here imports torch or transformers.
"""

from baton.dialects.builtin import REASONING_DIALECTS, TOOL_DIALECTS
from baton.dialects.events import CallArguments, CallEnd, CallStart, Event, Reasoning, Text
from baton.dialects.parser import DialectParser
from baton.dialects.syntax import ReasoningDialect, ToolDialect

__all__ = [
    "REASONING_DIALECTS",
    "TOOL_DIALECTS",
    "CallArguments",
    "CallEnd",
    "CallStart",
    "DialectParser",
    "Event",
    "Reasoning",
    "ReasoningDialect",
    "Text",
    "ToolDialect",
]
