"""Dialects as data: how a model writes tool calls and reasoning. The parser is in :mod:`baton.dialects.parser`.

A :class:`ToolDialect` has sections (``<tool_call>`` to ``</tool_call>``) with calls in them, in one of four notations:
a JSON object (:class:`JsonCall`), a name followed by JSON (:class:`NamedCall`), a name followed by parameters between
tags (:class:`NamedCall` with :class:`Parameters`), or Python (:class:`PythonCall`). Models that write whole messages
with headers have :class:`Channels`, and dialects that came with a tokenizer :class:`Region`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

Converted: TypeAlias = list[tuple[str, str]]
"""Names and arguments (JSON) of calls."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JsonCall:
    """``{"name": "f", "arguments": {...}}``, or a list of such objects.

    Attributes:
        arguments: Keys that the arguments may have; the first one is the usual one.
        listed: Models write a list, also of one call.
    """

    arguments: tuple[str, ...] = ("arguments", "parameters")
    listed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameters:
    """Arguments one by one, between tags: ``<parameter=city>Paris</parameter>``.

    Attributes:
        begin: Literal before a name.
        name_end: Literal between name and value.
        end: Literal after a value.
        string_flag: Between name and value stands whether the value is text: ``" string="true">`` (else JSON).
        lines: A line break after the beginning and one before the end do not belong to the value.
    """

    begin: str
    name_end: str
    end: str
    string_flag: bool = False
    lines: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedCall:
    """A name, then the arguments.

    Attributes:
        begin: Literal before the name; may be empty behind a section's beginning.
        name_end: Literals that may separate name and arguments.
        name_before: Literals that may follow the name at once and belong to what comes after it.
        end: Literals that may follow the arguments; the first one is the usual one.
        name: Pattern of what stands for the name; its group ``name``, if it has one, is the name, ``id`` the call's id.
        written_name: How the name is written; ``{name}`` and ``{index}`` (of the call) stand for themselves.
        parameters: How arguments are written; ``None``: as a JSON object.
    """

    begin: str = ""
    name_end: tuple[str, ...] = ()
    name_before: tuple[str, ...] = ()
    end: tuple[str, ...] = ()
    name: str = r"[\w.\-]+"
    written_name: str = "{name}"
    parameters: Parameters | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PythonCall:
    """``f(city="Paris", days=3)``; values are literals, also JSON's ``true``, ``false`` and ``null``.

    Attributes:
        brackets: Calls are a list: ``[f(), g()]``.
    """

    brackets: bool = True


CallNotation: TypeAlias = JsonCall | NamedCall | PythonCall


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """A part of the text that has calls in it.

    Attributes:
        calls: Notations, tried in this order.
        begin: Literals that a section may begin with; the first one is the usual one. Empty: each call is a section.
        end: Literals that may end a section; models may leave them out.
        bare: A message may also begin with a call without ``begin``. Without an anchor only calls of known tools are
            calls, all else is text.
        separators: What may stand between calls, besides white space; the first one is the usual one.
        many: Whether several calls stand in one section; else each has its own.
        gap: White space that models write between beginning, calls and end.
    """

    calls: tuple[CallNotation, ...]
    begin: tuple[str, ...] = ()
    end: tuple[str, ...] = ()
    bare: bool = False
    separators: tuple[str, ...] = ()
    many: bool = False
    gap: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Channels:
    """Messages with headers, as gpt-oss writes them: ``<|channel|>final<|message|>...<|end|>``.

    Attributes:
        begin: Literals that begin a header.
        first: Literals that may begin the first header, whose usual beginning is part of the prompt.
        message: Literal that ends a header.
        end: Literals that end a message.
        header: Pattern of a header without ``message``, with groups ``channel`` and, for the name of the tool that is
            called, ``first`` or ``recipient``.
        reasoning: Channels whose messages are reasoning.
    """

    begin: tuple[str, ...]
    first: tuple[str, ...]
    message: str
    end: tuple[str, ...]
    header: str
    reasoning: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """A part of the text that a tokenizer's ``response_template`` describes.

    Attributes:
        kind: Kind of the region's text.
        open: Pattern that begins the region.
        literals: Texts that ``open`` matches one of, if it is made of such; else what each match begins with.
        exact: Whether ``open`` matches nothing but the literals.
        close: Pattern that ends the region; ``None``: the end of the text.
        convert: Makes calls of the text and the groups of ``open`` and the schemas of tools; ``None``: there are none.
        strip: Whether white space around the text does not belong to it.
    """

    kind: Literal["text", "reasoning", "calls"]
    open: re.Pattern[str]
    literals: tuple[str, ...]
    exact: bool
    close: re.Pattern[str] | None
    close_literals: tuple[str, ...]
    convert: Callable[[str, Mapping[str, str], Mapping[str, Any]], Converted | None] | None = None
    strip: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolDialect:
    """How a model calls tools.

    Attributes:
        name: Name in flags.
        sections: Parts of the text with calls.
        channels: Messages with headers, in place of sections.
        regions: Regions of a response template, in place of sections.
        ids: How calls are named: ``call_`` and random digits, nine random letters and digits (Mistral's templates want
            that), or as the model wrote it.
        start: With ``regions``: finds where an assistant's message begins in a prompt.
    """

    name: str
    sections: tuple[Section, ...] = ()
    channels: Channels | None = None
    regions: tuple[Region, ...] = ()
    ids: Literal["random", "nine", "written"] = "random"
    start: re.Pattern[str] | None = None

    @property
    def anchors(self) -> tuple[str, ...]:
        """All literal texts that the model writes around calls."""
        literals: list[str] = []
        for section in self.sections:
            literals += (*section.begin, *section.end, *section.separators)
            for call in section.calls:
                if isinstance(call, NamedCall):
                    literals += (_unescaped(call.name), call.begin, *call.name_end, *call.name_before, *call.end)
                    if call.parameters is not None:
                        literals += (call.parameters.begin, call.parameters.name_end, call.parameters.end)
        return (*literals, *_message_anchors(self.channels, self.regions))


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningDialect:
    """How a model sets its reasoning apart.

    Attributes:
        name: Name in flags.
        begin: Literal before the reasoning; empty with ``channels`` and ``regions``.
        end: Literal after the reasoning.
        implicit: The answer begins with reasoning though nothing says so.
        channels: Instead.
        regions: Instead.
        start: As a tool dialect's.
    """

    name: str
    begin: str = ""
    end: str = ""
    implicit: bool = False
    channels: Channels | None = None
    regions: tuple[Region, ...] = ()
    start: re.Pattern[str] | None = None

    @property
    def anchors(self) -> tuple[str, ...]:
        """All literal texts that the model writes around its reasoning."""
        return (self.begin, self.end, *_message_anchors(self.channels, self.regions))

    def is_open(self, prompt: str) -> bool:
        """Whether an answer to a prompt begins amid reasoning."""
        end = prompt.rstrip()
        if not self.begin:
            return False
        if end.endswith(self.begin):
            return True
        return self.implicit and not end.endswith(self.end)


def _message_anchors(channels: Channels | None, regions: tuple[Region, ...]) -> tuple[str, ...]:
    literals: list[str] = []
    if channels is not None:
        literals += (*channels.begin, channels.message, *channels.end, "<|constrain|>")
    for region in regions:
        # Literals of patterns are in their source; what matters is which special tokens stand in it.
        literals += (*region.literals, *region.close_literals, _unescaped(region.open.pattern))
        if region.close is not None:
            literals.append(_unescaped(region.close.pattern))
    return tuple(literals)


def _unescaped(pattern: str) -> str:
    return re.sub(r"\\([^\w])", r"\1", pattern)
