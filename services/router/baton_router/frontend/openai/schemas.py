"""Bodies of requests. Types are strict: ``"5"`` is no number. Ranges are checked where the values are used.

Every field falls into one of four classes. *Supported* ones are in the schemas. *Harmless* ones have no effect on the
answer by their definition. *Refused* ones would change the answer and cannot be done: only values that mean "as if
absent" pass. Anything else is *ignored* and named in the ``x-baton-ignored-fields`` header, or refused where the router
is told to be strict.
"""

from __future__ import annotations

import functools
import math
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, ClassVar, NamedTuple, TypeAlias, TypeVar

import msgspec

from baton.dialects.tool_use import MAX_TOOLS
from baton.errors import InvalidRequestError, shown
from baton.types import MAX_LOGPROBS, RANGES
from baton_router.frontend.http.middleware import plain_name
from baton_router.processor.text_request import MAX_MESSAGES, MAX_STOP_STRINGS, ROLES

B = TypeVar("B", bound="Body")
_MAX_NAME = 100
MAX_ENTRIES = 1024
"""Fields of a body, and of each object in it."""
MAX_BUDGET = 2**30
_MISSING = re.compile(r"^Object missing required field `(\w+)`$")
_PLACE = re.compile(r"^(.*) - at `(?:key` in `)?\$\.?([^`]*)`$", re.DOTALL)
"""Message and place of msgspec's errors: ``Expected `int`, got `str` - at `$.stop_token_ids[1]` ``."""


def object_schema(required: Mapping[str, Any], **optional: Any) -> dict[str, Any]:
    """Return the schema of an object with these properties."""
    schema: dict[str, Any] = {"type": "object", "properties": {**required, **optional}}
    if required:
        schema["required"] = [*required]
    return schema


def array_schema(items: Mapping[str, Any], **bounds: int) -> dict[str, Any]:
    """Return the schema of an array, with ``minItems`` and ``maxItems`` if they are given."""
    return {"type": "array", "items": items, **bounds}


def or_null(schema: Mapping[str, Any]) -> dict[str, Any]:
    return {"anyOf": [schema, {"type": "null"}]}


STRING = {"type": "string"}
STRING_OR_NULL = {"type": ["string", "null"]}
BOOL_OR_NULL = {"type": ["boolean", "null"]}
_FILLED_STRING = {"type": "string", "minLength": 1}
_TOKEN_IDS = array_schema({"type": "integer", "minimum": 0}, minItems=1)
_PROMPT = {
    "description": "A text, several texts, token ids, or several prompts of token ids.",
    "anyOf": [STRING, array_schema(STRING, minItems=1), _TOKEN_IDS, array_schema(_TOKEN_IDS, minItems=1)],
}
_STOP = {
    "description": "Ends a sequence; is not part of its text.",
    "anyOf": [_FILLED_STRING, array_schema(_FILLED_STRING, maxItems=MAX_STOP_STRINGS), {"type": "null"}],
}
_PART = object_schema({"type": {"const": "text"}, "text": STRING})
_TOOL_CALL = object_schema(
    {"function": object_schema({"name": STRING}, arguments={"description": "An object, or its JSON."})},
    id=STRING_OR_NULL,
    type=STRING_OR_NULL,
)
_MESSAGE = {
    **object_schema(
        {"role": {"enum": [*ROLES]}},
        content={"anyOf": [STRING, array_schema(_PART), {"type": "null"}]},
        name=STRING_OR_NULL,
        tool_calls=or_null(array_schema(_TOOL_CALL)),
        tool_call_id=STRING_OR_NULL,
        reasoning=STRING_OR_NULL,
        reasoning_content=STRING_OR_NULL,
    ),
    "anyOf": [
        {"properties": {"content": {"type": ["string", "array"]}}, "required": ["content"]},
        {
            "properties": {"role": {"const": "assistant"}, "tool_calls": {"type": "array", "minItems": 1}},
            "required": ["tool_calls"],
        },
    ],
}
_SCHEMA = {"description": "A JSON schema, or its text.", "type": ["object", "string", "null"]}
_RESPONSE_FORMAT = {
    "description": "What the answer must be, as in OpenAI's interface.",
    "type": ["object", "null"],
    "properties": {
        "type": {"enum": ["text", "json_object", "json_schema", "structural_tag"]},
        "json_schema": {
            "type": ["object", "null"],
            "properties": {
                "name": STRING,
                "description": STRING,
                "schema": {"type": "object"},
                "strict": BOOL_OR_NULL,
            },
        },
    },
}
_STRUCTURED_OUTPUTS = {
    "description": "What the answer must be: exactly one of the first six.",
    "type": ["object", "null"],
    "properties": {
        "json": {"type": ["object", "string"]},
        "regex": STRING,
        "choice": array_schema(_FILLED_STRING, minItems=1),
        "grammar": STRING,
        "json_object": {"type": "boolean"},
        "structural_tag": {"type": ["object", "string"]},
        "whitespace_pattern": STRING_OR_NULL,
        "disable_any_whitespace": {"type": "boolean"},
    },
}
TOOL_NAME = {"type": "string", "pattern": "^[A-Za-z0-9_.-]{1,64}$"}
_FUNCTION = object_schema(
    {"name": TOOL_NAME},
    description=STRING_OR_NULL,
    parameters={"description": "A JSON schema of an object.", "type": ["object", "null"]},
    strict=BOOL_OR_NULL,
)
_TOOLS = {
    "description": "What the model may call.",
    **or_null(array_schema(object_schema({"function": _FUNCTION}, type={"const": "function"}), maxItems=MAX_TOOLS)),
}
_TOOL_CHOICE = {
    "description": "Whether a tool may or must be called, or which.",
    "anyOf": [
        {"enum": ["none", "auto", "required", None]},
        object_schema({"type": {"enum": ["function", "allowed_tools"]}}),
    ],
}
MESSAGES_TEXT = "The conversation; the model's chat template makes the prompt of it."
_MESSAGES = {"description": MESSAGES_TEXT, **array_schema(_MESSAGE, minItems=1, maxItems=MAX_MESSAGES)}


# Checked by hand, so that errors say where: for the parser these are anything, for documents what they are.
_Prompt: TypeAlias = Annotated[Any, msgspec.Meta(extra_json_schema=_PROMPT)]
_Stop: TypeAlias = Annotated[Any, msgspec.Meta(extra_json_schema=_STOP)]
_Messages: TypeAlias = Annotated[Any, msgspec.Meta(extra_json_schema=_MESSAGES)]
_Tools: TypeAlias = Annotated[Any, msgspec.Meta(extra_json_schema=_TOOLS)]
_ToolChoice: TypeAlias = Annotated[Any, msgspec.Meta(extra_json_schema=_TOOL_CHOICE)]
_MessagesOrNull: TypeAlias = Annotated[Any, msgspec.Meta(extra_json_schema=or_null(_MESSAGES))]


_Schema: TypeAlias = Annotated[Any, msgspec.Meta(extra_json_schema=_SCHEMA)]
_ResponseFormat: TypeAlias = Annotated[Any, msgspec.Meta(extra_json_schema=_RESPONSE_FORMAT)]
_StructuredOutputs: TypeAlias = Annotated[Any, msgspec.Meta(extra_json_schema=_STRUCTURED_OUTPUTS)]


HARMLESS = frozenset(
    {
        "safety_identifier",
        "metadata",  # labels for stored answers
    }
)

ONLY_DEFAULT: Mapping[str, tuple[Any, ...]] = {
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "web_search_options": (),
    "moderation": (),
    "suffix": ("",),
    "use_beam_search": (False,),
    "length_penalty": (1.0,),
    "bad_words": ([],),
    "allowed_token_ids": (),
    "logits_processors": ([],),
    "truncate_prompt_tokens": (),
    "documents": ([],),
    "chat_template": (),
    "typical_p": (1.0,),
    "mirostat": (0,),
}
"""Fields that cannot be done yet, and the values (beside null) that ask for nothing."""

_SILENT_DEFAULTS: Mapping[str, tuple[Any, ...]] = {
    "store": (False,),
    "service_tier": ("auto", "default"),
    "verbosity": ("medium",),
    "spaces_between_special_tokens": (True,),
}
"""Fields that are ignored, but need no naming with these values (or null): they get what they ask for."""


class Outside(NamedTuple):
    """Fields of bodies that are not in their schemas.

    Attributes:
        harmless: Have no effect by their definition.
        refused: Cannot be done, with the values beside null that ask for nothing.
        silent: Have no effect, with the values beside null that need no naming.
    """

    harmless: frozenset[str] = frozenset()
    refused: Mapping[str, tuple[Any, ...]] = {}
    silent: Mapping[str, tuple[Any, ...]] = {}


_OUTSIDE = Outside(HARMLESS, ONLY_DEFAULT, _SILENT_DEFAULTS)


class Body(msgspec.Struct, kw_only=True):
    """A JSON object; ``None`` is the default of what is not required. See :func:`unknown_fields` for all else."""

    outside: ClassVar[Outside] = Outside()
    described: ClassVar[Mapping[str, Any]] = {}
    """JSON schemas of fields that documents tell more of than their types do."""


class StreamOptions(Body):
    """What a stream shall bring beside its text."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class AgentHints(Body):
    """What the sender of a request knows of it: ``nvext.agent_hints``, with the names that Dynamo has for them.

    Attributes:
        priority: Higher runs first.
        strict_priority: Higher runs first, whatever the ``priority``.
        latency_sensitivity: Earlier name of ``priority``.
        osl: Tokens of output that are expected.
        speculative_prefill: Compute what the next turn begins with after the answer.
    """

    priority: int | None = None
    strict_priority: Annotated[int, msgspec.Meta(ge=0)] | None = None
    latency_sensitivity: float | None = None
    osl: Annotated[int, msgspec.Meta(ge=1)] | None = None
    speculative_prefill: bool | None = None


class Extensions(Body):
    """``nvext``: NVIDIA's extensions to OpenAI's interface."""

    agent_hints: AgentHints | None = None


EXTENSIONS_SCHEMA = or_null({"$ref": "#/components/schemas/Extensions"})
"""``nvext`` in a body that passes it on to a chat request."""


class GenerationBody(Body):
    """What chat and plain completions have in common.

    Fields that are called as those of :class:`~baton.types.SamplingParams` become those (see ``openai_request``).
    """

    outside: ClassVar[Outside] = _OUTSIDE

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = None
    max_tokens: int | None = None
    seed: int | None = None
    stop: _Stop = None
    temperature: float | None = None
    top_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    # What OpenAI's interface doesn't have; spelled as other servers do.
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    add_special_tokens: bool | None = None
    allow_special_tokens: bool | None = None
    prompt_logprobs: int | None = None
    speculative_tokens: int | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    cache_salt: str | None = None
    session_id: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    priority: int | None = None
    nvext: Extensions | None = None
    ttft_ms: float | None = None
    itl_ms: float | None = None
    user: str | None = None
    request_id: str | None = None
    best_of: int | None = None
    echo: bool | None = None
    # What the answer must be: one of them.
    response_format: _ResponseFormat = None
    structured_outputs: _StructuredOutputs = None
    guided_json: _Schema = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    guided_whitespace_pattern: str | None = None


class CompletionBody(GenerationBody, kw_only=True):
    """``POST /v1/completions``."""

    prompt: _Prompt
    logprobs: int | None = None


class ChatBody(GenerationBody, kw_only=True):
    """``POST /v1/chat/completions``."""

    messages: _Messages
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    include_reasoning: bool | None = None
    thinking_token_budget: int | None = None
    tools: _Tools = None
    tool_choice: _ToolChoice = None
    parallel_tool_calls: bool | None = None


class TokenizeBody(Body):
    """``POST /tokenize``: a prompt or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: _MessagesOrNull = None
    tools: _Tools = None
    add_special_tokens: bool | None = None
    allow_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(Body, kw_only=True):
    """``POST /detokenize``."""

    model: str | None = None
    tokens: list[int]
    skip_special_tokens: bool | None = None


def invalid_field(field: str, problem: str) -> InvalidRequestError:
    """Return the error for a field; its message begins with the field's name."""
    return InvalidRequestError(f"{field} {problem}", field=field)


_MAX_METADATA = 16
_MAX_KEY_CHARS = 64
_MAX_VALUE_CHARS = 512
METADATA_SCHEMA = or_null(
    {
        "type": "object",
        "maxProperties": _MAX_METADATA,
        "propertyNames": {"maxLength": _MAX_KEY_CHARS},
        "additionalProperties": {**STRING, "maxLength": _MAX_VALUE_CHARS},
    }
)
"""Labels of what is kept, as many and as long as OpenAI takes."""


def check_metadata(metadata: Mapping[str, str] | None) -> None:
    """Check labels of what is kept.

    Raises:
        InvalidRequestError: There are too many, or one is too long.
    """
    if metadata is None:
        return
    if len(metadata) > _MAX_METADATA:
        raise invalid_field("metadata", f"must have at most {_MAX_METADATA} entries, got {len(metadata)}")
    for name, value in metadata.items():
        if len(name) > _MAX_KEY_CHARS or len(value) > _MAX_VALUE_CHARS:
            bounds = f"names of at most {_MAX_KEY_CHARS} and values of at most {_MAX_VALUE_CHARS} characters"
            raise invalid_field("metadata", f"must have {bounds}: {shown(name)}")


def parse_body(cls: type[B], value: Any) -> B:
    """Check a decoded JSON value against a schema.

    Raises:
        InvalidRequestError: Not an object, too many fields, or a field of the wrong type; names the field.
    """
    if not isinstance(value, dict):
        raise InvalidRequestError("the body must be a JSON object")
    _check_sizes(value)
    try:
        return msgspec.convert(value, cls)
    except msgspec.ValidationError as error:
        located = _PLACE.match(str(error))
        message, place = located.groups() if located is not None else (str(error), "")
        field = place.replace("[...]", "")[:_MAX_NAME]
        if missing := _MISSING.match(message):
            field = ".".join(filter(None, (field, missing[1])))
            raise InvalidRequestError(f"{field} is required", field=field) from error
        message = message.replace("`", "").replace(" | null", "")
        raise InvalidRequestError(f"{field}: {message[:1].lower()}{message[1:]}", field=field) from error


def unknown_fields(cls: type[Body], value: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a JSON object that are not in its schema."""
    known = _field_names(cls)
    return {name: item for name, item in value.items() if name not in known}


@functools.cache
def _field_names(cls: type[Body]) -> frozenset[str]:
    return frozenset(cls.__struct_fields__)


def ignored_fields(extra: Mapping[str, Any], outside: Outside = _OUTSIDE) -> list[str]:
    """Return the fields outside a request's schema that have no effect, but may be meant to have one.

    Args:
        extra: Fields outside the schema, with their values.
        outside: Fields outside the schema that are known.

    Raises:
        InvalidRequestError: A field asks for something that is not supported; names it.
    """
    ignored = []
    for name, value in extra.items():
        if name in outside.harmless:
            continue
        if name in outside.refused:
            if value is not None and not _is_one_of(value, outside.refused[name]):
                raise InvalidRequestError(f"{name} is not supported yet; leave it out", field=name)
            continue
        if name in outside.silent and (value is None or _is_one_of(value, outside.silent[name])):
            continue
        ignored.append(name)
    return ignored


def _is_one_of(value: Any, allowed: tuple[Any, ...]) -> bool:
    """Return whether JSON has a value among others: there ``0`` is not ``false``."""
    return any(value == item and isinstance(value, bool) is isinstance(item, bool) for item in allowed)


def check_strict(ignored: Iterable[str], strict: bool) -> None:
    """Refuse ignored fields where the router is strict.

    Raises:
        InvalidRequestError: Names the first one.
    """
    if strict:
        for name in ignored:
            raise InvalidRequestError(f"{name[:100]} is not a field that this server knows", field=name[:100])


def header_value(ignored: Iterable[str]) -> str:
    """Return field names as a header's value: bounded, and nothing in it that doesn't belong into a header."""
    names = []
    room = 1000
    for name in ignored:
        clean = plain_name(name)
        room -= len(clean) + 2
        if room < 0:
            names.append("...")
            break
        names.append(clean)
    return ", ".join(names)


def json_schemas(classes: Sequence[type[msgspec.Struct]]) -> dict[str, Any]:
    """Return the schemas of bodies and answers by their names, as OpenAPI's ``components`` have them.

    Bodies that generate have the ranges of sampling parameters in them, and the fields that are only taken with values
    that ask for nothing.
    """
    _, components = msgspec.json.schema_components(classes, ref_template="#/components/schemas/{name}")
    for cls in classes:
        if issubclass(cls, Body):
            properties = components[cls.__name__]["properties"]
            properties.update(cls.described)
            for name, low, high, _ in RANGES:
                _set_range(properties.get(name, {}), low, high)
            for name, low, high in _MORE_RANGES:
                _set_range(properties.get(name, {}), low, high)
            for name, values in cls.outside.refused.items():
                properties[name] = {
                    "enum": [None, *values],
                    "description": "Not supported yet: other values are refused.",
                }
            for name in (*cls.outside.harmless, *cls.outside.silent):
                properties[name] = {"description": "Has no effect."}
    return components


_MORE_RANGES = (
    ("max_tokens", 0, math.inf),  # with echo
    ("max_completion_tokens", 1, math.inf),
    ("max_output_tokens", 1, math.inf),
    ("thinking_token_budget", 0, MAX_BUDGET),
    ("top_logprobs", 0, MAX_LOGPROBS),
)


def _set_range(schema: dict[str, Any], low: float, high: float) -> None:
    for kind in schema.get("anyOf", ()):
        if kind.get("type") in ("integer", "number"):
            whole = kind["type"] == "integer"
            if 0 < low < sys.float_info.min:
                kind["exclusiveMinimum"] = 0
            else:
                kind["minimum"] = int(low) if whole else low
            if high != math.inf:
                kind["maximum"] = int(high) if whole else high


def _check_sizes(value: dict[str, Any]) -> None:
    """Refuse absurdly large objects before they are looked at piece by piece, while all other requests wait."""
    if len(value) > MAX_ENTRIES:
        raise InvalidRequestError(f"the body must have at most {MAX_ENTRIES} fields, got {len(value)}")
    for name, item in value.items():
        if isinstance(item, dict) and len(item) > MAX_ENTRIES:
            name = name[:_MAX_NAME]
            raise InvalidRequestError(f"{name} must be at most {MAX_ENTRIES} entries, got {len(item)}", field=name)
