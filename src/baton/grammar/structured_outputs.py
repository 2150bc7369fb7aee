"""``structured_outputs`` and ``response_format`` as requests have them, and their grammar."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from baton.errors import InvalidRequestError, shown
from baton.grammar.normal_form import (
    choice_grammar,
    ebnf_or_lark_grammar,
    json_object_grammar,
    json_schema_grammar,
    regex_grammar,
    structural_tag_grammar,
)
from baton.types import Grammar

KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputs:
    """What an answer must be: one of the first six, with vLLM's names.

    Attributes:
        json: A JSON schema, decoded or as JSON.
        regex: A regular expression that matches the whole answer.
        choice: Texts, one of which is the answer.
        grammar: A context-free grammar in EBNF (GBNF) or Lark.
        json_object: Any JSON object.
        structural_tag: Free text with tagged parts that follow schemas.
        whitespace_pattern: What may stand between the parts of JSON; default: at most a space.
        disable_any_whitespace: Nothing may.
        field: What errors call it.
    """

    json: Any = None
    regex: Any = None
    choice: Any = None
    grammar: Any = None
    json_object: bool | None = None
    structural_tag: Any = None
    whitespace_pattern: str | None = None
    disable_any_whitespace: bool = False
    field: str = "structured_outputs"

    def __post_init__(self) -> None:
        given = [name for name in KINDS if getattr(self, name) not in (None, False)]
        if len(given) != 1:
            what = " and ".join(given) if given else "nothing"
            raise InvalidRequestError(
                f"{self.field} must have exactly one of {', '.join(KINDS)}, got {what}", field=self.field
            )
        for name, kind in (("json_object", bool | None), ("disable_any_whitespace", bool)):
            if not isinstance(getattr(self, name), kind):
                raise InvalidRequestError(f"{self.field}.{name} must be true or false", field=f"{self.field}.{name}")
        pattern, place = self.whitespace_pattern, f"{self.field}.whitespace_pattern"
        if not (pattern is None or (isinstance(pattern, str) and 0 < len(pattern) <= 256)):
            raise InvalidRequestError(f"{place} must be a string of 1 to 256 characters", field=place)
        if (pattern or self.disable_any_whitespace) and given[0] not in ("json", "json_object"):
            raise InvalidRequestError(f"{self.field}: only JSON has whitespace to speak of", field=place)
        if pattern and self.disable_any_whitespace:
            raise InvalidRequestError(f"{place} contradicts disable_any_whitespace", field=place)

    @property
    def kind(self) -> str:
        """Which of the kinds it is."""
        return next(name for name in KINDS if getattr(self, name) not in (None, False))

    @property
    def place(self) -> str:
        """The field that errors name."""
        # A caller's own name for the field (guided_json) stands for all of it.
        return f"{self.field}.{self.kind}" if self.field == "structured_outputs" else self.field

    def to_grammar(self) -> Grammar:
        """Return the grammar, checked. Takes a millisecond as a rule, a third of a second at most.

        Raises:
            InvalidRequestError: It is wrong, not supported or too costly; names field and place.
        """
        kind, place = self.kind, self.place
        match kind:
            case "json" | "json_object":
                spaces = {
                    "whitespace_pattern": self.whitespace_pattern,
                    "disable_any_whitespace": self.disable_any_whitespace,
                }
                if kind == "json":
                    return json_schema_grammar(self.json, place, **spaces)  # type: ignore[arg-type]
                return json_object_grammar(place, **spaces)  # type: ignore[arg-type]
            case "regex":
                return regex_grammar(self.regex, place)
            case "choice":
                return choice_grammar(self.choice, place)
            case "grammar":
                return ebnf_or_lark_grammar(self.grammar, place)
        return structural_tag_grammar(self.structural_tag, place)

    @classmethod
    def from_mapping(cls, value: Any, field: str = "structured_outputs") -> StructuredOutputs:
        """Read the object of a request.

        Raises:
            InvalidRequestError: It is none, or a field in it is unknown or wrong; names the place.
        """
        if not isinstance(value, Mapping):
            raise InvalidRequestError(f"{field} must be an object, got {shown(value)}", field=field)
        known = {each.name for each in fields(cls)} - {"field"}
        for name, item in value.items():
            if name not in known and item not in (None, False):
                raise InvalidRequestError(f"{field}.{name} is not supported", field=f"{field}.{name}"[:200])
        given = {name: item for name, item in value.items() if name in known and item is not None}
        return cls(**given, field=field)

    @classmethod
    def from_response_format(cls, value: Any) -> StructuredOutputs | None:
        """Read OpenAI's ``response_format``; ``None``: it asks for nothing.

        Raises:
            InvalidRequestError: It is wrong; names the place.
        """
        field = "response_format"
        if not isinstance(value, Mapping):
            raise InvalidRequestError(f"{field} must be an object, got {shown(value)}", field=field)
        if value.get("json_schema") is not None and value.get("type") != "json_schema":
            message = f"{field}.json_schema needs the type json_schema, got {shown(value.get('type'))}"
            raise InvalidRequestError(message, field=f"{field}.type")
        match value.get("type", "text"):
            case "text":
                return None
            case "json_object":
                return cls(json_object=True, field=field)
            case "structural_tag":
                return cls(structural_tag=value, field=field)
            case "json_schema":
                return cls(json=_schema_of(value.get("json_schema"), f"{field}.json_schema"), field=_SCHEMA_FIELD)
        kinds = "text, json_object, json_schema or structural_tag"
        raise InvalidRequestError(
            f"{field}.type must be {kinds}, got {shown(value.get('type'))}", field=f"{field}.type"
        )


_SCHEMA_FIELD = "response_format.json_schema.schema"


def _schema_of(value: Any, field: str) -> Any:
    if not isinstance(value, Mapping):
        raise InvalidRequestError(f"{field} must be an object with name and schema", field=field)
    for name in value:
        if name not in ("name", "schema", "strict", "description"):
            raise InvalidRequestError(f"{field}.{name} is not supported", field=f"{field}.{name}"[:200])
    for name, kind in (("name", str), ("description", str), ("strict", bool)):
        if not isinstance(value.get(name), kind | None):
            raise InvalidRequestError(f"{field}.{name} must be a {kind.__name__}", field=f"{field}.{name}")
    schema = value.get("schema")
    if not isinstance(schema, Mapping):
        raise InvalidRequestError(f"{field}.schema must be a JSON schema, got {shown(schema)}", field=f"{field}.schema")
    return schema
