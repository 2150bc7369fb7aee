"""JSON-Schema-Test-Suite, draft 2020-12: schemas taken, why others are refused, and nothing invalid passes.

``tests/grammars/json_schema_test_suite.jsonl`` has the suite's required tests (commit 44401e0c), a line per schema: its
file there, the schema, valid values, invalid ones. The suite's license lies beside it.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

from tests.unit.grammar.test_normal_form import accepts

from baton.errors import InvalidRequestError
from baton.grammar import json_schema_grammar
from baton.types import Grammar

SUITE = Path(__file__).parents[2] / "grammars" / "json_schema_test_suite.jsonl"
TABLE: dict[str, tuple[int, int, int]] = {
    "additionalProperties": (9, 0, 0),
    "allOf": (10, 2, 2),
    "anchor": (4, 0, 0),
    "anyOf": (7, 1, 0),
    "boolean_schema": (1, 1, 0),
    "const": (17, 0, 5),
    "contains": (0, 7, 0),
    "content": (4, 0, 0),
    "default": (3, 0, 0),
    "defs": (0, 1, 0),
    "dependentRequired": (4, 0, 3),
    "dependentSchemas": (3, 1, 0),
    "dynamicRef": (1, 20, 0),
    "enum": (14, 1, 4),
    "exclusiveMaximum": (1, 0, 0),
    "exclusiveMinimum": (1, 0, 0),
    "format": (19, 0, 13),
    "if-then-else": (4, 8, 0),
    "infinite-loop-detection": (1, 0, 0),
    "items": (10, 0, 0),
    "maxContains": (1, 4, 0),
    "maxItems": (2, 0, 0),
    "maxLength": (2, 0, 0),
    "maxProperties": (3, 0, 0),
    "maximum": (2, 0, 0),
    "minContains": (2, 6, 0),
    "minItems": (2, 0, 0),
    "minLength": (2, 0, 0),
    "minProperties": (2, 0, 0),
    "minimum": (2, 0, 0),
    "multipleOf": (4, 1, 0),
    "not": (2, 7, 0),
    "oneOf": (2, 9, 0),
    "pattern": (3, 0, 0),
    "patternProperties": (3, 3, 0),
    "prefixItems": (4, 0, 0),
    "properties": (6, 0, 0),
    "propertyNames": (5, 1, 0),
    "ref": (33, 3, 0),
    "refRemote": (0, 15, 0),
    "required": (5, 0, 0),
    "type": (11, 0, 1),
    "unevaluatedItems": (13, 16, 1),
    "unevaluatedProperties": (24, 20, 1),
    "uniqueItems": (3, 3, 0),
    "vocabulary": (2, 0, 1),
}
"""By file: schemas taken, schemas refused, and valid values that taken schemas' grammars do not write."""
REFUSED: dict[str, int] = {
    "not a place": 27,
    "contains": 19,
    "if": 15,
    "unevaluatedProperties": 15,
    "$dynamicRef": 11,
    "unevaluatedItems": 10,
    "not": 9,
    "oneOf": 9,
    "Unsatisfiable": 6,
    "regex": 3,
    "uniqueItems": 3,
    "minProperties": 1,
    "multipleOf": 1,
    "propertyNames": 1,
}
"""By what it is refused for: schemas."""


REASONS = ("not a place", "oneOf", "Unsatisfiable", "no text", "regex", "multipleOf")


def reason(error: InvalidRequestError) -> str:
    keyword = (error.field or "").rpartition(".")[2]
    return next((words for words in REASONS if words in error.message), keyword)


def test_no_invalid_value_is_written_and_schemas_are_taken_as_the_table_says() -> None:
    table: dict[str, list[int]] = {}
    refused = Counter[str]()
    passed = list[tuple[Any, ...]]()
    for line in SUITE.read_text().splitlines():
        name, schema, valid, invalid = json.loads(line)
        row = table.setdefault(name, [0, 0, 0])
        try:
            grammar: Grammar = json_schema_grammar({"allOf": [schema]} if isinstance(schema, bool) else schema, "s")
        except InvalidRequestError as error:
            row[1] += 1
            refused[reason(error)] += 1
            continue
        row[0] += 1
        row[2] += sum(not accepts(grammar, text(value)) for value in valid)
        passed += ((name, schema, value) for value in invalid if accepts(grammar, text(value)))
    assert passed == []
    assert {name: tuple(row) for name, row in table.items()} == TABLE
    assert dict(refused) == REFUSED


def text(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
