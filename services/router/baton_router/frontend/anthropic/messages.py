"""The parsers of ``/v1/messages`` and ``/v1/messages/count_tokens``: a request becomes that of a chat."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from baton.errors import InvalidRequestError, shown
from baton.grammar import StructuredOutputs
from baton_router.frontend.anthropic.blocks import chat_messages
from baton_router.frontend.anthropic.schema import CountTokensBody, MessagesBody
from baton_router.frontend.openai.endpoint import FieldNames
from baton_router.frontend.openai.openai_request import OpenAIRequest, parse_chat
from baton_router.frontend.openai.schemas import ignored_fields, parse_body, unknown_fields
from baton_router.processor.text_request import TextRequest
from baton_router.types import Account

NAMES = FieldNames.make(
    (r"(tools\[\d+\])\.function\.parameters", r"\1.input_schema"),
    (r"(tools\[\d+\])\.function", r"\1"),
    (r"tool_choice\.function", "tool_choice"),
    (r"thinking_token_budget", "thinking.budget_tokens"),
    (r"reasoning_effort", "output_config.effort"),
    (r"stop$", "stop_sequences"),
    (r"user$", "metadata.user_id"),
)
"""What fields of chats are called here."""
_PASSED = ("model", "temperature", "top_p", "top_k", "min_p", "seed", "stream", "max_tokens")
_TOOL_KEYS = {"name", "description", "input_schema", "strict", "type"}
_HARMLESS_TOOL_KEYS = {"cache_control", "eager_input_streaming"}
_SWITCHES = ("enable_thinking", "thinking")
"""Variables by which chat templates let a model reason or not."""


def parse_message(value: Any, account: Account | None) -> OpenAIRequest:
    """Return what the body of a request for a message asks for.

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


class TokenCounter:
    """Serves ``/v1/messages/count_tokens``.

    Args:
        count: Returns how many tokens a prompt has.
    """

    def __init__(self, count: Callable[[TextRequest, Account | None], Awaitable[int]]) -> None:
        self._count = count

    async def answer(self, body: CountTokensBody, account: Account | None) -> dict[str, Any]:
        """Return how many tokens a conversation has, with tools and all that the template writes."""
        (request,) = _request(body, {"model": body.model}, [], None).requests
        return {"input_tokens": await self._count(request, account)}


def _request(body: CountTokensBody, more: dict[str, Any], ignored: list[str], most: int | None) -> OpenAIRequest:
    """Return what a body asks for.

    Args:
        body: What all bodies have.
        more: What else the chat's has.
        ignored: Fields without effect.
        most: Tokens that the answer may have.
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
    for name in switches:  # nobody asked for these by name
        del request.template_fields[name]
    if "reasoning_effort" in request.template_fields:
        request.template_fields["reasoning_effort"] = "output_config.effort"
    request.reasoning_fields = ["thinking"] if reasons else []
    request.ignored = ignored
    return request


def _tool(tool: Mapping[str, Any], place: str, ignored: list[str]) -> dict[str, Any]:
    if tool.get("type") not in (None, "custom"):
        message = f"{place}.type must be custom, as Baton has no tools of its own, got {shown(tool['type'])}"
        raise InvalidRequestError(message, field=f"{place}.type")
    schema = tool.get("input_schema")
    if not isinstance(schema, Mapping):
        message = f"{place}.input_schema must be the JSON schema of an object, got {shown(schema)}"
        raise InvalidRequestError(message, field=f"{place}.input_schema")
    function = {"name": tool.get("name"), "parameters": schema}
    function |= {name: tool[name] for name in ("description", "strict") if tool.get(name) is not None}
    unknown = tool.keys() - _TOOL_KEYS - _HARMLESS_TOOL_KEYS
    ignored += [f"{place}.{name}" for name in sorted(unknown) if tool[name] is not None]
    return {"type": "function", "function": function}


def _tool_choice(choice: Mapping[str, Any] | None) -> tuple[Any, bool | None]:
    """Return ``tool_choice`` and ``parallel_tool_calls`` of a chat."""
    if choice is None:
        return None, None
    alone = choice.get("disable_parallel_tool_use")
    if not isinstance(alone, bool | None):
        name = "tool_choice.disable_parallel_tool_use"
        raise InvalidRequestError(f"{name} must be true or false", field=name)
    parallel = None if alone is None else not alone
    match choice.get("type"):
        case "auto" | "none" as kind:
            return kind, parallel
        case "any":
            return "required", parallel
        case "tool":
            return {"type": "function", "function": {"name": choice.get("name")}}, parallel
        case kind:
            name = "tool_choice.type"
            raise InvalidRequestError(f"{name} must be auto, any, tool or none, got {shown(kind)}", field=name)


def _thinking(value: Mapping[str, Any] | None, most: int | None) -> tuple[bool, bool, int | None]:
    """Return whether the model is to reason, whether that is shown, and how many tokens it may have."""
    if value is None:
        return False, False, None
    display = value.get("display")
    if display not in (None, "summarized", "omitted"):
        name = "thinking.display"
        raise InvalidRequestError(f"{name} must be summarized or omitted, got {shown(display)}", field=name)
    match value.get("type"):
        case "disabled":
            return False, False, None
        case "adaptive":
            return True, display != "omitted", None
        case "enabled":
            budget = value.get("budget_tokens")
            name = "thinking.budget_tokens"
            if type(budget) is not int or budget < 1:
                raise InvalidRequestError(f"{name} must be an integer above 0, got {shown(budget)}", field=name)
            if most is not None and budget >= most:
                message = f"{name} must be less than max_tokens, which counts reasoning too: {budget} and {most}"
                raise InvalidRequestError(message, field=name)
            return True, display != "omitted", budget
        case kind:
            name = "thinking.type"
            raise InvalidRequestError(f"{name} must be enabled, adaptive or disabled, got {shown(kind)}", field=name)


def _structured(form: Any) -> StructuredOutputs | None:
    if form is None:
        return None
    place = "output_config.format"
    if not isinstance(form, Mapping) or form.get("type") != "json_schema":
        raise InvalidRequestError(f"{place}.type must be json_schema", field=f"{place}.type")
    if not isinstance(form.get("schema"), Mapping):
        raise InvalidRequestError(f"{place}.schema must be a JSON schema", field=f"{place}.schema")
    return StructuredOutputs(json=form["schema"], field=f"{place}.schema")
