"""The dialects that Baton knows, and how a model's chat template shows which one it speaks."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from baton.dialects.response_template import NAME, read_response_template
from baton.dialects.syntax import (
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


_JSON = (JsonCall(),)
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


def _deepseek(name_end: str, end: tuple[str, ...], begin: str, separators: tuple[str, ...] = ()) -> Section:
    return Section(
        begin=("<｜tool▁calls▁begin｜>",),
        end=("<｜tool▁calls▁end｜>",),
        calls=(NamedCall(begin=begin, name_end=(name_end,), end=end),),
        separators=separators,
        many=True,
    )


def _dsml(section: str) -> Section:
    parameter = Parameters(
        begin='<｜DSML｜parameter name="', name_end='"', end="</｜DSML｜parameter>", string_flag=True
    )
    return Section(
        begin=(f"<｜DSML｜{section}>",),
        end=(f"</｜DSML｜{section}>",),
        calls=(
            NamedCall(
                begin='<｜DSML｜invoke name="', name_end=('">',), end=("</｜DSML｜invoke>",), parameters=parameter
            ),
        ),
        many=True,
        gap="\n",
    )


_DIALECTS = (
    ToolDialect(
        name="hermes",
        sections=(Section(begin=("<tool_call>",), end=("</tool_call>",), calls=_JSON, many=True, gap="\n"),),
    ),
    ToolDialect(
        name="llama3_json",
        sections=(
            Section(
                begin=("<|python_tag|>",),
                calls=(JsonCall(arguments=("parameters", "arguments")),),
                bare=True,
                separators=("; ", ";"),
                many=True,
            ),
        ),
    ),
    ToolDialect(
        name="pythonic",
        sections=(
            Section(begin=("<|python_start|>",), end=("<|python_end|>",), calls=(PythonCall(),), bare=True),
            Section(
                begin=("<function_calls>",),
                end=("</function_calls>",),
                calls=(PythonCall(brackets=False),),
                many=True,
                gap="\n",
            ),
        ),
    ),
    ToolDialect(
        name="mistral",
        sections=(
            Section(
                begin=("[TOOL_CALLS]",),
                calls=(
                    JsonCall(listed=True),
                    NamedCall(
                        name_end=("[ARGS]",),
                        name_before=("{",),
                        name=r"(?P<name>[\w.\-]+)(?:\[CALL_ID\](?P<id>[a-zA-Z0-9]{1,64}))?",
                    ),
                ),
            ),
        ),
        ids="nine",
    ),
    ToolDialect(
        name="qwen3_coder",
        sections=(
            Section(
                begin=("<tool_call>",),
                end=("</tool_call>",),
                calls=(
                    NamedCall(
                        begin="<function=",
                        name_end=(">",),
                        end=("</function>",),
                        parameters=Parameters(begin="<parameter=", name_end=">", end="</parameter>", lines=True),
                    ),
                ),
                bare=True,
                gap="\n",
            ),
        ),
    ),
    ToolDialect(
        name="deepseek_v3",
        sections=(
            _deepseek(
                "\n```json\n",
                ("\n```<｜tool▁call▁end｜>", "```<｜tool▁call▁end｜>", "<｜tool▁call▁end｜>"),
                "<｜tool▁call▁begin｜>function<｜tool▁sep｜>",
                ("\n",),
            ),
        ),
    ),
    ToolDialect(
        name="deepseek_v3.1",
        sections=(_deepseek("<｜tool▁sep｜>", ("<｜tool▁call▁end｜>",), "<｜tool▁call▁begin｜>"),),
    ),
    ToolDialect(name="deepseek_v3.2", sections=(_dsml("function_calls"), _dsml("tool_calls"))),
    ToolDialect(
        name="glm4",
        sections=(
            Section(
                begin=("<tool_call>",),
                end=("</tool_call>",),
                calls=(
                    NamedCall(
                        name_end=("\n",),
                        name_before=("<arg_key>", "</tool_call>"),
                        parameters=Parameters(
                            begin="<arg_key>", name_end="</arg_key>\n<arg_value>", end="</arg_value>"
                        ),
                    ),
                ),
                gap="\n",
            ),
        ),
    ),
    ToolDialect(
        name="kimi_k2",
        sections=(
            Section(
                begin=("<|tool_calls_section_begin|>",),
                end=("<|tool_calls_section_end|>",),
                calls=(
                    NamedCall(
                        begin="<|tool_call_begin|>",
                        name_end=("<|tool_call_argument_begin|>",),
                        end=("<|tool_call_end|>",),
                        name=r"(?P<id>(?:functions\.)?(?P<name>[\w.\-]+?)(?::\d+)?)",
                        written_name="functions.{name}:{index}",
                    ),
                ),
                many=True,
            ),
        ),
        ids="written",
        ends_reasoning=True,
    ),
    ToolDialect(
        name="minimax_m2",
        sections=(
            Section(
                begin=("<minimax:tool_call>",),
                end=("</minimax:tool_call>",),
                calls=(
                    NamedCall(
                        begin='<invoke name="',
                        name_end=('">',),
                        end=("</invoke>",),
                        parameters=Parameters(begin='<parameter name="', name_end='">', end="</parameter>"),
                    ),
                ),
                many=True,
                gap="\n",
            ),
        ),
    ),
    ToolDialect(name="gpt_oss", channels=_HARMONY),
    ToolDialect(
        name="granite",
        sections=(
            Section(begin=("<|tool_call|>", "<function_call>"), calls=(JsonCall(listed=True),), many=True),
            Section(begin=("<tool_call>",), end=("</tool_call>",), calls=_JSON, many=True, gap="\n"),
        ),
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
