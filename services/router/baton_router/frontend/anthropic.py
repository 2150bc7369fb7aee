"""``/v1/messages`` and ``/v1/messages/count_tokens``: Anthropic's schemas, parsers, formatters and errors.

A request becomes a chat request, which the OpenAI endpoints' run generates; the formatters write its answer as content
blocks, whole or in events.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

import msgspec
import orjson
from msgspec import UNSET, UnsetType
from starlette.exceptions import HTTPException
from starlette.responses import Response

from baton.dialects import CallArguments, CallEnd, CallStart, DialectParser, Event, Reasoning, Text
from baton.errors import BatonError, InvalidRequestError, shown
from baton.grammar import StructuredOutputs
from baton.tokenizer import TextDelta
from baton.types import FinishReason
from baton_router.frontend.http.errors import answer_to, baton_error_object, json_response
from baton_router.frontend.openai.answer import (
    EventStream,
    Formatter,
    WholeAnswer,
    named_events,
    parse_delta,
    reasoning_tokens,
)
from baton_router.frontend.openai.generation import FieldNames
from baton_router.frontend.openai.openai_request import OpenAIRequest, parse_chat
from baton_router.frontend.openai.schemas import (
    BOOL_OR_NULL,
    MESSAGES_TEXT,
    STRING,
    STRING_OR_NULL,
    TOOL_NAME,
    Body,
    Outside,
    array_schema,
    ignored_fields,
    invalid_field,
    object_schema,
    or_null,
    parse_body,
    unknown_fields,
)
from baton_router.processor.text_request import PreparedRequest, TextChunk, TextRequest
from baton_router.types import Account


def _block(kind: str, needed: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    return object_schema({"type": {"const": kind}, **needed}, **more)


_TEXTS = {"anyOf": [STRING, array_schema(_block("text", {"text": STRING}))]}
_BLOCKS = [
    _block("text", {"text": STRING}),
    _block("tool_use", {"id": STRING, "name": STRING, "input": {"type": "object"}}),
    _block("tool_result", {"tool_use_id": STRING}, content=or_null(_TEXTS), is_error=BOOL_OR_NULL),
    _block("thinking", {"thinking": STRING}),
    _block("redacted_thinking", {}),
]
_MESSAGE = object_schema(
    {
        "role": {"enum": ["user", "assistant", "system"]},
        "content": {"anyOf": [STRING, array_schema({"anyOf": _BLOCKS}, minItems=1)]},
    }
)
_TOOL = object_schema(
    {"name": TOOL_NAME, "input_schema": {"description": "A JSON schema of an object.", "type": "object"}},
    type={"enum": ["custom", None]},
    description=STRING_OR_NULL,
    strict=BOOL_OR_NULL,
)
_TOOL_CHOICE = object_schema(
    {"type": {"enum": ["auto", "any", "tool", "none"]}}, name=STRING, disable_parallel_tool_use=BOOL_OR_NULL
)
_THINKING = object_schema(
    {"type": {"enum": ["enabled", "adaptive", "disabled"]}},
    budget_tokens={"description": "With enabled: fewer than max_tokens.", "type": "integer", "minimum": 1},
    display={"enum": ["summarized", "omitted", None]},
)


class CountTokensBody(Body, kw_only=True):
    """Body of ``POST /v1/messages/count_tokens``, in the format of Anthropic's API."""

    outside: ClassVar[Outside] = Outside(
        frozenset({"cache_control"}),
        {"output_format": (), "mcp_servers": ([],), "container": (), "context_management": ({}, {"edits": []})},
        {"speed": ("standard",), "service_tier": ("auto", "standard_only"), "betas": ([],)},
    )

    described: ClassVar[Mapping[str, Any]] = {
        "messages": {"description": MESSAGES_TEXT, **array_schema(_MESSAGE, minItems=1)},
        "system": or_null(_TEXTS),
        "tools": or_null(array_schema(_TOOL)),
        "tool_choice": or_null(_TOOL_CHOICE),
        "thinking": or_null(_THINKING),
    }

    messages: list[dict[str, Any]]
    model: str | None = None
    system: str | list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None
    # Fields that Anthropic's API does not have.
    chat_template_kwargs: dict[str, Any] | None = None


class MessagesBody(CountTokensBody, kw_only=True):
    """Body of ``POST /v1/messages``."""

    max_tokens: Annotated[int, msgspec.Meta(ge=1)]
    stream: bool | None = None
    stop_sequences: list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    metadata: dict[str, Any] | None = None
    # Fields that Anthropic's API does not have.
    seed: int | None = None
    min_p: float | None = None


class AnthropicErrorObject(msgspec.Struct):
    """An error; ``param`` and ``code`` are those of OpenAI's format."""

    type: str
    message: str
    param: str | None
    code: str


class AnthropicError(msgspec.Struct):
    """Body of every error response, and event of a stream that ends with an error."""

    type: Literal["error"]
    error: AnthropicErrorObject


class MessageUsage(msgspec.Struct):
    """Tokens of a message; ``input_tokens`` are the prompt tokens that had to be computed."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: dict[str, int] | UnsetType = UNSET


class Message(msgspec.Struct):
    """Answers ``POST /v1/messages``."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[dict[str, Any]]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"] | None
    stop_sequence: str | None
    usage: MessageUsage


class MessageEvent(msgspec.Struct):
    """An event of a streamed message; its type determines the other fields."""

    type: Literal[
        "message_start",
        "ping",
        "content_block_start",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]


class TokenCount(msgspec.Struct):
    """Answers ``POST /v1/messages/count_tokens``."""

    input_tokens: int


_BLOCK_KINDS: Mapping[str, tuple[str, ...]] = {
    "user": ("text", "tool_result"),
    "assistant": ("text", "tool_use", "thinking", "redacted_thinking"),
    "system": ("text",),
}
"""Types of content blocks that messages of each role may have."""
_ROLES = tuple(_BLOCK_KINDS)
_JOINED = ("content", "reasoning_content")
"""Fields whose text is collected in parts, one per block."""


def chat_messages(
    system: str | list[dict[str, Any]] | None, messages: Sequence[Mapping[str, Any]], ignored: list[str]
) -> list[dict[str, Any]]:
    """Convert a conversation to chat messages; consecutive turns of one role become one message.

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
    for index, turn in enumerate(messages):
        reader.read(turn, f"messages[{index}]")
    if not reader.messages:
        raise InvalidRequestError("messages: there is nothing in them to answer", field="messages")
    last = reader.messages[-1]
    if last.get("tool_calls"):
        place = f"messages[{len(messages) - 1}].content"
        raise InvalidRequestError(f"{place}: a tool_use has no tool_result behind it", field=place)
    return [
        {name: "".join(item) if name in _JOINED else item for name, item in message.items()}
        for message in reader.messages
    ]


class _Reader:
    """Converts turns to chat messages, one after the other.

    Attributes:
        messages: Chat messages so far; texts are lists of their parts.
    """

    def __init__(self, ignored: list[str]) -> None:
        self.messages: list[dict[str, Any]] = []
        self._ignored = ignored
        self._called = set[str]()

    def add(self, role: str, text: str, joint: str = "\n") -> dict[str, Any]:
        """Add text to the last message if it has the role, else to a new one; return the message."""
        last = self.messages[-1] if self.messages else None
        if last is None or last["role"] != role:
            last = {"role": role, "content": []}
            self.messages.append(last)
        if text:
            last["content"] += (joint, text) if last["content"] else (text,)
        return last

    def read(self, turn: Mapping[str, Any], place: str) -> None:
        role = turn.get("role")
        content = turn.get("content")
        if role not in _ROLES:
            raise invalid_field(f"{place}.role", f"must be user, assistant or system, got {shown(role)}")
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
                case _:  # redacted_thinking
                    self._ignored.append(kind)

    def _tool_result(self, block: Mapping[str, Any], place: str) -> None:
        ident = _string(block, "tool_use_id", place)
        if ident not in self._called:
            where = f"{place}.tool_use_id"
            raise InvalidRequestError(f"{where}: there is no tool_use {shown(ident)} before it", field=where)
        failed = block.get("is_error")
        if not isinstance(failed, bool | None):
            raise invalid_field(f"{place}.is_error", "must be true or false")
        content = block.get("content")
        text = "" if content is None else _text(content, f"{place}.content")
        # Chat templates cannot mark results as errors.
        text = f"Error: {text}" if failed else text
        self.messages.append({"role": "tool", "tool_call_id": ident, "content": [text]})

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


def _text(value: Any, place: str) -> str:
    """Return the text of a string or a list of text blocks."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise invalid_field(place, "must be a string or a list of text blocks")
    texts = []
    for at, block in enumerate(value):
        kind = block.get("type") if isinstance(block, Mapping) else None
        if kind != "text":
            where = f"{place}[{at}].type"
            raise InvalidRequestError(f"{where}: only text is supported here, got {shown(kind)}", field=where)
        texts.append(_string(block, "text", f"{place}[{at}]"))
    return "\n".join(texts)


NAMES = FieldNames.make(
    (r"(tools\[\d+\])\.function\.parameters", r"\1.input_schema"),
    (r"(tools\[\d+\])\.function", r"\1"),
    (r"tool_choice\.function", "tool_choice"),
    (r"thinking_token_budget", "thinking.budget_tokens"),
    (r"reasoning_effort", "output_config.effort"),
    (r"stop$", "stop_sequences"),
    (r"user$", "metadata.user_id"),
)
"""Names of chat fields in this interface."""
_PASSED = ("model", "temperature", "top_p", "top_k", "min_p", "seed", "stream", "max_tokens")
_TOOL_KEYS = {"name", "description", "input_schema", "strict", "type"}
_HARMLESS_TOOL_KEYS = {"cache_control", "eager_input_streaming"}
_SWITCHES = ("enable_thinking", "thinking")
"""Variables of chat templates that switch reasoning on and off."""


def parse_message(value: Any, account: Account | None) -> OpenAIRequest:
    """Parse the body of a request for a message.

    Raises:
        InvalidRequestError: A field is wrong or asks for what can't be done; names it.
    """
    body = parse_body(MessagesBody, value)
    ignored = ignored_fields(unknown_fields(MessagesBody, value), MessagesBody.outside)
    more: dict[str, Any] = {name: item for name in _PASSED if (item := getattr(body, name)) is not None}
    more["stop"] = body.stop_sequences
    user = (body.metadata or {}).get("user_id")
    if not isinstance(user, str | None):
        raise InvalidRequestError("metadata.user_id must be a string", field="metadata.user_id")
    more["user"] = user
    return _request(body, more, ignored, body.max_tokens)


def count_request(body: CountTokensBody) -> TextRequest:
    """Return a generation whose prompt is the conversation, with its tools and the template's text."""
    (request,) = _request(body, {"model": body.model}, [], None).requests
    return request


def _request(body: CountTokensBody, more: dict[str, Any], ignored: list[str], most: int | None) -> OpenAIRequest:
    """Convert a body to a chat request.

    Args:
        body: Fields that both endpoints have.
        more: Other fields of the chat request.
        ignored: Fields without effect; more are appended.
        most: Most tokens of the answer; ``None`` if no answer is generated.
    """
    chat = {**more, "messages": chat_messages(body.system, body.messages, ignored)}
    if chat["messages"][-1]["role"] == "assistant":
        chat["continue_final_message"] = True
    if body.tools:
        chat["tools"] = [_tool(tool, f"tools[{at}]", ignored) for at, tool in enumerate(body.tools)]
    chat["tool_choice"], chat["parallel_tool_calls"] = _tool_choice(body.tool_choice)
    reasons, shown_too, budget = _thinking(body.thinking, most)
    variables = body.chat_template_kwargs or {}
    switches = [name for name in _SWITCHES if name not in variables]
    chat["chat_template_kwargs"] = {**variables, **dict.fromkeys(switches, reasons)}
    chat["include_reasoning"] = shown_too
    chat["thinking_token_budget"] = budget
    config = dict(body.output_config or {})
    chat["reasoning_effort"] = config.pop("effort", None)
    form = config.pop("format", None)
    ignored += [f"output_config.{name}" for name, item in config.items() if item is not None]
    request = parse_chat(chat)
    request.requests[0].structured = _structured(form)
    for name in switches:  # the request does not name these
        del request.template_fields[name]
    if "reasoning_effort" in request.template_fields:
        request.template_fields["reasoning_effort"] = "output_config.effort"
    request.reasoning_fields = ["thinking"] if reasons else []
    request.ignored = ignored
    return request


def _tool(tool: Mapping[str, Any], place: str, ignored: list[str]) -> dict[str, Any]:
    if tool.get("type") not in (None, "custom"):
        raise invalid_field(
            f"{place}.type", f"must be custom, as Baton has no tools of its own, got {shown(tool['type'])}"
        )
    schema = tool.get("input_schema")
    if not isinstance(schema, Mapping):
        raise invalid_field(f"{place}.input_schema", f"must be the JSON schema of an object, got {shown(schema)}")
    function = {"name": tool.get("name"), "parameters": schema}
    function |= {name: tool[name] for name in ("description", "strict") if tool.get(name) is not None}
    unknown = tool.keys() - _TOOL_KEYS - _HARMLESS_TOOL_KEYS
    ignored += [f"{place}.{name}" for name in sorted(unknown) if tool[name] is not None]
    return {"type": "function", "function": function}


def _tool_choice(choice: Mapping[str, Any] | None) -> tuple[Any, bool | None]:
    """Return ``tool_choice`` and ``parallel_tool_calls`` of the chat request."""
    if choice is None:
        return None, None
    alone = choice.get("disable_parallel_tool_use")
    if not isinstance(alone, bool | None):
        raise invalid_field("tool_choice.disable_parallel_tool_use", "must be true or false")
    parallel = None if alone is None else not alone
    match choice.get("type"):
        case "auto" | "none" as kind:
            return kind, parallel
        case "any":
            return "required", parallel
        case "tool":
            return {"type": "function", "function": {"name": choice.get("name")}}, parallel
        case kind:
            raise invalid_field("tool_choice.type", f"must be auto, any, tool or none, got {shown(kind)}")


def _thinking(value: Mapping[str, Any] | None, most: int | None) -> tuple[bool, bool, int | None]:
    """Return whether the model reasons, whether that is shown, and the most tokens of it."""
    if value is None:
        return False, False, None
    display = value.get("display")
    if display not in (None, "summarized", "omitted"):
        raise invalid_field("thinking.display", f"must be summarized or omitted, got {shown(display)}")
    match value.get("type"):
        case "disabled":
            return False, False, None
        case "adaptive":
            return True, display != "omitted", None
        case "enabled":
            budget = value.get("budget_tokens")
            name = "thinking.budget_tokens"
            if type(budget) is not int or budget < 1:
                raise invalid_field(name, f"must be an integer above 0, got {shown(budget)}")
            if most is not None and budget >= most:
                raise invalid_field(
                    name, f"must be less than max_tokens, which counts reasoning too: {budget} and {most}"
                )
            return True, display != "omitted", budget
        case kind:
            raise invalid_field("thinking.type", f"must be enabled, adaptive or disabled, got {shown(kind)}")


def _structured(form: Any) -> StructuredOutputs | None:
    if form is None:
        return None
    place = "output_config.format"
    if not isinstance(form, Mapping) or form.get("type") != "json_schema":
        raise invalid_field(f"{place}.type", "must be json_schema")
    if not isinstance(form.get("schema"), Mapping):
        raise invalid_field(f"{place}.schema", "must be a JSON schema")
    return StructuredOutputs(json=form["schema"], field=f"{place}.schema")


def message_formatter(request: OpenAIRequest, prepared: Sequence[PreparedRequest]) -> Formatter:
    return MessageStream if request.stream else WholeAnthropicMessage


class _Message:
    """One message object while it is generated.

    Args:
        request: The HTTP request.
        prepared: The prepared prompt.
        ident: Identifier of the message.
    """

    def __init__(self, request: OpenAIRequest, prepared: PreparedRequest, ident: str) -> None:
        self._prepared = prepared
        self._ident = ident
        self._reasoning = request.reasoning
        self._parser: DialectParser | None = prepared.parser()
        self._blocks: list[dict[str, Any]] = []
        self._open = ""
        self._thoughts: list[str] = []
        self._stop_reason: str | None = None
        self._stop_sequence: str | None = None

    def add_delta(self, delta: TextDelta) -> list[dict[str, Any]]:
        """Add text; return the stream's events for it."""
        finish = delta.finish_reason
        parsed = parse_delta(self._parser, delta)
        events = [event for item in parsed for event in self._event(item)]
        if finish is not None:
            events += self._close()
            self._finish(finish, delta.stop_reason)
        return events

    def _finish(self, finish: FinishReason, stop: str | int | None) -> None:
        if finish == FinishReason.LENGTH:
            self._stop_reason = "max_tokens"
        elif isinstance(stop, str):
            self._stop_reason = "stop_sequence"
            self._stop_sequence = stop
        else:
            self._stop_reason = "tool_use" if self._parser is not None and self._parser.calls else "end_turn"

    def _event(self, event: Event) -> list[dict[str, Any]]:
        match event:
            case Text():
                events = self._begin("text", {"text": ""})
                self._blocks[-1]["text"] += event.text
                return [*events, self._delta("text_delta", text=event.text)]
            case Reasoning():
                self._thoughts.append(event.text)
                if not self._reasoning:
                    return []
                events = self._begin("thinking", {"thinking": "", "signature": ""})
                self._blocks[-1]["thinking"] += event.text
                return [*events, self._delta("thinking_delta", thinking=event.text)]
            case CallStart():
                events = self._close()
                events += self._begin("tool_use", {"id": event.id, "name": event.name, "input": {}})
                self._blocks[-1]["input"] = ""
                return events
            case CallArguments():
                self._blocks[-1]["input"] += event.text
                return [self._delta("input_json_delta", partial_json=event.text)]
            case CallEnd():
                return self._close()

    def _begin(self, kind: str, fields: dict[str, Any]) -> list[dict[str, Any]]:
        if self._open == kind:
            return []
        events = self._close()
        self._open = kind
        block = {"type": kind, **fields}
        self._blocks.append(dict(block))
        start = {"type": "content_block_start", "index": len(self._blocks) - 1, "content_block": block}
        return [*events, start]

    def _delta(self, kind: str, **fields: str) -> dict[str, Any]:
        delta = {"type": kind, **fields}
        return {"type": "content_block_delta", "index": len(self._blocks) - 1, "delta": delta}

    def _close(self) -> list[dict[str, Any]]:
        if not self._open:
            return []
        self._open = ""
        return [{"type": "content_block_stop", "index": len(self._blocks) - 1}]

    def usage(self, tokens: int, cached: int) -> dict[str, Any]:
        """Return the usage so far."""
        usage: dict[str, Any] = {
            "input_tokens": self._prepared.prompt_tokens - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": tokens,
        }
        if self._stop_reason is not None:
            thoughts = reasoning_tokens(self._prepared, "".join(self._thoughts))
            usage["output_tokens_details"] = {"thinking_tokens": min(thoughts, tokens)}
        return usage

    @property
    def stop_fields(self) -> dict[str, Any]:
        """Fields with the reason why the message ended."""
        return {"stop_reason": self._stop_reason, "stop_sequence": self._stop_sequence}

    def body(self, tokens: int, cached: int) -> dict[str, Any]:
        blocks = [
            {**block, "input": object_of(block["input"])} if block["type"] == "tool_use" else block
            for block in self._blocks
        ]
        return {
            "id": self._ident,
            "type": "message",
            "role": "assistant",
            "model": self._prepared.info.name,
            "content": blocks,
            **self.stop_fields,
            "usage": self.usage(tokens, cached),
        }


class WholeAnthropicMessage(WholeAnswer):
    """The formatter of messages in one piece."""

    __slots__ = ("_message",)

    def __init__(self, request: OpenAIRequest, prepared: Sequence[PreparedRequest], ident: str, created: int) -> None:
        super().__init__(request, prepared, ident, created)
        self._message = _Message(request, prepared[0], ident)

    def end(self) -> bytes:
        choice = self._choices[0][0]
        self._message.add_delta(choice.whole())
        return orjson.dumps(self._message.body(len(choice.ids), self._cached[0]))


class MessageStream(EventStream):
    """The formatter of streamed messages."""

    def __init__(self, request: OpenAIRequest, prepared: Sequence[PreparedRequest], ident: str, created: int) -> None:
        super().__init__(request, prepared, ident, created)
        self._is_plain = False  # a token has events of other forms
        self._message = _Message(request, prepared[0], ident)

    def add(self, chunk: TextChunk) -> bytes:
        events: list[dict[str, Any]] = []
        if chunk.trace is not None:
            self._cached[0] = chunk.cached_tokens
        if not self._begun[0]:
            self._begun[0] = True
            events = [{"type": "message_start", "message": self._message.body(0, self._cached[0])}, {"type": "ping"}]
        for delta in chunk.deltas:
            self._tokens += len(delta.token_ids)
            events += self._message.add_delta(delta)
        return named_events(events)

    def end(self) -> bytes:
        usage = self._message.usage(self._tokens, self._cached[0])
        delta = {"type": "message_delta", "delta": self._message.stop_fields, "usage": usage}
        return named_events([delta, {"type": "message_stop"}])

    def error(self, error: BatonError) -> bytes:
        return named_events([error_event(error)])


def object_of(text: str) -> dict[str, Any]:
    """Return a call's arguments as an object; of truncated arguments, the complete values.

    Arguments that are not an object are returned as ``INVALID_JSON``, as Anthropic suggests for results.
    """
    for candidate in (text or "{}", _completed(text)):
        try:
            value = orjson.loads(candidate)
        except orjson.JSONDecodeError:
            continue
        if isinstance(value, dict):
            return value
    return {"INVALID_JSON": text}


def _completed(text: str) -> str:
    """Return truncated JSON, closed after its last complete value."""
    closers: list[str] = []
    end = 0
    quoted = False
    escaped = False
    for position, char in enumerate(text):
        if quoted:
            quoted = escaped or char != '"'
            escaped = char == "\\" and not escaped
        elif char == '"':
            quoted = True
        elif char in "{[":
            closers.append("}" if char == "{" else "]")
            end = position + 1
        elif char in "}]" and closers:
            closers.pop()
            end = position + 1
        elif char == "," and closers:
            end = position
    return text[:end] + "".join(reversed(closers))


_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
_KEPT = ("retry-after", "www-authenticate")


def refusal(error: BatonError | HTTPException) -> Response:
    """Return the response for an error."""
    response = answer_to(error)
    fields = orjson.loads(bytes(response.body))["error"]
    headers = {name: response.headers[name] for name in _KEPT if name in response.headers}
    return json_response(_shaped(response.status_code, fields), response.status_code, headers)


def error_event(error: BatonError) -> dict[str, Any]:
    """Return the event that ends a stream."""
    return _shaped(error.http_status, baton_error_object(error)["error"])


def _shaped(status: int, fields: dict[str, Any]) -> dict[str, Any]:
    kind = _TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")
    parts = {name: fields[name] for name in ("message", "param", "code")}
    return {"type": "error", "error": {"type": kind, **parts}}
