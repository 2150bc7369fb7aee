"""``structured_outputs`` and ``response_format`` of ``generate``: over the wire, and the answer's text as an object."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from baton.api.v1 import router_pb2
from baton.errors import InvalidRequestError, shown
from baton.grammar import StructuredOutputs

AnswerParser: TypeAlias = Callable[[str], Any]


def read_structured(options: Mapping[str, Any]) -> tuple[StructuredOutputs | None, AnswerParser | None]:
    """Return what the answer must be, and what makes an object of its text; ``None``: anything, nothing.

    Raises:
        InvalidRequestError: The options contradict each other or are wrong; names the field.
    """
    names = [name for name in ("structured_outputs", "response_format", "grammar") if options.get(name) is not None]
    if len(names) > 1:
        message = f"{names[0]} and {names[1]} contradict each other: give one of them"
        raise InvalidRequestError(message, field=names[1])
    asked = options.get("structured_outputs")
    if asked is None:
        return _of_format(options.get("response_format"))
    if not isinstance(asked, StructuredOutputs):
        asked = StructuredOutputs.from_mapping(asked)
    return asked, _json_parser(asked)


def _of_format(value: Any) -> tuple[StructuredOutputs | None, AnswerParser | None]:
    if value is None:
        return None, None
    schema, parse = getattr(value, "model_json_schema", None), getattr(value, "model_validate_json", None)
    if callable(schema) and callable(parse):
        return StructuredOutputs(json=schema(), field="response_format"), parse
    asked = StructuredOutputs.from_response_format(value)
    return asked, _json_parser(asked)


def _json_parser(asked: StructuredOutputs | None) -> AnswerParser | None:
    return json.loads if asked is not None and asked.kind in ("json", "json_object") else None


def structured_to_pb(asked: StructuredOutputs) -> router_pb2.StructuredOutputs:
    """Return what the answer must be as it goes over the wire.

    Raises:
        InvalidRequestError: A value is of the wrong type; names the field.
    """
    kind = asked.kind
    value = getattr(asked, kind)
    if kind in ("json", "structural_tag") and not isinstance(value, str):
        try:
            value = json.dumps(value, allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise InvalidRequestError(f"{asked.field}.{kind} is no JSON: {error}", field=asked.field) from error
    message = router_pb2.StructuredOutputs(
        whitespace_pattern=asked.whitespace_pattern or "", disable_any_whitespace=asked.disable_any_whitespace
    )
    try:
        if kind == "choice":
            message.choice.texts.extend(value)
        else:
            setattr(message, kind, value)
    except (TypeError, ValueError) as error:
        raise InvalidRequestError(f"{asked.field}.{kind} cannot be {shown(value)}", field=asked.field) from error
    return message
