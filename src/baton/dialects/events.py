"""Events of a parsed answer, and the sink that collects them."""

from __future__ import annotations

import secrets
import string
from typing import Literal, TypeAlias

import msgspec

from baton.dialects.token_anchors import unmarked_text


class Text(msgspec.Struct, frozen=True):
    """More of the answer's text."""

    text: str


class Reasoning(msgspec.Struct, frozen=True):
    """More of the reasoning."""

    text: str


class CallStart(msgspec.Struct, frozen=True):
    """A call begins.

    Attributes:
        index: Index of the call, from 0.
        id: Id of the call, to which the tool's answer refers.
        name: Name of the tool.
    """

    index: int
    id: str
    name: str


class CallArguments(msgspec.Struct, frozen=True):
    """More of the arguments of a call: all of them are JSON, as far as the model wrote such."""

    index: int
    text: str


class CallEnd(msgspec.Struct, frozen=True):
    """A call is complete."""

    index: int


Event: TypeAlias = Text | Reasoning | CallStart | CallArguments | CallEnd


class EventSink:
    """Collects events; those of a kind that follow each other become one.

    Args:
        ids: See :class:`~baton.dialects.syntax.ToolDialect`.

    Attributes:
        calls: Number of calls so far.
    """

    __slots__ = ("_all", "_behind_call", "_events", "_ids", "_space", "calls")

    def __init__(self, ids: Literal["random", "nine", "written"]) -> None:
        self._ids = ids
        self._events: list[Event] = []
        self._space = ""
        """White space that belongs to what is read, unless that ends here."""
        self._behind_call = self._all = False
        self.calls = 0

    @property
    def num_held(self) -> int:
        """Characters of white space that what comes next decides about."""
        return len(self._space)

    def drain(self) -> list[Event]:
        """Return and clear the collected events."""
        events = self._events
        self._events = []
        return events

    def finish(self) -> None:
        """End the answer: pending white space is text, but not behind a call."""
        if not self._behind_call:
            self._add(Text, self._space)
        self._space = ""

    def keep_all(self) -> None:
        """Pass white space on at once: nothing can follow that would make it superfluous."""
        self._all = True

    def add_text(self, text: str) -> None:
        if kept := self._without_trailing_space(unmarked_text(text)):
            self._behind_call = False
            self._add(Text, kept)

    def add_reasoning(self, text: str) -> None:
        self._add(Reasoning, self._without_trailing_space(unmarked_text(text)))

    def break_line(self, kind: type[Text] | type[Reasoning]) -> None:
        """Separate what comes from what came before it of the kind."""
        self._add(kind, "\n")

    def strip(self) -> None:
        """Drop the white space at the end of what came."""
        self._space = ""

    def keep_space(self) -> None:
        """Make the white space at the end of reasoning part of it."""
        self._add(Reasoning, self._space)
        self._space = ""

    def _without_trailing_space(self, text: str) -> str:
        text = self._space + text
        kept = text if self._all else text.rstrip()
        self._space = text[len(kept) :]
        return kept

    def _add(self, kind: type[Text] | type[Reasoning], text: str) -> None:
        if not text:
            return
        last = self._events[-1] if self._events else None
        if type(last) is kind:
            self._events[-1] = kind(last.text + text)
        else:
            self._events.append(kind(text))

    def start_call(self, name: str, written_id: str | None = None) -> None:
        """Begin a call.

        Args:
            name: Name of the tool.
            written_id: The call's id as the model wrote it, if it did.
        """
        self._space = ""
        if self._ids == "nine":
            ident = written_id or "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))
        else:
            ident = written_id if self._ids == "written" and written_id else f"call_{secrets.token_hex(12)}"
        self._events.append(CallStart(self.calls, ident, name))
        self.calls += 1

    def add_arguments(self, text: str) -> None:
        """Add to the arguments of the call that began last."""
        text = unmarked_text(text)
        last = self._events[-1] if self._events else None
        if isinstance(last, CallArguments):
            self._events[-1] = CallArguments(last.index, last.text + text)
        elif text:
            self._events.append(CallArguments(self.calls - 1, text))

    def end_call(self) -> None:
        """End the call that began last."""
        self._events.append(CallEnd(self.calls - 1))
        self._behind_call = True
