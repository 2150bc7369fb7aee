"""``/v1/responses``: schemas, the parser that makes chat requests of requests, and formatters."""

from __future__ import annotations

import functools
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import msgspec
import orjson

from baton.dialects import CallArguments, CallEnd, CallStart, DialectParser, Event, Reasoning, Text
from baton.errors import BatonError, InvalidRequestError, shown
from baton.grammar import StructuredOutputs
from baton.types import FinishReason
from baton_router.frontend.http.errors import baton_error_object
from baton_router.frontend.openai.answer import (
    EventStream,
    Formatter,
    LogprobWriter,
    WholeAnswer,
    message_of,
    named_events,
    parse_delta,
    reasoning_tokens,
    usage_object,
)
from baton_router.frontend.openai.generation import FieldNames
from baton_router.frontend.openai.openai_request import OpenAIRequest, parse_chat
from baton_router.frontend.openai.response_logprobs import LogprobAligner, event_logprobs
from baton_router.frontend.openai.response_store import ResponseStore
from baton_router.frontend.openai.response_tools import TOOLS_SCHEMA, ResponseTools, call_of_item, custom_input
from baton_router.frontend.openai.schemas import (
    EXTENSIONS_SCHEMA,
    METADATA_SCHEMA,
    STRING,
    STRING_OR_NULL,
    Body,
    Outside,
    array_schema,
    check_metadata,
    ignored_fields,
    invalid_field,
    object_schema,
    or_null,
    parse_body,
    unknown_fields,
)
from baton_router.processor.text_request import PreparedRequest, TextChunk, TextDelta
from baton_router.types import Account

TEXT_PARTS = ("input_text", "output_text", "text", "reasoning_text", "summary_text")
ROLES = ("user", "assistant", "system", "developer")
MAX_REFERRED_BYTES = 8 << 20
"""Of stored items that one request refers to: a reference is much shorter than what it stands for."""


_PART = object_schema({"type": {"enum": list(TEXT_PARTS)}, "text": STRING})
_CONTENT = {"anyOf": [STRING, array_schema(_PART)]}


def _item(kind: str, required: Mapping[str, Any], **optional: Any) -> dict[str, Any]:
    return object_schema({"type": {"const": kind}, **required}, **optional)


_SETTINGS = {"type": ["object", "null"]}
_ITEMS = [
    object_schema({"role": {"enum": list(ROLES)}, "content": _CONTENT}, type={"const": "message"}),
    _item("function_call", {"call_id": STRING, "name": STRING, "arguments": STRING}, namespace=STRING_OR_NULL),
    _item("custom_tool_call", {"call_id": STRING, "name": STRING, "input": STRING}, namespace=STRING_OR_NULL),
    _item("function_call_output", {"call_id": STRING, "output": _CONTENT}),
    _item("custom_tool_call_output", {"call_id": STRING, "output": _CONTENT}),
    _item("reasoning", {}, content=or_null(_CONTENT), summary=or_null(_CONTENT)),
    _item("item_reference", {"id": STRING}),
    _item("additional_tools", {"tools": TOOLS_SCHEMA}),
    _item("configuration_update", {}, reasoning=_SETTINGS, text=_SETTINGS),
]
_KINDS = ("message", *(item["properties"]["type"]["const"] for item in _ITEMS[1:]))
_INPUT = {
    "description": "A text, or the items of a conversation.",
    "anyOf": [STRING, array_schema({"anyOf": _ITEMS}, minItems=1)],
}


class ResponsesBody(Body, kw_only=True):
    """``POST /v1/responses``; what is in ``input``, ``tools``, ``text`` and ``reasoning`` is as OpenAI describes it."""

    outside: ClassVar[Outside] = Outside(
        frozenset({"safety_identifier", "client_metadata"}),
        {
            "background": (False,),
            "conversation": (),
            "prompt": (),
            "truncation": ("disabled",),
            "max_tool_calls": (),
            "context_management": ([],),
            "moderation": (),
        },
        {"service_tier": ("auto", "default"), "stream_options": ({"include_obfuscation": False}, {})},
    )

    described: ClassVar[Mapping[str, Any]] = {
        "input": _INPUT,
        "tools": or_null(TOOLS_SCHEMA),
        "metadata": METADATA_SCHEMA,
        "nvext": EXTENSIONS_SCHEMA,
    }

    input: str | list[dict[str, Any]]
    model: str | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    stream: bool | None = None
    text: dict[str, Any] | None = None
    reasoning: dict[str, Any] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_logprobs: int | None = None
    include: list[str] | None = None
    metadata: dict[str, str] | None = None
    user: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    # What OpenAI's interface doesn't have.
    nvext: dict[str, Any] | None = None
    seed: int | None = None
    top_k: int | None = None
    min_p: float | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    thinking_token_budget: int | None = None


_PASSED = (
    "model",
    "temperature",
    "top_p",
    "stream",
    "user",
    "prompt_cache_key",
    "prompt_cache_retention",
    "nvext",
    "seed",
    "top_k",
    "min_p",
    "chat_template_kwargs",
    "thinking_token_budget",
)
"""Fields that chat requests have, too."""
_NESTED: Mapping[str, tuple[tuple[str, ...], Mapping[str, tuple[Any, ...]]]] = {
    "text": (("format",), {"verbosity": ("medium",)}),
    "reasoning": (("effort",), {"summary": (), "generate_summary": ()}),
}
"""Fields of nested objects: those with an effect, and those without one, with the values that need no warning."""
_LOGPROBS = "message.output_text.logprobs"
"""Item of ``include`` that asks for log probabilities, as ``top_logprobs`` above 0 does."""
NAMES = FieldNames.make(
    (r"messages.*", "input"),
    (r"max(_completion)?_tokens$", "max_output_tokens"),
    (r"reasoning_effort", "reasoning.effort"),
)
"""Names of chat fields in this interface."""


class ResponseSettings(msgspec.Struct):
    """The part of a response that comes from its request, and where it is stored.

    Attributes:
        ident: Identifier of the response.
        echo: Fields of the request that the response repeats.
        messages: The conversation before the answer, without instructions.
        inputs: Items of the input.
        tools: Tools of the request.
        logprobs: Whether the text has log probabilities.
        account: Account of the request; ``None`` without API keys.
        store: Store for the response; ``None``: it is not stored.
    """

    ident: str
    echo: dict[str, Any]
    messages: list[dict[str, Any]]
    inputs: list[dict[str, Any]]
    tools: ResponseTools
    logprobs: bool
    account: Account | None
    store: ResponseStore | None

    def store_response(self, message: dict[str, Any], body: dict[str, Any]) -> None:
        """Store the conversation with its answer, and the response."""
        if self.store is not None:
            self.store.add(self.account, self.ident, [*self.messages, message], body, self.inputs)


def parse_response(value: Any, account: Account | None, store: ResponseStore) -> OpenAIRequest:
    """Parse the body of a request for a response.

    Args:
        value: The decoded JSON body.
        account: Account of the request; ``None`` without API keys.
        store: Store of earlier responses.

    Raises:
        InvalidRequestError: A field is wrong or asks for what is not supported; names it.
        NotFoundError: There is no response of the id ``previous_response_id``.
    """
    body = parse_body(ResponsesBody, value)
    ignored = ignored_fields(unknown_fields(ResponsesBody, value), ResponsesBody.outside)
    return read_response(body, account, store, ignored)


def read_response(
    body: ResponsesBody, account: Account | None, store: ResponseStore, ignored: list[str]
) -> OpenAIRequest:
    """Return the request of a body; see :func:`parse_response`.

    Args:
        body: The body.
        account: Account of the request; ``None`` without API keys.
        store: Store of earlier responses.
        ignored: Fields without effect; more are appended.
    """
    check_metadata(body.metadata)
    for name, (acting, silent) in _NESTED.items():
        nested = getattr(body, name) or {}
        for key, item in nested.items():
            if key not in acting and item is not None and item not in silent.get(key, ()):
                ignored.append(f"{name}.{key}")
    include = body.include or []
    if any(item != _LOGPROBS for item in include):
        ignored.append("include")
    earlier = store.messages(account, body.previous_response_id) if body.previous_response_id else []
    tools = ResponseTools(ignored)
    tools.add(body.tools or [], "tools")
    settings = {"reasoning": body.reasoning or {}, "text": body.text or {}}
    read = _Input(tools, settings, functools.partial(store.item, account))
    read.add(body.input)
    tools.check_left()
    messages = earlier + read.messages
    instructions = [{"role": "system", "content": body.instructions}] if body.instructions else []
    chat: dict[str, Any] = {name: item for name in _PASSED if (item := getattr(body, name)) is not None}
    chat["messages"] = instructions + messages
    chat["max_completion_tokens"] = body.max_output_tokens
    chat["tools"] = tools.functions or None
    chat["tool_choice"] = tools.choice(body.tool_choice)
    chat["parallel_tool_calls"] = body.parallel_tool_calls
    if body.top_logprobs or _LOGPROBS in include:
        chat["logprobs"] = True
        chat["top_logprobs"] = body.top_logprobs
    reasoning = read.settings["reasoning"]
    if reasoning.get("effort") is not None:
        chat["reasoning_effort"] = reasoning["effort"]
    request = parse_chat(chat, tools.places)
    (text_request,) = request.requests
    text_request.prompt_field = "input"
    text_request.max_tokens_field = "max_output_tokens"
    text_request.structured = _structured(read.settings["text"])
    request.ignored = ignored + request.ignored
    if "reasoning_effort" in request.template_fields:
        request.template_fields["reasoning_effort"] = "reasoning.effort"
    request.ident = f"resp_{secrets.token_hex(24)}"
    request.settings = ResponseSettings(
        ident=request.ident,
        echo={
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": body.previous_response_id,
            "reasoning": {"effort": reasoning.get("effort"), "summary": None},
            "store": body.store is not False,
            "temperature": body.temperature,
            "text": body.text or {"format": {"type": "text"}},
            "tool_choice": body.tool_choice or "auto",
            "tools": body.tools or [],
            "top_logprobs": body.top_logprobs or 0,
            "top_p": body.top_p,
            "truncation": "disabled",
            **({} if body.user is None else {"user": body.user}),
        },
        messages=messages,
        inputs=_input_items(body.input),
        tools=tools,
        logprobs=request.logprobs,
        account=account,
        store=store if body.store is not False else None,
    )
    return request


def _input_items(value: str | list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the items of an input with identifiers, texts of messages as parts."""
    given = [{"role": "user", "content": value}] if isinstance(value, str) else value
    items = []
    for at, item in enumerate(given):
        kind = item.get("type", "message")
        if not isinstance(item.get("id") or "", str):
            raise invalid_field(f"input[{at}].id", f"must be a string, got {shown(item['id'])}")
        made = {**item, "type": kind, "id": item.get("id") or _ident(_PREFIXES.get(kind, "item"))}
        if kind == "message":
            made.setdefault("status", "completed")
            if isinstance(item.get("content"), str):
                part = "output_text" if item.get("role") == "assistant" else "input_text"
                made["content"] = [{"type": part, "text": item["content"]}]
        items.append(made)
    return items


_PREFIXES = {"message": "msg", "function_call": "fc", "custom_tool_call": "ctc", "reasoning": "rs"}


class _Input:
    """Converts the items of an input to messages; separate calls and reasoning become an assistant's message.

    Args:
        tools: Takes the tools of items.
        settings: ``reasoning`` and ``text`` of the request, which items change.
        find_item: Returns a stored item as JSON by its identifier; its second argument is the place for errors.

    Attributes:
        messages: The messages so far.
        settings: The settings after them.
    """

    def __init__(
        self,
        tools: ResponseTools,
        settings: dict[str, dict[str, Any]],
        find_item: Callable[[str, str], bytes],
    ) -> None:
        self._find_item = find_item
        self._referred_bytes = 0
        self.messages: list[dict[str, Any]] = []
        self.settings = settings
        self._tools = tools
        self._open = False

    def add(self, value: str | list[dict[str, Any]]) -> None:
        """Add an input.

        Raises:
            InvalidRequestError: An item is wrong; names the place.
        """
        if isinstance(value, str):
            self.messages.append({"role": "user", "content": value})
            return
        for at, item in enumerate(value):
            self._add(item, f"input[{at}]")

    def _add(self, item: dict[str, Any], place: str) -> None:
        messages = self.messages
        reasoned = self._open
        self._open = False
        match item.get("type", "message"):
            case "message":
                role = item.get("role")
                if role not in ROLES:
                    raise invalid_field(f"{place}.role", f"must be one of {', '.join(ROLES)}, got {shown(role)}")
                content = _text(item.get("content"), f"{place}.content")
                if role == "assistant" and reasoned:
                    messages[-1]["content"] = content
                else:
                    messages.append({"role": role, "content": content})
            case "reasoning":
                given = {name: item[name] for name in ("content", "summary") if item.get(name) is not None}
                texts = [_text(value, f"{place}.{name}") for name, value in given.items()]
                content = next(filter(None, texts), "")
                messages.append({"role": "assistant", "content": "", "reasoning_content": content})
                self._open = True
            case "function_call" | "custom_tool_call":
                call = call_of_item(item, place)
                if not messages or messages[-1]["role"] != "assistant":
                    messages.append({"role": "assistant", "content": ""})
                messages[-1].setdefault("tool_calls", []).append(call)
            case "function_call_output" | "custom_tool_call_output":
                if not isinstance(item.get("call_id"), str):
                    raise invalid_field(f"{place}.call_id", "must be a string")
                output = _text(item.get("output"), f"{place}.output")
                messages.append({"role": "tool", "tool_call_id": item["call_id"], "content": output})
            case "item_reference":
                if not isinstance(item.get("id"), str):
                    raise invalid_field(f"{place}.id", "must be a string")
                self._open = reasoned
                found = self._find_item(item["id"], f"{place}.id")
                self._referred_bytes += len(found)
                if self._referred_bytes > MAX_REFERRED_BYTES:
                    raise invalid_field(place, f"refers to more than {MAX_REFERRED_BYTES} bytes, with those before it")
                self._add(orjson.loads(found), place)
            case "additional_tools":
                self._tools.add(item.get("tools"), f"{place}.tools")
            case "configuration_update":
                for name, setting in self.settings.items():
                    change = item.get(name)
                    if not isinstance(change, Mapping | None):
                        raise invalid_field(f"{place}.{name}", f"must be an object, got {shown(change)}")
                    self.settings[name] = {**setting, **(change or {})}
            case kind:
                raise invalid_field(f"{place}.type", f"must be one of {', '.join(_KINDS)}, got {shown(kind)}")


def _text(value: Any, place: str) -> str:
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise invalid_field(place, "must be a string or a list of parts")
    texts = []
    for at, part in enumerate(value):
        known = isinstance(part, Mapping) and part.get("type") in TEXT_PARTS
        if not known or not isinstance(part.get("text"), str):
            message = f"{place}[{at}]: only text parts are supported: {{'type': 'input_text', 'text': '...'}}"
            raise InvalidRequestError(message, field=f"{place}[{at}]")
        texts.append(part["text"])
    return "\n".join(texts)


def _structured(text: dict[str, Any] | None) -> StructuredOutputs | None:
    place = "text.format"
    form = (text or {}).get("format")
    if form is None:
        return None
    kind = form.get("type") if isinstance(form, Mapping) else None
    match kind:
        case "text":
            return None
        case "json_object":
            return StructuredOutputs(json_object=True, field=place)
        case "json_schema":
            if not isinstance(form.get("schema"), Mapping):
                raise invalid_field(f"{place}.schema", "must be a JSON schema")
            return StructuredOutputs(json=form["schema"], field=f"{place}.schema")
    raise invalid_field(f"{place}.type", f"must be text, json_object or json_schema, got {shown(kind)}")


def response_formatter(request: OpenAIRequest, prepared: Sequence[PreparedRequest]) -> Formatter:
    return ResponseEvents if request.stream else WholeResponse


_CUSTOM = "custom_tool_call"


class _Items:
    """Builds output items from a parser's events, and makes the stream's events for them.

    Args:
        tools: Tools of the request.
    """

    def __init__(self, tools: ResponseTools) -> None:
        self._tools = tools
        self._input = ""
        self.items: list[dict[str, Any]] = []
        self._open = ""

    def add_event(self, event: Event, logprobs: Sequence[dict[str, Any]] = ()) -> list[dict[str, Any]]:
        """Add an event; return the stream's events for it.

        Args:
            event: The event.
            logprobs: Log probabilities of its text.
        """
        match event:
            case Text():
                events = self._begin("message")
                part = self.items[-1]["content"][0]
                part["text"] += event.text
                part["logprobs"] += logprobs
                more = {"content_index": 0, "logprobs": event_logprobs(logprobs)}
                return [*events, self._delta("response.output_text.delta", event.text, **more)]
            case Reasoning():
                events = self._begin("reasoning")
                self.items[-1]["content"][0]["text"] += event.text
                return [*events, self._delta("response.reasoning_text.delta", event.text, content_index=0)]
            case CallStart():
                events = self.close()
                item = self._tools.call_item(event.name)
                self._open = item["type"]
                self._input = ""
                ident = _ident("ctc" if self._open == _CUSTOM else "fc")
                self.items.append({"id": ident, "status": "in_progress", "call_id": event.id, **item})
                return [*events, self._item("response.output_item.added")]
            case CallArguments() if self._open == _CUSTOM:  # the input is within them
                self._input += event.text
                return []
            case CallArguments():
                self.items[-1]["arguments"] += event.text
                return [self._delta("response.function_call_arguments.delta", event.text)]
            case CallEnd():
                return self.close()

    def _begin(self, kind: str) -> list[dict[str, Any]]:
        if self._open == kind:
            return []
        events = self.close()
        self._open = kind
        item: dict[str, Any] = {"id": _ident("msg"), "type": "message", "role": "assistant"}
        part: dict[str, Any] = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        if kind == "reasoning":
            item = {"id": _ident("rs"), "type": "reasoning", "summary": []}
            part = {"type": kind + "_text", "text": ""}
        self.items.append({**item, "status": "in_progress", "content": []})
        events.append(self._item("response.output_item.added"))
        self.items[-1]["content"].append(part)
        return [*events, self._part("response.content_part.added")]

    def close(self, status: str = "completed") -> list[dict[str, Any]]:
        """Return the stream's events for the end of the item that is open."""
        if not self._open:
            return []
        kind = self._open
        self._open = ""
        item = self.items[-1]
        item["status"] = status
        place = {"item_id": item["id"], "output_index": len(self.items) - 1}
        if kind == "function_call":
            names = {"name": item["name"], "arguments": item["arguments"]}
            events = [{"type": "response.function_call_arguments.done", **place, **names}]
        elif kind == _CUSTOM:
            item["input"] = custom_input(self._input)
            events = [self._delta("response.custom_tool_call_input.delta", item["input"])]
            events.append({"type": "response.custom_tool_call_input.done", **place, "input": item["input"]})
        else:
            part = item["content"][0]
            text = {"content_index": 0, "text": part["text"]}
            done = {"type": "response.reasoning_text.done", **place, **text}
            if kind == "message":
                logprobs = event_logprobs(part["logprobs"])
                done = {"type": "response.output_text.done", **place, **text, "logprobs": logprobs}
            events = [done, self._part("response.content_part.done")]
        return [*events, self._item("response.output_item.done")]

    def _delta(self, kind: str, text: str, **more: Any) -> dict[str, Any]:
        place = {"item_id": self.items[-1]["id"], "output_index": len(self.items) - 1}
        return {"type": kind, **place, "delta": text, **more}

    def _part(self, kind: str) -> dict[str, Any]:
        item = self.items[-1]
        place = {"item_id": item["id"], "output_index": len(self.items) - 1, "content_index": 0}
        return {"type": kind, **place, "part": _copy(item["content"][0])}

    def _item(self, kind: str) -> dict[str, Any]:
        item = self.items[-1]
        return {"type": kind, "output_index": len(self.items) - 1, "item": _copy(item)}


def _copy(value: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy that has lists of its own."""
    return {name: list(item) if isinstance(item, list) else item for name, item in value.items()}


def _ident(prefix: str) -> str:
    return f"{prefix}_{secrets.token_hex(24)}"


class _Response:
    """One response object while it is generated."""

    def __init__(self, request: OpenAIRequest, prepared: Sequence[PreparedRequest], created: int) -> None:
        self._settings: ResponseSettings = request.settings
        self._prepared = prepared
        self._created = created
        self._parser: DialectParser | None = prepared[0].parser()
        self._events: list[Event] = []
        self._items = _Items(self._settings.tools)
        self._aligner = LogprobAligner(self._parser) if self._settings.logprobs else None
        self._writer = LogprobWriter(prepared[0].text_model.tokenizer)

    def add_delta(self, delta: TextDelta) -> list[dict[str, Any]]:
        """Add text; return the stream's events for it."""
        finish = delta.finish_reason
        events = []
        if self._aligner is None:
            parsed = parse_delta(self._parser, delta)
            self._events += parsed
            for event in parsed:
                events += self._items.add_event(event)
        else:
            for event, tokens in self._aligner.parse_delta(delta):
                self._events.append(event)
                events += self._items.add_event(event, self._writer.chat(tokens))
        if finish is not None:
            events += self._items.close("incomplete" if finish == FinishReason.LENGTH else "completed")
        return events

    def body(self, status: str, tokens: int | None = None, cached: int = 0) -> dict[str, Any]:
        """Return the response object.

        Args:
            status: Status of the response.
            tokens: Number of generated tokens; ``None`` while it is incomplete.
            cached: Number of cached prompt tokens.
        """
        usage = None
        if tokens is not None:
            counts = usage_object(self._prepared, tokens, cached)
            thoughts = "".join(event.text for event in self._events if isinstance(event, Reasoning))
            reasoning = reasoning_tokens(self._prepared[0], thoughts)
            usage = {
                "input_tokens": counts["prompt_tokens"],
                "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
                "output_tokens": tokens,
                "output_tokens_details": {"reasoning_tokens": min(reasoning, tokens)},
                "total_tokens": counts["total_tokens"],
            }
        return {
            "id": self._settings.ident,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "model": self._prepared[0].info.name,
            "output": list(self._items.items),
            **self._settings.echo,
            "usage": usage,
        }

    def store(self, body: dict[str, Any]) -> None:
        """Store the conversation and the response object."""
        message = message_of(self._events, reasoning=True)
        stored = {name: item for name, item in message.items() if item is not None and name != "reasoning"}
        self._settings.store_response(stored, body)


class WholeResponse(WholeAnswer):
    """The formatter of responses in one piece."""

    __slots__ = ("_body", "_response")

    def __init__(self, request: OpenAIRequest, prepared: Sequence[PreparedRequest], ident: str, created: int) -> None:
        super().__init__(request, prepared, ident, created)
        self._response = _Response(request, prepared, created)
        self._body: dict[str, Any] = {}

    def end(self) -> bytes:
        data = super().end()
        self._response.store(self._body)
        return data

    def _encode(self) -> bytes:
        choice = self._choices[0][0]
        delta = choice.whole()
        delta.logprobs, delta.offsets = choice.logprobs, choice.offsets
        self._response.add_delta(delta)
        status = "incomplete" if choice.finish_reason == FinishReason.LENGTH else "completed"
        self._body = self._response.body(status, len(choice.ids), sum(self._cached))
        return orjson.dumps(self._body)


class ResponseEvents(EventStream):
    """The formatter of streamed responses: each event has a change, the last one the whole response."""

    def __init__(self, request: OpenAIRequest, prepared: Sequence[PreparedRequest], ident: str, created: int) -> None:
        super().__init__(request, prepared, ident, created)
        self._is_plain = False  # a token has events of other forms
        self._response = _Response(request, prepared, created)
        self._number = 0
        self._status = "completed"

    def add(self, chunk: TextChunk) -> bytes:
        events = []
        if chunk.trace is not None:
            self._cached[0] = chunk.cached_tokens
        if not self._begun[0]:
            self._begun[0] = True
            body = self._response.body("in_progress")
            events = [{"type": f"response.{kind}", "response": body} for kind in ("created", "in_progress")]
        for delta in chunk.deltas:
            self._tokens += len(delta.token_ids)
            if delta.finish_reason == FinishReason.LENGTH:
                self._status = "incomplete"
            events += self._response.add_delta(delta)
        return self._written(events)

    def end(self) -> bytes:
        body = self._response.body(self._status, self._tokens, sum(self._cached))
        self._response.store(body)
        return self._written([{"type": f"response.{self._status}", "response": body}])

    def error(self, error: BatonError) -> bytes:
        shown = baton_error_object(error)["error"]
        return self._written([{"type": "error", **{name: shown[name] for name in ("code", "message", "param")}}])

    def _written(self, events: list[dict[str, Any]]) -> bytes:
        numbered = [{**event, "sequence_number": self._number + at} for at, event in enumerate(events)]
        self._number += len(numbered)
        return named_events(numbered)
