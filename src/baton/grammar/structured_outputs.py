"""``structured_outputs`` and ``response_format`` as requests have them, and their grammar."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from llguidance import regex_to_lark
from llguidance.gbnf_to_lark import any_to_lark

from baton.errors import InvalidRequestError, shown
from baton.grammar.json_schema import json_rule
from baton.grammar.validation import check_grammar, check_repeats
from baton.types import MAX_GRAMMAR_BYTES, Grammar

MAX_TAGS = 256
MAX_EBNF_LINES = 10_000
_ANY_TEXT = r"/(.|\n)*/"


def json_schema_grammar(
    schema: Any,
    field: str = "json_schema",
    *,
    kind: str = "json_schema",
    whitespace_pattern: str | None = None,
    disable_any_whitespace: bool = False,
) -> Grammar:
    """Return the grammar of the JSON that a schema allows.

    Args:
        schema: The schema, decoded or as JSON.
        field: Name of the request field, for errors.
        kind: Kind of its source, for metrics.
        whitespace_pattern: What may stand between the parts of JSON; default: at most a space.
        disable_any_whitespace: Nothing may.

    Raises:
        InvalidRequestError: The schema is wrong, not supported or too costly; names the place.
    """
    rule = json_rule(
        schema, field, whitespace_pattern=whitespace_pattern, disable_any_whitespace=disable_any_whitespace
    )
    return check_grammar(Grammar(kind, f"start: {rule}"), field)


def json_object_grammar(field: str = "json_object", **whitespace: Any) -> Grammar:
    """Return the grammar of any JSON object; whitespace as :func:`json_schema_grammar` has it.

    Raises:
        InvalidRequestError: The pattern for whitespace is wrong.
    """
    return json_schema_grammar({"type": "object"}, field, kind="json_object", **whitespace)


def regex_grammar(pattern: Any, field: str = "regex") -> Grammar:
    """Return the grammar of all text that a regular expression matches from beginning to end.

    The syntax is that of Rust's ``regex``, without look-around and word boundaries.

    Raises:
        InvalidRequestError: The expression is wrong, not supported or too costly; names ``field``.
    """
    pattern = _text(pattern, field)
    check_repeats(pattern, field)
    return check_grammar(Grammar("regex", f"start: {regex_rule(pattern)}"), field)


def regex_rule(pattern: str) -> str:
    """Return a regular expression as it stands in a Lark grammar; its digits are those of ASCII."""
    return f"/{regex_to_lark(pattern, 'd')}/"


def choice_grammar(choices: Any, field: str = "choice") -> Grammar:
    """Return the grammar of one of several texts.

    Raises:
        InvalidRequestError: These are not one or more texts, each other than the others; names the place.
    """
    if not isinstance(choices, Sequence) or isinstance(choices, str | bytes) or not choices:
        raise InvalidRequestError(f"{field} must be a list of one or more strings", field=field)
    seen = set[str]()
    for at, choice in enumerate(choices):
        place = f"{field}[{at}]"
        if not isinstance(choice, str) or not choice:
            raise InvalidRequestError(f"{place} must be a string that is not empty, got {shown(choice)}", field=place)
        if choice in seen:
            raise InvalidRequestError(f"{place} repeats {shown(choice)}", field=place)
        seen.add(choice)
    _check_size(sum(map(len, choices)), field)
    # One terminal: a choice may begin another one.
    return check_grammar(Grammar("choice", "start: CHOICE\nCHOICE: " + " | ".join(map(lark_string, choices))), field)


def lark_grammar(text: Any, field: str = "grammar", *, kind: str = "grammar") -> Grammar:
    """Return a Lark grammar, in llguidance's dialect, if it can be compiled.

    Args:
        text: The grammar; its first rule is ``start``.
        field: Name of the request field, for errors.
        kind: Kind of its source, for metrics.

    Raises:
        InvalidRequestError: It is wrong or too costly; names ``field`` and line.
    """
    return check_grammar(Grammar(kind, _text(text, field)), field)


def ebnf_or_lark_grammar(text: Any, field: str = "grammar") -> Grammar:
    """Return a grammar in EBNF (GBNF: its rules have ``::=``, the first one is ``root``) or in Lark.

    Raises:
        InvalidRequestError: It is wrong or too costly; names ``field`` and line.
    """
    text = _text(text, field)
    if "::=" in text:
        if text.count("\n") > MAX_EBNF_LINES:  # the converter's time grows with their square
            raise InvalidRequestError(f"{field} must have at most {MAX_EBNF_LINES} lines", field=field)
        try:
            text = any_to_lark(text)
        except RecursionError as error:
            raise InvalidRequestError(f"{field} is nested too deep", field=field) from error
        except Exception as error:  # whatever the converter makes of a text that is no EBNF
            raise InvalidRequestError(f"{field} is no EBNF: {str(error)[:400]}", field=field) from error
    return lark_grammar(text, field)


def structural_tag_grammar(value: Any, field: str = "structural_tag") -> Grammar:
    """Return the grammar of free text with tagged parts in it that follow schemas.

    ``{"structures": [{"begin": "<f=a>", "schema": {...}, "end": "</f>"}], "triggers": ["<f="]}``: after a trigger one
    of the tags that begin with it must follow.

    Args:
        value: Such an object, or its JSON.
        field: Name of the request field, for errors.

    Raises:
        InvalidRequestError: It is wrong, or a schema is; names the place.
    """
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise InvalidRequestError(f"{field} is no JSON: {error}", field=field) from error
    if not isinstance(value, Mapping):
        raise InvalidRequestError(f"{field} must be an object with structures and triggers", field=field)
    for name in value:
        if name not in ("type", "structures", "triggers"):
            raise InvalidRequestError(f"{field}.{name} is not supported", field=f"{field}.{name}"[:200])
    triggers = _texts(value.get("triggers"), f"{field}.triggers")
    bodies: dict[str, list[str]] = {trigger: [] for trigger in triggers}
    structures = value.get("structures")
    if not isinstance(structures, list) or not 1 <= len(structures) <= MAX_TAGS:
        raise InvalidRequestError(f"{field}.structures must be a list of 1 to {MAX_TAGS}", field=f"{field}.structures")
    for at, item in enumerate(structures):
        place = f"{field}.structures[{at}]"
        if not isinstance(item, Mapping) or not {*item} <= {"begin", "schema", "end"}:
            raise InvalidRequestError(f"{place} must be an object with begin, schema and end", field=place)
        begin = _text(item.get("begin"), f"{place}.begin")
        end = item.get("end") or ""
        trigger = next((trigger for trigger in triggers if begin.startswith(trigger)), None)
        if trigger is None:
            raise InvalidRequestError(f"{place}.begin begins with none of the triggers", field=f"{place}.begin")
        if not isinstance(end, str):
            raise InvalidRequestError(f"{place}.end must be a string", field=f"{place}.end")
        rest = begin.removeprefix(trigger)
        schema = item.get("schema")
        rule = json_rule({} if schema is None else schema, f"{place}.schema")
        bodies[trigger].append(" ".join(filter(None, (lark_string(rest), rule, lark_string(end)))))
    return check_grammar(Grammar("structural_tag", _tagged_text(bodies)), field)


def _tagged_text(bodies: Mapping[str, Sequence[str]]) -> str:
    used = {trigger: alternatives for trigger, alternatives in bodies.items() if alternatives}
    lines = [f"start: ({' | '.join(f'tag_{i}' for i in range(len(used)))})* TEXT", f"TEXT: {_ANY_TEXT}"]
    for i, (trigger, alternatives) in enumerate(used.items()):
        lines.append(f"trigger_{i}[lazy]: TEXT {lark_string(trigger)}")
        lines.append(f"tag_{i}: trigger_{i} ({' | '.join(alternatives)})")
    return "\n".join(lines)


def lark_string(text: str) -> str:
    """Return a text as a literal of a Lark grammar; an empty one is nothing."""
    return json.dumps(text, ensure_ascii=False) if text else ""


def _texts(value: Any, field: str) -> list[str]:
    if not isinstance(value, list) or not 1 <= len(value) <= MAX_TAGS:
        raise InvalidRequestError(f"{field} must be a list of 1 to {MAX_TAGS} strings", field=field)
    return [_text(item, f"{field}[{at}]") for at, item in enumerate(value)]


def _text(value: Any, field: str) -> str:
    if not isinstance(value, str) or not value:
        raise InvalidRequestError(f"{field} must be a string that is not empty, got {shown(value)}", field=field)
    _check_size(len(value), field)
    return value


def _check_size(size: int, field: str) -> None:
    if size > MAX_GRAMMAR_BYTES:
        raise InvalidRequestError(f"{field} must have at most {MAX_GRAMMAR_BYTES} bytes", field=field)


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
        field: Name of the request field, for errors.
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
        pattern = self.whitespace_pattern
        place = f"{self.field}.whitespace_pattern"
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
        kind = self.kind
        place = self.place
        match kind:
            case "json" | "json_object":
                return json_schema_grammar(
                    self.json if kind == "json" else {"type": "object"},
                    place,
                    kind="json_schema" if kind == "json" else kind,
                    whitespace_pattern=self.whitespace_pattern,
                    disable_any_whitespace=self.disable_any_whitespace,
                )
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
