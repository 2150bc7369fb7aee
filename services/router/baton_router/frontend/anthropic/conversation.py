"""The conversation of ``/v1/messages`` as chat messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from baton.errors import InvalidRequestError, shown
from baton_router.frontend.openai.schemas import invalid_field

_BLOCK_KINDS: Mapping[str, tuple[str, ...]] = {
    "user": ("text", "tool_result"),
    "assistant": ("text", "tool_use", "thinking", "redacted_thinking"),
    "system": ("text", "tool_addition", "tool_removal"),
}
"""Types of content blocks that messages of each role may have."""
_ROLES = tuple(_BLOCK_KINDS)
_JOINED = ("content", "reasoning_content")
"""Fields whose text is collected in parts, one per block."""


class Conversation:
    """Converts turns to chat messages, and gathers what they say of tools and effort.

    Consecutive turns of one role become one message.

    Args:
        system: Instructions.
        ignored: Takes the names of what has no effect.

    Attributes:
        effort: Effort that the last system turn with one asks for; ``None``: none does.
        loaded: Names of tools that turns made available.
        removed: Names of tools that turns removed.
        added: Definitions of tools that turns added, with their places.
    """

    def __init__(self, system: str | list[dict[str, Any]] | None, ignored: list[str]) -> None:
        self.effort: str | None = None
        self.loaded = set[str]()
        self.removed = set[str]()
        self.added: list[tuple[Mapping[str, Any], str]] = []
        self._messages: list[dict[str, Any]] = []
        self._ignored = ignored
        self._called = set[str]()
        if system:
            self.add("system", text_of(system, "system"))

    def read(self, turns: Sequence[Mapping[str, Any]], earlier: Sequence[Mapping[str, Any]] = ()) -> None:
        """Add the turns of a request.

        Args:
            turns: The turns.
            earlier: Turns of the same conversation before them, which were read once.

        Raises:
            InvalidRequestError: Something is wrong; names the place.
        """
        if not turns:
            raise InvalidRequestError("messages must not be empty", field="messages")
        numbered = [*((turn, "thread") for turn in earlier if turn.get("content") or turn.get("output_config"))]
        numbered += ((turn, f"messages[{at}]") for at, turn in enumerate(turns))
        last_user = max((at for at, (turn, _) in enumerate(numbered) if turn.get("role") == "user"), default=-1)
        for at, (turn, place) in enumerate(numbered):
            self._read(turn, place, passed=at < last_user)
        if not self._messages:
            raise InvalidRequestError("messages: there is nothing in them to answer", field="messages")
        if self._messages[-1].get("tool_calls"):
            place = f"messages[{len(turns) - 1}].content"
            raise InvalidRequestError(f"{place}: a tool_use has no tool_result behind it", field=place)

    def messages(self) -> list[dict[str, Any]]:
        """Return the chat messages."""
        return [
            {name: "".join(item) if name in _JOINED else item for name, item in message.items()}
            for message in self._messages
        ]

    def add(self, role: str, text: str, joint: str = "\n") -> dict[str, Any]:
        """Add text to the last message if it has the role, else to a new one; return the message."""
        last = self._messages[-1] if self._messages else None
        if last is None or last["role"] != role:
            last = {"role": role, "content": []}
            self._messages.append(last)
        if text:
            last["content"] += (joint, text) if last["content"] else (text,)
        return last

    def _read(self, turn: Mapping[str, Any], place: str, *, passed: bool) -> None:
        role = turn.get("role")
        content = turn.get("content")
        if role not in _ROLES:
            raise invalid_field(f"{place}.role", f"must be user, assistant or system, got {shown(role)}")
        if role == "system":
            if self._read_settings(turn, place, passed=passed):
                return
            if content is None and turn.get("output_config"):
                return
        if isinstance(content, str):
            self.add(role, content)
            return
        place = f"{place}.content"
        if not isinstance(content, list) or not content:
            raise invalid_field(place, "must be a string or a list of blocks, not empty")
        for at, block in enumerate(content):
            where = f"{place}[{at}]"
            kind = block.get("type") if isinstance(block, Mapping) else None
            if kind not in _BLOCK_KINDS[role]:
                known = ", ".join(_BLOCK_KINDS[role])
                raise invalid_field(
                    f"{where}.type", f"must be one of {known} in a message of the {role}, got {shown(kind)}"
                )
            match kind:
                case "text":
                    self.add(role, _string(block, "text", where), "" if role == "assistant" else "\n")
                case "tool_result":
                    self._tool_result(block, where)
                case "tool_use":
                    self._tool_use(block, where)
                case "thinking":
                    message = self.add("assistant", "")
                    message.setdefault("reasoning_content", []).append(_string(block, "thinking", where))
                case "tool_addition" | "tool_removal":
                    self._change_tools(kind, block.get("tool"), f"{where}.tool")
                case _:  # redacted_thinking
                    self._ignored.append(kind)

    def _read_settings(self, turn: Mapping[str, Any], place: str, *, passed: bool) -> bool:
        """Read the settings of a system turn; return whether the turn is no longer shown."""
        clear = turn.get("clear_at")
        if clear not in (None, "never", "next_user_message"):
            raise invalid_field(f"{place}.clear_at", f"must be next_user_message or never, got {shown(clear)}")
        config = turn.get("output_config")
        if not isinstance(config, Mapping | None):
            raise invalid_field(f"{place}.output_config", f"must be an object, got {shown(config)}")
        for name, item in (config or {}).items():
            if name == "effort":
                self.effort = item
            elif item is not None:
                self._ignored.append(f"{place}.output_config.{name}")
        return passed and clear == "next_user_message"

    def _change_tools(self, kind: str, tool: Any, place: str) -> None:
        definition = tool.get("definition") if isinstance(tool, Mapping) else None
        if kind == "tool_addition" and isinstance(definition, Mapping):
            self.added.append((definition, f"{place}.definition"))
            tool = definition
        elif not isinstance(tool, Mapping) or tool.get("type") != "tool_reference":
            raise invalid_field(f"{place}.type", "must be tool_reference, or tool_definition where a tool is added")
        name = _string(tool, "name", place)
        self.loaded.add(name)
        (self.removed.discard if kind == "tool_addition" else self.removed.add)(name)

    def _tool_result(self, block: Mapping[str, Any], place: str) -> None:
        ident = _string(block, "tool_use_id", place)
        if ident not in self._called:
            where = f"{place}.tool_use_id"
            raise InvalidRequestError(f"{where}: there is no tool_use {shown(ident)} before it", field=where)
        failed = block.get("is_error")
        if not isinstance(failed, bool | None):
            raise invalid_field(f"{place}.is_error", "must be true or false")
        content = block.get("content")
        text = "" if content is None else text_of(content, f"{place}.content", self.loaded)
        # Chat templates cannot mark results as errors.
        text = f"Error: {text}" if failed else text
        self._messages.append({"role": "tool", "tool_call_id": ident, "content": [text]})

    def _tool_use(self, block: Mapping[str, Any], place: str) -> None:
        ident = _string(block, "id", place)
        name = _string(block, "name", place)
        arguments = block.get("input")
        if not isinstance(arguments, Mapping):
            raise invalid_field(f"{place}.input", f"must be an object, got {shown(arguments)}")
        call = {"id": ident, "type": "function", "function": {"name": name, "arguments": arguments}}
        self.add("assistant", "").setdefault("tool_calls", []).append(call)
        self._called.add(ident)


def _string(block: Mapping[str, Any], name: str, place: str) -> str:
    value = block.get(name)
    if not isinstance(value, str):
        raise invalid_field(f"{place}.{name}", f"must be a string, got {shown(value)}")
    return value


def text_of(value: Any, place: str, loaded: set[str] | None = None) -> str:
    """Return the text of a string or a list of text blocks.

    Args:
        value: The string or list.
        place: Where it is in the request.
        loaded: Takes the names of tools that the list refers to; ``None``: it must not.

    Raises:
        InvalidRequestError: It is neither, or has other blocks; names the place.
    """
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise invalid_field(place, "must be a string or a list of text blocks")
    texts = []
    for at, block in enumerate(value):
        kind = block.get("type") if isinstance(block, Mapping) else None
        if kind == "tool_reference" and loaded is not None:
            name = _string(block, "tool_name", f"{place}[{at}]")
            loaded.add(name)
            texts.append(name)
        elif kind == "text":
            texts.append(_string(block, "text", f"{place}[{at}]"))
        else:
            where = f"{place}[{at}].type"
            raise InvalidRequestError(f"{where}: only text is supported here, got {shown(kind)}", field=where)
    return "\n".join(texts)
