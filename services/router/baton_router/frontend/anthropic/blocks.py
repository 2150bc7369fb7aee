"""Content blocks of messages, as messages of a chat; an error names the block."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from baton.errors import InvalidRequestError, shown

_ROLES = ("user", "assistant", "system")
_JOINED = ("content", "reasoning_content")
"""Fields whose text comes in parts, as many as there are blocks."""


def chat_messages(
    system: str | list[dict[str, Any]] | None, messages: Sequence[Mapping[str, Any]], ignored: list[str]
) -> list[dict[str, Any]]:
    """Return a conversation as chats have it; turns of one role that follow each other become one.

    Args:
        system: Instructions.
        messages: The turns.
        ignored: Takes the names of what has no effect.

    Raises:
        InvalidRequestError: Something is wrong; names the place.
    """
    reader = _Reader(ignored)
    if system:
        reader.add("system", _text(system, "system"))
    if not messages:
        raise InvalidRequestError("messages must not be empty", field="messages")
    for at, message in enumerate(messages):
        reader.read(message, f"messages[{at}]")
    if not reader.made:
        raise InvalidRequestError("messages: there is nothing in them to answer", field="messages")
    last = reader.made[-1]
    if last.get("tool_calls"):
        place = f"messages[{len(messages) - 1}].content"
        raise InvalidRequestError(f"{place}: a tool_use has no tool_result behind it", field=place)
    return [{name: "".join(item) if name in _JOINED else item for name, item in made.items()} for made in reader.made]


class _Reader:
    """Reads turns one after the other.

    Attributes:
        made: What has become of them; texts are lists of their parts.
    """

    def __init__(self, ignored: list[str]) -> None:
        self.made: list[dict[str, Any]] = []
        self._ignored = ignored
        self._called = set[str]()

    def add(self, role: str, text: str, joint: str = "\n") -> dict[str, Any]:
        """Return the last message, if it is of a role, or else a new one, with more text."""
        last = self.made[-1] if self.made else None
        if last is None or last["role"] != role:
            last = {"role": role, "content": []}
            self.made.append(last)
        if text:
            last["content"] += (joint, text) if last["content"] else (text,)
        return last

    def read(self, message: Mapping[str, Any], place: str) -> None:
        """Read a turn."""
        role = message.get("role")
        content = message.get("content")
        if role not in _ROLES:
            raise InvalidRequestError(
                f"{place}.role must be user, assistant or system, got {shown(role)}", field=f"{place}.role"
            )
        if isinstance(content, str):
            self.add(role, content)
            return
        place = f"{place}.content"
        if not isinstance(content, list) or not content:
            raise InvalidRequestError(f"{place} must be a string or a list of blocks, not empty", field=place)
        kinds: dict[str, dict[str, Callable[[Mapping[str, Any], str], None]]] = {
            "user": {"text": self._user_text, "tool_result": self._tool_result},
            "assistant": {
                "text": self._assistant_text,
                "tool_use": self._tool_use,
                "thinking": self._thinking,
                "redacted_thinking": self._redacted,
            },
            "system": {"text": self._system_text},
        }
        for at, block in enumerate(content):
            where = f"{place}[{at}]"
            kind = block.get("type") if isinstance(block, Mapping) else None
            take = kinds[role].get(kind) if isinstance(kind, str) else None
            if take is None:
                known = ", ".join(kinds[role])
                message_text = f"{where}.type must be one of {known} in a message of the {role}, got {shown(kind)}"
                raise InvalidRequestError(message_text, field=f"{where}.type")
            take(block, where)

    def _user_text(self, block: Mapping[str, Any], place: str) -> None:
        self.add("user", _string(block, "text", place))

    def _system_text(self, block: Mapping[str, Any], place: str) -> None:
        self.add("system", _string(block, "text", place))

    def _assistant_text(self, block: Mapping[str, Any], place: str) -> None:
        self.add("assistant", _string(block, "text", place), "")

    def _tool_result(self, block: Mapping[str, Any], place: str) -> None:
        ident = _string(block, "tool_use_id", place)
        if ident not in self._called:
            where = f"{place}.tool_use_id"
            raise InvalidRequestError(f"{where}: there is no tool_use {shown(ident)} before it", field=where)
        failed = block.get("is_error")
        if not isinstance(failed, bool | None):
            raise InvalidRequestError(f"{place}.is_error must be true or false", field=f"{place}.is_error")
        content = block.get("content")
        text = "" if content is None else _text(content, f"{place}.content")
        # Templates have no mark for results that are errors.
        text = f"Error: {text}" if failed else text
        self.made.append({"role": "tool", "tool_call_id": ident, "content": [text]})

    def _tool_use(self, block: Mapping[str, Any], place: str) -> None:
        ident = _string(block, "id", place)
        name = _string(block, "name", place)
        arguments = block.get("input")
        if not isinstance(arguments, Mapping):
            raise InvalidRequestError(
                f"{place}.input must be an object, got {shown(arguments)}", field=f"{place}.input"
            )
        call = {"id": ident, "type": "function", "function": {"name": name, "arguments": arguments}}
        self.add("assistant", "").setdefault("tool_calls", []).append(call)
        self._called.add(ident)

    def _thinking(self, block: Mapping[str, Any], place: str) -> None:
        message = self.add("assistant", "")
        message.setdefault("reasoning_content", []).append(_string(block, "thinking", place))

    def _redacted(self, block: Mapping[str, Any], place: str) -> None:
        self._ignored.append("redacted_thinking")


def _string(block: Mapping[str, Any], name: str, place: str) -> str:
    value = block.get(name)
    if not isinstance(value, str):
        raise InvalidRequestError(f"{place}.{name} must be a string, got {shown(value)}", field=f"{place}.{name}")
    return value


def _text(value: Any, place: str) -> str:
    """Return the text of what is a string or a list of text blocks."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise InvalidRequestError(f"{place} must be a string or a list of text blocks", field=place)
    texts = []
    for at, block in enumerate(value):
        kind = block.get("type") if isinstance(block, Mapping) else None
        if kind != "text":
            where = f"{place}[{at}].type"
            raise InvalidRequestError(f"{where}: only text is supported here, got {shown(kind)}", field=where)
        texts.append(_string(block, "text", f"{place}[{at}]"))
    return "\n".join(texts)
