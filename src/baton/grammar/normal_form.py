"""From each way to say what an answer must be to the one that instances know: a Lark grammar as llguidance reads it.

Each function checks what it returns, see :func:`~baton.grammar.validation.check_grammar`; the work takes a millisecond
as a rule, and up to a third of a second of CPU time for what is refused as too costly. None needs a tokenizer.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from llguidance import regex_to_lark
from llguidance.gbnf_to_lark import any_to_lark

from baton.errors import InvalidRequestError, shown
from baton.grammar.json_schema import json_rule
from baton.grammar.regex_cost import check_repeats
from baton.grammar.validation import check_grammar
from baton.types import MAX_GRAMMAR_BYTES, Grammar

MAX_TAGS = 256
MAX_EBNF_LINES = 10_000
_ANY_TEXT = r"/(.|\n)*/"


def json_schema_grammar(
    schema: Any,
    field: str = "json_schema",
    *,
    whitespace_pattern: str | None = None,
    disable_any_whitespace: bool = False,
) -> Grammar:
    """Return the grammar of the JSON that a schema allows.

    Args:
        schema: The schema, decoded or as JSON.
        field: What errors call it.
        whitespace_pattern: What may stand between the parts of JSON; default: at most a space.
        disable_any_whitespace: Nothing may.

    Raises:
        InvalidRequestError: The schema is wrong, not supported or too costly; names the place.
    """
    rule = json_rule(
        schema, field, whitespace_pattern=whitespace_pattern, disable_any_whitespace=disable_any_whitespace
    )
    return check_grammar(Grammar("json_schema", f"start: {rule}"), field)


def json_object_grammar(
    field: str = "json_object", *, whitespace_pattern: str | None = None, disable_any_whitespace: bool = False
) -> Grammar:
    """Return the grammar of any JSON object.

    Raises:
        InvalidRequestError: The pattern for whitespace is wrong.
    """
    rule = json_rule(
        {"type": "object"}, field, whitespace_pattern=whitespace_pattern, disable_any_whitespace=disable_any_whitespace
    )
    return check_grammar(Grammar("json_object", f"start: {rule}"), field)


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
        field: What errors call it.
        kind: What it was made of, for metrics.

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
        field: What errors call it.

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
        begin, end = _text(item.get("begin"), f"{place}.begin"), item.get("end") or ""
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
