"""``/v1/messages`` and ``/v1/messages/count_tokens``: their requests become chat requests."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import orjson

from baton.errors import InvalidRequestError, shown
from baton.grammar import StructuredOutputs
from baton_router.frontend.anthropic.conversation import Conversation
from baton_router.frontend.anthropic.schemas import CountTokensBody, MessagesBody
from baton_router.frontend.anthropic.thread import Thread, open_thread
from baton_router.frontend.openai.generation import FieldNames
from baton_router.frontend.openai.openai_request import OpenAIRequest, parse_chat
from baton_router.frontend.openai.response_store import ResponseStore
from baton_router.frontend.openai.schemas import ignored_fields, invalid_field, parse_body, unknown_fields
from baton_router.processor.text_request import TextRequest
from baton_router.types import Account

NAMES = FieldNames.make(
    (r"(tools\[\d+\]|.*\.definition)\.parameters", r"\1.input_schema"),
    (r"tool_choice\.function", "tool_choice"),
    (r"thinking_token_budget", "thinking.budget_tokens"),
    (r"reasoning_effort", "output_config.effort"),
    (r"stop$", "stop_sequences"),
    (r"user$", "metadata.user_id"),
)
"""Names of chat fields in this interface."""
_PASSED = ("model", "temperature", "top_p", "top_k", "min_p", "seed", "stream", "max_tokens", "nvext")
_TOOL_KEYS = {"name", "description", "input_schema", "strict", "type", "defer_loading"}
_HARMLESS_TOOL_KEYS = {"cache_control", "eager_input_streaming"}
_HOSTED = re.compile(r"(web_search|web_fetch|code_execution|tool_search_tool|advisor|mcp_toolset)(_|$)")
"""Types of the tools that Anthropic's servers run."""
_SWITCHES = ("enable_thinking", "thinking")
"""Variables of chat templates that switch reasoning on and off."""


def parse_message(value: Any, account: Account | None, store: ResponseStore) -> OpenAIRequest:
    """Parse the body of a request for a message.

    Args:
        value: The decoded JSON body.
        account: Account of the request; ``None`` without API keys.
        store: Store of threads.

    Raises:
        InvalidRequestError: A field is wrong or asks for what can't be done; names it.
        NotFoundError: The account has no such thread, or not any more.
    """
    body = parse_body(MessagesBody, value)
    ignored = ignored_fields(unknown_fields(MessagesBody, value), MessagesBody.outside)
    more: dict[str, Any] = {name: item for name in _PASSED if (item := getattr(body, name)) is not None}
    more["stop"] = body.stop_sequences
    user = (body.metadata or {}).get("user_id")
    if not isinstance(user, str | None):
        raise InvalidRequestError("metadata.user_id must be a string", field="metadata.user_id")
    more["user"] = user
    more["prompt_cache_key"] = _session_of(user or "")
    if _asks_for_an_hour([value, *_blocks(body)]):
        more["prompt_cache_retention"] = "1h"
    return _request(body, more, ignored, body.max_tokens, open_thread(body, account, store))


def _blocks(body: MessagesBody) -> Iterator[Any]:
    """Iterate over all that may have a ``cache_control``: tools, and blocks of the system prompt and of messages."""
    yield from body.tools or ()
    for content in (body.system, *(message.get("content") for message in body.messages)):
        if isinstance(content, list):
            yield from content


def _asks_for_an_hour(blocks: Iterable[Any]) -> bool:
    """Whether one is to be cached for an hour; five minutes, which agents ask for everywhere, are no wish."""
    controls = (block.get("cache_control") for block in blocks if isinstance(block, dict))
    return any(isinstance(control, dict) and control.get("ttl") == "1h" for control in controls)


def _session_of(user_id: str) -> str:
    """Return the session in a ``metadata.user_id`` of Claude Code's: a JSON object's, or what follows ``_session_``."""
    if user_id.startswith("{"):
        try:
            session = orjson.loads(user_id).get("session_id")
        except orjson.JSONDecodeError:
            return ""
        return session if isinstance(session, str) else ""
    return user_id.rpartition("_session_")[2] if "_session_" in user_id else ""


def count_request(body: CountTokensBody) -> TextRequest:
    """Return a generation whose prompt is the conversation, with its tools and the template's text."""
    (request,) = _request(body, {"model": body.model}, [], None, None).requests
    return request


def _request(
    body: CountTokensBody, more: dict[str, Any], ignored: list[str], most: int | None, thread: Thread | None
) -> OpenAIRequest:
    """Convert a body to a chat request.

    Args:
        body: Fields that both endpoints have.
        more: Other fields of the chat request.
        ignored: Fields without effect; more are appended.
        most: Most tokens of the answer; ``None`` if no answer is generated.
        thread: Thread of the conversation; ``None``: it has none.
    """
    _check_edits(body.context_management)
    conversation = Conversation(body.system if thread is None else thread.system, ignored)
    conversation.read(body.messages, () if thread is None else thread.turns)
    chat = {**more, "messages": conversation.messages()}
    if chat["messages"][-1]["role"] == "assistant":
        chat["continue_final_message"] = True
    tools = body.tools if thread is None else thread.tools
    chat["tools"], places = _functions(tools or [], conversation, ignored)
    chat["tool_choice"], chat["parallel_tool_calls"] = _tool_choice(body.tool_choice)
    reasons, shown_too, budget = _thinking(body.thinking, most)
    variables = body.chat_template_kwargs or {}
    switches = [name for name in _SWITCHES if name not in variables]
    chat["chat_template_kwargs"] = {**variables, **dict.fromkeys(switches, reasons)}
    chat["include_reasoning"] = shown_too
    chat["thinking_token_budget"] = budget
    config = dict(body.output_config or {})
    effort = config.pop("effort", None)
    chat["reasoning_effort"] = effort if conversation.effort is None else conversation.effort
    form = config.pop("format", None)
    place = "output_config.format"
    if form is None and body.output_format is not None:
        form = body.output_format
        place = "output_format"
    ignored += [f"output_config.{name}" for name, item in config.items() if item is not None]
    request = parse_chat(chat, places)
    request.requests[0].structured = _structured(form, place)
    for name in switches:  # the request does not name these
        del request.template_fields[name]
    if "reasoning_effort" in request.template_fields:
        request.template_fields["reasoning_effort"] = "output_config.effort"
    request.reasoning_fields = ["thinking"] if reasons else []
    request.ignored = ignored + request.ignored
    if thread is not None:
        thread.add_turns(body.messages)
        request.ident = thread.ident
        request.settings = thread
    return request


def _check_edits(value: Mapping[str, Any] | None) -> None:
    """Refuse edits of the context other than those that keep all of it."""
    edits = (value or {}).get("edits") or []
    if not isinstance(edits, list):
        raise invalid_field("context_management.edits", f"must be a list, got {shown(edits)}")
    for at, edit in enumerate(edits):
        match edit:
            case {"type": "clear_thinking_20251015", "keep": "all" | {"type": "all"}}:
                pass
            case _:
                place = f"context_management.edits[{at}]"
                raise invalid_field(place, "is not supported: only clear_thinking_20251015 that keeps all is")


def _functions(
    tools: list[dict[str, Any]], conversation: Conversation, ignored: list[str]
) -> tuple[list[dict[str, Any]] | None, list[str]]:
    """Return the tools that the model is offered in the form of chat requests, and their places."""
    given: list[tuple[Mapping[str, Any], str]] = [(tool, f"tools[{at}]") for at, tool in enumerate(tools)]
    functions = []
    places = []
    hosted = []
    for tool, place in given + conversation.added:
        if isinstance(tool.get("type"), str) and _HOSTED.match(tool["type"]):
            hosted.append((place, tool["type"]))
            continue
        function = _tool(tool, place, ignored)
        name = tool.get("name")
        if not isinstance(name, str):
            raise invalid_field(f"{place}.name", f"must be a string, got {shown(name)}")
        if name not in conversation.removed and (not tool.get("defer_loading") or name in conversation.loaded):
            functions.append(function)
            places.append(place)
    if hosted and not functions:
        place, kind = hosted[0]
        raise invalid_field(f"{place}.type", f"is {kind}, which Anthropic's servers run: there are no other tools")
    ignored += [f"{place}.{kind}" for place, kind in hosted]
    return functions or None, places


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
    if display not in (None, "summarized", "updates", "omitted"):
        raise invalid_field("thinking.display", f"must be summarized, updates or omitted, got {shown(display)}")
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


def _structured(form: Any, place: str) -> StructuredOutputs | None:
    if form is None:
        return None
    if not isinstance(form, Mapping) or form.get("type") != "json_schema":
        raise invalid_field(f"{place}.type", "must be json_schema")
    if not isinstance(form.get("schema"), Mapping):
        raise invalid_field(f"{place}.schema", "must be a JSON schema")
    return StructuredOutputs(json=form["schema"], field=f"{place}.schema")
