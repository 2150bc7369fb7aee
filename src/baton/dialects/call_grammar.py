"""The grammar of an answer with reasoning, calls or both, in llguidance's Lark: what instances keep the model to.

Anchors are quoted literals, or special tokens where the tokenizer has such. Text is free; what is in a call is not.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from baton.dialects.builtin import Dialects
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
from baton.dialects.tool_use import ToolUse, schema_types
from baton.errors import InvalidRequestError
from baton.grammar import check_grammar, json_rule, lark_string
from baton.types import MAX_GRAMMAR_BYTES, Grammar

_TEXT = r"TEXT: /(.|\n)*/"
_ANY_OBJECT = {"type": "object"}
_NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}


@dataclass(frozen=True, slots=True)
class AnswerGrammar:
    """What the grammar of an answer is made of.

    Attributes:
        dialects: How the model writes calls and reasoning; not a tokenizer's own, which says nothing of writing.
        use: The tools.
        reasons: The answer begins amid reasoning.
        content: What the text must be, if it must be something; besides calls, where these may be made.
        special_tokens: The tokenizer's, by their names.
        thinking_budget: Most tokens of reasoning: behind them nothing but its end is allowed; ``None``: any number.
    """

    dialects: Dialects
    use: ToolUse
    reasons: bool = False
    content: Grammar | None = None
    special_tokens: Mapping[str, int] = field(default_factory=dict)
    thinking_budget: int | None = None

    @property
    def kind(self) -> str:
        """What it is made of, for metrics."""
        return "tools" if self.use.mode != "none" else self.content.kind if self.content else "reasoning"

    @property
    def place(self) -> str:
        """The field that errors name."""
        return "tools" if self.use.mode != "none" else "response_format"

    @property
    def key(self) -> bytes:
        """Equal for equal ones, and for no others."""
        names = [part and part.name for part in (self.dialects.tools, self.dialects.reasoning)]
        use = self.use
        content = self.content and (self.content.kind, self.content.text)
        tools = (use.tools, use.mode, use.names, use.parallel)
        parts = (names, *tools, self.reasons, content, self.special_tokens, self.thinking_budget)
        return hashlib.sha256(json.dumps(parts).encode()).digest()

    def to_grammar(self) -> Grammar:
        """Return the grammar, checked.

        Raises:
            InvalidRequestError: The schema of a tool is wrong, not supported or too costly; names its place.
        """
        # Checked with literals alone, as special tokens are known with a tokenizer only.
        writer = _Writer(self, {})
        free = frozenset[str]()
        try:
            check_grammar(Grammar(self.kind, writer.write()), self.place)
        except InvalidRequestError:
            free = writer.uncompilable()
            if not free:
                raise
            check_grammar(Grammar(self.kind, _Writer(self, {}, free).write()), self.place)
        grammar = Grammar(self.kind, _Writer(self, self.special_tokens, free).write())
        grammar.validate(field=self.place)
        return grammar


class _Writer:
    """Writes one grammar.

    Args:
        answer: Dialects, tools and content of the answer.
        special_tokens: Special tokens of the tokenizer by their names.
        free: Fields of schemas that cannot be kept to: any value is allowed there.
    """

    def __init__(
        self, answer: AnswerGrammar, special_tokens: Mapping[str, int], free: frozenset[str] = frozenset()
    ) -> None:
        self._answer = answer
        self._use = answer.use
        self._special = special_tokens
        names = sorted(special_tokens, key=len, reverse=True)
        self._split = re.compile("(" + "|".join(map(re.escape, names)) + ")") if names else None
        self._rules: list[str] = [_TEXT]
        self._text = "TEXT"
        self._lazy: dict[str, str] = {}
        self._insides: dict[int, str] = {}
        self._places = {
            tool["function"]["name"]: f"{place}.parameters"
            for tool, place in zip(self._use.tools, self._use.places, strict=True)
        }
        self._size = 0
        self._free = free
        self._schemas: dict[str, tuple[str, bool]] = {}
        """By field the rule of a schema that is kept to, and whether it must be."""

    def uncompilable(self) -> frozenset[str]:
        """Return the fields of the written schemas that cannot be compiled and need not be kept to.

        Raises:
            InvalidRequestError: A schema that must be kept to cannot be compiled; names its field.
        """
        found = set[str]()
        for place, (rule, needed) in self._schemas.items():
            try:
                check_grammar(Grammar(self._answer.kind, f"start: {rule}"), place)
            except InvalidRequestError:
                if needed:
                    raise
                found.add(place)
        return frozenset(found)

    def write(self) -> str:
        tools = self._answer.dialects.tools
        reasoning = self._answer.dialects.reasoning
        channels = (tools and tools.channels) or (reasoning and reasoning.channels)
        start = self._messages(channels) if channels else self._think(reasoning, tools)
        return "\n".join((f"start: {start}", *self._rules))

    # --- pieces ---

    def _literal(self, text: str) -> str:
        """Return a text whose special tokens are such."""
        parts = self._split.split(text) if self._split is not None else [text]
        return " ".join(
            f"<[{self._special[part]}]>" if part in self._special else lark_string(part) for part in parts if part
        )

    def _up_to(self, end: str) -> str:
        """Return the rule of any text up to another one, and that."""
        literal = self._literal(end)
        if literal.startswith("<["):
            return f"{self._text} {literal}"
        first, special, rest = literal.partition(" <[")
        known = self._lazy.get(literal)
        if known is None:
            known = self._lazy[literal] = f"up_to_{len(self._lazy)}" if not special else f"UP_TO_{len(self._lazy)}"
            if special:  # which ends the text before it
                pattern = _pattern(json.loads(first))
                self._rules.append(rf"{known}: {self._text} /{pattern}/")
            else:
                self._rules.append(rf"{known}[lazy]: {self._text} {first}")
        return f"{known} <[{rest}" if special else known

    def _rule(self, name: str, body: str) -> str:
        rule = f"{name}: {body}"
        if rule not in self._rules:
            self._rules.append(rule)
        return name

    def _think(self, reasoning: ReasoningDialect | None, tools: ToolDialect | None) -> str:
        """Return the rule of reasoning, and what comes behind it."""
        if reasoning is None or not reasoning.begin:
            return self._body(tools)
        text, end = self._thought(reasoning.end)
        begin = "" if self._answer.reasons else self._literal(reasoning.begin)
        if begin and self._answer.thinking_budget is not None and not begin.startswith("<["):
            # Else what begins as text might be reasoning, without a bound.
            self._text = "PLAIN"
            self._rules.append(rf"PLAIN: /(.|\n)*/ & ~/\s*{_pattern(reasoning.begin)}(.|\n)*/")
        body = self._rule("body", self._body(tools))
        called = self._called(tools, body) if end.startswith("<[") else ""  # ends the reasoning, too
        rest = f"({end} /\\n{{0,2}}/ {body} {called and '| ' + called})"
        return f"({begin} {text} {rest} | {body})" if begin else f"{text} {rest}"

    def _called(self, tools: ToolDialect | None, body: str) -> str:
        """Return the rule of an answer that begins with the token of a call; empty: there is none."""
        sections = tools.sections if tools is not None else ()
        if self._use.mode == "auto" and self._answer.content is None:
            calls = [self._at_once(section, at) for at, section in enumerate(sections)]
            either = " | ".join(filter(None, calls))
            return either and f"({either}) {body if self._use.parallel else ''}"
        if self._use.mode == "none" or not sections or not self._literal(sections[0].begin[0]).startswith("<["):
            return ""
        return "" if sections[0].bare and not _has_anchor(sections[0]) else self._sections(sections[0])

    def _at_once(self, section: Section, at: int) -> str:
        """Return the rule of a section that begins with its token, without text before it; empty: it has none."""
        begins = " | ".join(begin for begin in map(self._literal, section.begin) if begin.startswith("<["))
        return begins and self._rule(f"at_once_{at}", f"({begins}) {self._inside(section, at)}")

    def _thought(self, end: str) -> tuple[str, str]:
        """Return what reasoning is made of, and what ends it, which together are not ambiguous."""
        literal = self._literal(end)
        budget = self._answer.thinking_budget
        special = literal.startswith("<[")
        if budget is None:
            return ("TEXT", literal) if special else (self._up_to(end), "")
        if budget == 0 or (budget == 1 and not special):
            return "", literal
        if special:
            return self._rule(f"thought[max_tokens={budget}]", r"/(.|\n)*/").partition("[")[0], literal
        # Whatever is no end is read in pieces, so that the lexer need not go back where the end begins. The bound of a
        # grammar within a grammar allows a token more than it says.
        begun = ""
        for char in reversed(end[1:-1]):
            begun = f"({_pattern(char)}{begun})?"
        first = _pattern(end[0])
        pieces = f"start: (OTHER | BEGUN)*\nOTHER: /[^{first}]+/\nBEGUN: /{first}{begun}/"
        return self._rule(f"thought[max_tokens={budget - 1}]", f"%lark {{\n{pieces}\n}}").partition("[")[0], literal

    def _content(self) -> str:
        content = self._answer.content
        return self._text if content is None else self._rule("content", f"%lark {{\n{content.text}\n}}")

    # --- calls ---

    def _body(self, tools: ToolDialect | None) -> str:
        mode = self._use.mode
        if mode == "none" or tools is None:
            return self._content()
        if mode == "required":
            return self._sections(tools.sections[0])
        if self._answer.content is not None:
            return f"({self._sections(tools.sections[0])} | {self._content()})"
        tags = [self._tag(section, at) for at, section in enumerate(tools.sections) if section.begin]
        if not tags:
            return self._text
        either = " | ".join(tags)
        return f"({either})* {self._text}" if self._use.parallel else f"({either} | {self._text})"

    def _tag(self, section: Section, at: int) -> str:
        """Return the rule of free text up to a section, and the section."""
        begins = " | ".join(self._up_to(begin) for begin in section.begin)
        return self._rule(f"tag_{at}", f"({begins}) {self._inside(section, at)}")

    def _sections(self, section: Section) -> str:
        begin = "" if section.bare and not _has_anchor(section) else self._literal(section.begin[0])
        one = self._rule("section", f"{begin} {self._inside(section, 0)}")
        if not self._use.parallel or section.many or _is_list(self._notation(section)):
            return one
        return f"{one} ({self._literal(section.gap)} {one})*"

    def _inside(self, section: Section, at: int) -> str:
        """Return what stands in a section behind its beginning, and its end."""
        if at in self._insides:
            return self._insides[at]
        notations = section.calls if self._use.mode == "auto" else (self._notation(section),)
        calls = " | ".join(self._calls(section, item, f"call_{at}_{place}") for place, item in enumerate(notations))
        # A call without a beginning of its own follows the section's at once, and ends with a gap.
        gap = "" if any(isinstance(item, NamedCall) and not item.begin for item in notations) else section.gap
        end = f"{self._literal(gap)} {self._literal(section.end[0])}" if section.end else ""
        self._insides[at] = f"{self._literal(gap if section.begin else '')} ({calls}) {end}"
        return self._insides[at]

    def _calls(self, section: Section, notation: CallNotation, rule: str) -> str:
        """Return calls in one notation."""
        gap = self._literal(section.gap)
        call = self._rule(rule, " | ".join(self._call(notation, name, gap) for name in self._use.names))
        if _is_list(notation):
            more = f'(", " {call})*' if self._use.parallel else ""
            return f'"[" {call} {more} "]"'
        if section.many and self._use.parallel:
            between = self._literal(section.separators[0]) if section.separators else gap
            return f"{call} ({between} {call})*"
        return call

    def _notation(self, section: Section) -> CallNotation:
        """Return the notation that the model writes: the one whose special tokens it has."""
        for call in section.calls:
            if isinstance(call, NamedCall) and call.name_end and call.name_end[0] in self._special:
                return call
        return section.calls[0]

    def _call(self, notation: CallNotation, name: str, gap: str) -> str:
        match notation:
            case JsonCall():
                key = notation.arguments[0]
                head = lark_string(f'{{"name": {json.dumps(name)}, "{key}": ')
                return f'({head} {self._arguments(name)} "}}")'
            case PythonCall():
                return self._python(name)
            case NamedCall():
                return self._named(notation, name, gap)

    def _named(self, notation: NamedCall, name: str, gap: str) -> str:
        before, placeholder, after = notation.written_name.replace("{name}", name).partition("{index}")
        index = f"/[0-9]{{1,3}}/ {self._literal(after + notation.name_end[0])}" if placeholder else ""
        head = f"{self._literal(notation.begin + before + ('' if placeholder else notation.name_end[0]))} {index}"
        end = self._literal(notation.end[0]) if notation.end else ""
        if notation.parameters is None:
            return f"({head} {self._arguments(name)} {end})"
        first = "" if notation.name_end[0].endswith("\n") else gap
        values = ((self._parameter(notation.parameters, name, key), required) for key, required in self._keys(name))
        parts = [f"{value} {gap}" if required else f"({value} {gap})?" for value, required in values]
        return f"({head} {first} {' '.join(parts)} {end})"

    def _keys(self, name: str) -> list[tuple[str, bool]]:
        schema = self._schema(name)
        required = frozenset(schema.get("required") or ())
        return [(key, key in required) for key in schema.get("properties") or {}]

    def _parameter(self, tags: Parameters, name: str, key: str) -> str:
        root = self._schema(name)
        schema = root["properties"][key]
        text = schema_types(schema, root) == {"string"}
        flag = f' string="{"true" if text else "false"}">' if tags.string_flag else ""
        line = "\n" if tags.lines else ""
        head = self._literal(f"{tags.begin}{key}{tags.name_end}{flag}{line}")
        if not text:
            return f"{head} {self._value(schema, name, key)} {self._literal(line + tags.end)}"
        values = [schema["const"]] if "const" in schema else schema.get("enum")
        texts = [item for item in values if isinstance(item, str)] if isinstance(values, list) else []
        if texts:
            self._count(sum(map(len, texts)), self._places[name])
            return f"{head} ({' | '.join(map(lark_string, texts))}) {self._literal(line + tags.end)}"
        return f"{head} {self._up_to(line + tags.end)}"

    def _python(self, name: str) -> str:
        root = self._schema(name)
        values = [
            (f"{lark_string(f'{key}=')} {self._value(root['properties'][key], name, key)}", required)
            for key, required in self._keys(name)
        ]
        free = next((at for at, (_, required) in enumerate(values) if required), len(values))
        self._count(free * sum(len(value) for value, _ in values), self._places[name])  # of what may come first
        return f'({lark_string(f"{name}(")} {_joined(values, lark_string(", "))} ")")'

    def _messages(self, channels: Channels) -> str:
        """Return the rule of messages with headers: reasoning, then a call or the answer."""
        message = self._literal(channels.message)
        up_to_end = self._up_to(channels.end[0])
        text, end = self._thought(channels.end[0])
        begin = self._literal(channels.begin[0])
        channel = channels.begin[1]
        thought = f"{self._literal(channel + channels.reasoning[0])} {message} {text} {end} {begin}"
        thoughts = f"({thought})*" if self._answer.thinking_budget is None else f"({thought})?"
        final = f"{self._literal(f'{channel}final')} {message} {self._content()}"
        if self._use.mode == "none":
            return f"{thoughts} {final}"
        heads = ((f"{channel}commentary to=functions.{name} <|constrain|>json", name) for name in self._use.names)
        calls = " | ".join(f"{self._literal(head)} {message} {self._arguments(name)}" for head, name in heads)
        if self._use.mode == "required":
            return f"{thoughts} ({calls})"
        preamble = f"{self._literal(f'{channel}commentary')} {message} {up_to_end} {begin}"
        if self._answer.thinking_budget is not None:
            return f"{thoughts} ({preamble})* ({calls} | {final})"
        return f"({thought} | {preamble})* ({calls} | {final})"

    # --- schemas ---

    def _schema(self, name: str) -> Mapping[str, Any]:
        """Return the schema of a tool's arguments; properties that it does not name are none of them."""
        schema = self._use.schemas[name]
        if not schema:
            return _NO_ARGUMENTS
        if "properties" in schema and "additionalProperties" not in schema:
            return {**schema, "type": "object", "additionalProperties": False}
        return {**schema, "type": "object"}

    def _arguments(self, name: str) -> str:
        return self._value(self._schema(name), name)

    def _value(self, schema: Any, name: str, key: str = "") -> str:
        """Return the rule of a tool's arguments, or of one of them; where its schema cannot be kept to, a free value's.

        Args:
            schema: The schema.
            name: Name of the tool.
            key: The argument; empty: all of them.
        """
        free: Mapping[str, Any] = {} if key else _ANY_OBJECT
        field = self._places[name]
        place = f"{field}.properties.{key}" if key else field
        needed = self._use.mode == "required" or name in self._use.strict
        try:
            schema = schema if isinstance(schema, Mapping) and place not in self._free else free
            rule = json_rule(schema, place, root=(self._schema(name), field))
            self._schemas[place] = rule, needed
        except InvalidRequestError:
            if needed:
                raise
            rule = json_rule(free, place)
        self._count(len(rule), place)
        return rule

    def _count(self, size: int, place: str) -> None:
        """Refuse what is too long before it is written: definitions, for one, go into the rule of each parameter."""
        self._size += size
        if self._size > MAX_GRAMMAR_BYTES:
            message = f"{place}: the grammar of calls to these tools has more than {MAX_GRAMMAR_BYTES} bytes"
            raise InvalidRequestError(message, field=place)


def _pattern(text: str) -> str:
    """Return the regular expression of a text, as it stands between slashes."""
    return re.escape(text).replace("\\\n", r"\n").replace("/", r"\/")


def _has_anchor(section: Section) -> bool:
    return any(isinstance(call, NamedCall) and call.begin for call in section.calls)


def _is_list(notation: CallNotation) -> bool:
    return (isinstance(notation, JsonCall) and notation.listed) or (
        isinstance(notation, PythonCall) and notation.brackets
    )


def _joined(values: Sequence[tuple[str, bool]], between: str) -> str:
    """Return the rule of values in order, some of which may be left out, with something between two of them."""
    if not values:
        return ""
    first_required = next((at for at, (_, required) in enumerate(values) if required), None)
    heads = values if first_required is None else values[: first_required + 1]
    options = []
    for at, (value, _) in enumerate(heads):
        rest = [f"{between} {more}" if needed else f"({between} {more})?" for more, needed in values[at + 1 :]]
        options.append(" ".join((value, *rest)))
    joined = f"({' | '.join(options)})"
    return joined if first_required is not None else f"{joined}?"
