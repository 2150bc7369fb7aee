"""The dialects that Baton knows, and how a model's chat template shows which one it speaks."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from baton.dialects.response_template import NAME, read_response_template
from baton.dialects.syntax import (
    CallNotation,
    Channels,
    JsonCall,
    NamedCall,
    Parameters,
    PythonCall,
    ReasoningDialect,
    Section,
    ToolDialect,
)
from baton.errors import ConfigError

# ruff: noqa: RUF001  DeepSeek's anchors have fullwidth bars in them


_HARMONY = Channels(
    begin=("<|start|>assistant", "<|channel|>"),
    first=(" to=", "to="),
    message="<|message|>",
    end=("<|end|>", "<|call|>", "<|return|>"),
    header=(
        r"(?:<\|start\|>assistant)?\s*(?:to=(?:functions\.)?(?P<first>[\w.\-]+)\s*)?(?:<\|channel\|>\s*(?P<channel>\w+)\s*)?"
        r"(?:to=(?:functions\.)?(?P<recipient>[\w.\-]+)\s*)?(?:(?:<\|constrain\|>)?\w+\s*)?"
    ),
    reasoning=("analysis",),
)


def _dialect(name: str, *sections: Section, **options: Any) -> ToolDialect:
    return ToolDialect(name=name, sections=sections, **options)


def _section(begin: str, end: str, *calls: CallNotation, **options: Any) -> Section:
    """Return a section; ``end`` may be empty: it has none."""
    return Section(begin=(begin,), end=(end,) if end else (), calls=calls, **options)


def _named(begin: str, name_end: str, *end: str, **options: Any) -> NamedCall:
    return NamedCall(begin=begin, name_end=(name_end,), end=end, **options)


def _deepseek(call: NamedCall, separators: tuple[str, ...] = ()) -> Section:
    return _section("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", call, separators=separators, many=True)


def _dsml(section: str) -> Section:
    parameter = Parameters(
        begin='<｜DSML｜parameter name="', name_end='"', end="</｜DSML｜parameter>", string_flag=True
    )
    call = _named('<｜DSML｜invoke name="', '">', "</｜DSML｜invoke>", parameters=parameter)
    return _section(f"<｜DSML｜{section}>", f"</｜DSML｜{section}>", call, many=True, gap="\n")


_HERMES = _section("<tool_call>", "</tool_call>", JsonCall(), many=True, gap="\n")
_DIALECTS = (
    _dialect("hermes", _HERMES),
    _dialect(
        "llama3_json",
        _section(
            "<|python_tag|>",
            "",
            JsonCall(arguments=("parameters", "arguments")),
            bare=True,
            separators=("; ", ";"),
            many=True,
        ),
    ),
    _dialect(
        "pythonic",
        _section("<|python_start|>", "<|python_end|>", PythonCall(), bare=True),
        _section("<function_calls>", "</function_calls>", PythonCall(brackets=False), many=True, gap="\n"),
    ),
    _dialect(
        "mistral",
        _section(
            "[TOOL_CALLS]",
            "",
            JsonCall(listed=True),
            NamedCall(
                name_end=("[ARGS]",),
                name_before=("{",),
                name=r"(?P<name>[\w.\-]+)(?:\[CALL_ID\](?P<id>[a-zA-Z0-9]{1,64}))?",
            ),
        ),
        ids="nine",
    ),
    _dialect(
        "qwen3_coder",
        _section(
            "<tool_call>",
            "</tool_call>",
            _named(
                "<function=",
                ">",
                "</function>",
                parameters=Parameters(begin="<parameter=", name_end=">", end="</parameter>", lines=True),
            ),
            bare=True,
            gap="\n",
        ),
    ),
    _dialect(
        "deepseek_v3",
        _deepseek(
            _named(
                "<｜tool▁call▁begin｜>function<｜tool▁sep｜>",
                "\n```json\n",
                *("\n```<｜tool▁call▁end｜>", "```<｜tool▁call▁end｜>", "<｜tool▁call▁end｜>"),
            ),
            separators=("\n",),
        ),
    ),
    _dialect("deepseek_v3.1", _deepseek(_named("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"))),
    _dialect("deepseek_v3.2", _dsml("function_calls"), _dsml("tool_calls")),
    _dialect(
        "glm4",
        _section(
            "<tool_call>",
            "</tool_call>",
            NamedCall(
                name_end=("\n",),
                name_before=("<arg_key>", "</tool_call>"),
                parameters=Parameters(begin="<arg_key>", name_end="</arg_key>\n<arg_value>", end="</arg_value>"),
            ),
            gap="\n",
        ),
    ),
    _dialect(
        "kimi_k2",
        _section(
            "<|tool_calls_section_begin|>",
            "<|tool_calls_section_end|>",
            _named(
                "<|tool_call_begin|>",
                "<|tool_call_argument_begin|>",
                "<|tool_call_end|>",
                name=r"(?P<id>(?:functions\.)?(?P<name>[\w.\-]+?)(?::\d+)?)",
                written_name="functions.{name}:{index}",
            ),
            many=True,
        ),
        ids="written",
    ),
    _dialect(
        "minimax_m2",
        _section(
            "<minimax:tool_call>",
            "</minimax:tool_call>",
            _named(
                '<invoke name="',
                '">',
                "</invoke>",
                parameters=Parameters(begin='<parameter name="', name_end='">', end="</parameter>"),
            ),
            many=True,
            gap="\n",
        ),
    ),
    ToolDialect(name="gpt_oss", channels=_HARMONY),
    _dialect(
        "granite",
        Section(begin=("<|tool_call|>", "<function_call>"), calls=(JsonCall(listed=True),), many=True),
        _HERMES,
    ),
)
TOOL_DIALECTS: Mapping[str, ToolDialect] = {dialect.name: dialect for dialect in _DIALECTS}
"""By name."""

_THINK = ("<think>", "</think>")
REASONING_DIALECTS: Mapping[str, ReasoningDialect] = {
    dialect.name: dialect
    for dialect in (
        ReasoningDialect(name="think", begin=_THINK[0], end=_THINK[1]),
        ReasoningDialect(name="deepseek_r1", begin=_THINK[0], end=_THINK[1], implicit=True),
        ReasoningDialect(name="mistral", begin="[THINK]", end="[/THINK]"),
        ReasoningDialect(name="seed", begin="<seed:think>", end="</seed:think>"),
        ReasoningDialect(name="gpt_oss", channels=_HARMONY),
    )
}
"""By name."""

SYNONYMS: Mapping[str, str] = {
    **{"qwen": "hermes", "llama4_pythonic": "pythonic", "olmo3": "pythonic", "qwen3_xml": "qwen3_coder"},
    **{"deepseek_v31": "deepseek_v3.1", "deepseek_v32": "deepseek_v3.2", "glm45": "glm4", "glm47": "glm4"},
    **{"openai": "gpt_oss", "harmony": "gpt_oss", "qwen3": "think", "llama4_json": "llama3_json"},
}
"""Other names of dialects, as other servers have them."""

TOOL_MARKS: tuple[tuple[str, str], ...] = (
    ("<|channel|>", "gpt_oss"),
    ("<minimax:tool_call>", "minimax_m2"),
    ("<｜DSML｜", "deepseek_v3.2"),
    ("<|tool_calls_section_begin|>", "kimi_k2"),
    ("<arg_key>", "glm4"),
    ("<function=", "qwen3_coder"),
    ("<｜tool▁call▁begin｜>function", "deepseek_v3"),
    ("'<｜tool▁call▁begin｜>' + tool['type']", "deepseek_v3"),
    ("```json", "deepseek_v3"),
    ("<｜tool▁calls▁begin｜>", "deepseek_v3.1"),
    ("[TOOL_CALLS]", "mistral"),
    ("<|tool_call|>", "granite"),
    ("<tool_call>", "hermes"),
    ("<function_calls>", "pythonic"),
    ("<|python_start|>", "pythonic"),
    ("<|python_tag|>", "llama3_json"),
    ('"parameters": dictionary of argument name', "llama3_json"),
    ("func_name1(params_name1=params_value1", "pythonic"),
)
"""What stands in chat templates of models that speak a dialect; the first one that is found counts."""

REASONING_MARKS: tuple[tuple[str, str], ...] = (
    ("<|channel|>", "gpt_oss"),
    ("<seed:think>", "seed"),
    ("[THINK]", "mistral"),
    ("</think>", "think"),
)
"""The same of reasoning."""


log = logging.getLogger(__name__)

AUTO = "auto"
NONE = "none"
D = TypeVar("D", ToolDialect, ReasoningDialect)


@dataclass(frozen=True, slots=True)
class Dialects:
    """How a model writes.

    Attributes:
        tools: Notation of tool calls; ``None``: unknown, or the model makes none.
        reasoning: Notation of reasoning; ``None``: unknown, or the model sets none apart.
    """

    tools: ToolDialect | None = None
    reasoning: ReasoningDialect | None = None

    def shown_tokens(self, special_tokens: Mapping[int, str]) -> frozenset[int]:
        """Return the special tokens that the dialects consist of, which must not be left out of the text.

        Args:
            special_tokens: Names of a tokenizer's special tokens by their ids.
        """
        anchors = [*(self.tools.anchors if self.tools else ()), *(self.reasoning.anchors if self.reasoning else ())]
        blob = "\n".join(anchors)
        return frozenset(token_id for token_id, name in special_tokens.items() if name.strip() and name.strip() in blob)


def check_dialect(name: str, reasoning: bool, field: str) -> None:
    """Check a dialect's name.

    Raises:
        ConfigError: There is no such dialect.
    """
    known: Mapping[str, Any] = REASONING_DIALECTS if reasoning else TOOL_DIALECTS
    if name not in (AUTO, NONE) and SYNONYMS.get(name, name) not in known:
        names = ", ".join((AUTO, NONE, *known))
        raise ConfigError(f"{field} must be one of {names}, got {name!r}", field=field)


def choose_dialects(
    tools: str = AUTO, reasoning: str = AUTO, *, chat_template: str = "", response_template: Any = None
) -> Dialects:
    """Return a model's dialects.

    Args:
        tools: A name; ``auto``: the tokenizer's own, else what the chat template shows; ``none``: none.
        reasoning: The same for reasoning.
        chat_template: Source of the model's chat template.
        response_template: The tokenizer's own description, if it has one.

    Raises:
        ConfigError: There is no dialect of that name.
    """
    check_dialect(tools, False, "tool_dialect")
    check_dialect(reasoning, True, "reasoning_dialect")
    own: tuple[ToolDialect | None, ReasoningDialect | None] = (None, None)
    if response_template is not None and AUTO in (tools, reasoning):
        try:
            own = read_response_template(response_template)
        except ConfigError as error:
            log.warning("the tokenizer's %s is not used: %s", error.field, error.message)
    chosen = (
        _choose(tools, own[0], TOOL_DIALECTS, TOOL_MARKS, chat_template),
        _choose(reasoning, own[1], REASONING_DIALECTS, REASONING_MARKS, chat_template),
    )
    if chosen[0] is not None and chosen[0].channels is not None and reasoning == AUTO:
        return Dialects(chosen[0], REASONING_DIALECTS["gpt_oss"])
    return Dialects(*chosen)


def _choose(
    name: str, own: D | None, known: Mapping[str, D], marks: tuple[tuple[str, str], ...], chat_template: str
) -> D | None:
    if name == NONE:
        return None
    if name != AUTO:
        return known[SYNONYMS.get(name, name)]
    if own is not None:
        return own
    return next((known[dialect] for mark, dialect in marks if mark in chat_template), None)


__all__ = ["AUTO", "NAME", "NONE", "Dialects", "check_dialect", "choose_dialects"]
