"""JSON schemas of mixed difficulty, made by a seed, and mutations of them."""

from __future__ import annotations

import copy
import random
from typing import Any

UNSUPPORTED: dict[str, Any] = {
    "not": {"type": "null"},
    "uniqueItems": True,
    "contains": {"type": "integer"},
    "$dynamicRef": "#a",
}
REWRITTEN: dict[str, Any] = {
    "dependentRequired": {"a": ["b"]},
    "propertyNames": {"maxLength": 3},
    "unevaluatedProperties": False,
    "dependentSchemas": {"a": {"required": ["b"]}},
    "minProperties": 2,
    "nullable": True,
}
"""Taken where other keywords can say the same."""
NAMES = ["id", "name", "kind", "tags", "price", "é", "a b", "next", "x-y", "0"]
PATTERNS = ["^[a-z]{2,5}$", "^(ab|cd)+$", r"^\d{3}-\d{2}$", "^[A-F0-9]{4}$", "^x?y*z$"]
FORMATS = ["date", "time", "date-time", "uuid", "ipv4", "email", "duration", "hostname"]
WORDS = ["red", "green", "blue", "naïve", "日本", 'quo"te', "back\\slash", ""]


class Maker:
    """Makes schemas.

    Args:
        seed: Decides which.
    """

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)

    def schema(self) -> dict[str, Any]:
        """Return a schema; about one in seven has a keyword that is not supported."""
        rng = self.rng
        found = self._of(rng.choice([1, 2, 2, 3, 4]))
        if rng.random() < 0.25:  # a recursive one
            node = {
                "type": "object",
                "properties": {"v": self._of(0), "next": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/node"}]}},
                "required": ["v", "next"],
                "additionalProperties": False,
            }
            found = {"type": "array", "items": {"$ref": "#/$defs/node"}, "maxItems": 2, "$defs": {"node": node}}
        if rng.random() < 0.15:
            more = UNSUPPORTED | REWRITTEN
            keyword = rng.choice(sorted(more))
            typed = [part for part in _schemas_in(found) if isinstance(part.get("type"), str)]
            rng.choice(typed or [found])[keyword] = more[keyword]
        if rng.random() < 0.3:
            found = {
                "title": "T",
                "description": "d",
                "$schema": "https://json-schema.org/draft/2020-12/schema",
                **found,
            }
        return found

    def _of(self, depth: int) -> dict[str, Any]:
        simple = [self._string, self._string, self._integer, self._number, self._constant, self._type_only]
        nested = [self._object, self._object, self._array, self._tuple, self._any_of, self._map]
        if depth == 0:
            return self.rng.choice(simple)()
        return self.rng.choice([*nested, *nested, *simple])(depth)  # type: ignore[call-arg]

    def _string(self, depth: int = 0) -> dict[str, Any]:
        rng = self.rng
        match rng.randrange(5):
            case 0:
                return {"type": "string", "pattern": rng.choice(PATTERNS)}
            case 1:
                return {"type": "string", "format": rng.choice(FORMATS)}
            case 2:
                low = rng.randrange(4)
                return {"type": "string", "minLength": low, "maxLength": low + rng.randrange(6)}
            case 3:
                return {"type": "string", "enum": rng.sample(WORDS, 3)}
        return {"type": "string", "maxLength": 10}

    def _integer(self, depth: int = 0) -> dict[str, Any]:
        rng = self.rng
        low = rng.randrange(-1000, 1000)
        found: dict[str, Any] = {"type": "integer", "minimum": low, "maximum": low + rng.randrange(2000)}
        if rng.random() < 0.2:
            found = {"type": "integer", "exclusiveMinimum": low, "exclusiveMaximum": low + 2 + rng.randrange(2000)}
        if rng.random() < 0.2:
            found = {"type": "integer", "minimum": 0, "maximum": 500, "multipleOf": rng.choice([2, 5, 10])}
        return found

    def _number(self, depth: int = 0) -> dict[str, Any]:
        low = self.rng.uniform(-10, 10)
        return {"type": "number", "minimum": round(low, 2), "maximum": round(low + self.rng.uniform(0.5, 20), 2)}

    def _constant(self, depth: int = 0) -> dict[str, Any]:
        values = [None, True, 7, -1.5, "word", [1, "a"], {"k": [None, {}]}]
        if self.rng.random() < 0.5:
            return {"const": self.rng.choice(values)}
        return {"enum": self.rng.sample(values, self.rng.randrange(1, 5))}

    def _type_only(self, depth: int = 0) -> dict[str, Any]:
        return {"type": self.rng.choice(["boolean", "null", ["boolean", "null"], ["integer", "null"]])}

    def _object(self, depth: int) -> dict[str, Any]:
        rng = self.rng
        names = rng.sample(NAMES, rng.randrange(1, 5))
        found: dict[str, Any] = {
            "type": "object",
            "properties": {name: self._of(depth - 1) for name in names},
            "required": [name for name in names if rng.random() < 0.7],
        }
        if rng.random() < 0.8:
            found["additionalProperties"] = False
        elif rng.random() < 0.5:
            found["additionalProperties"] = self._of(0)
        return found

    def _map(self, depth: int) -> dict[str, Any]:
        rng = self.rng
        if rng.random() < 0.5:
            pattern = rng.choice(["^[a-z]{1,3}$", "^p_[0-9]$"])
            return {
                "type": "object",
                "patternProperties": {pattern: self._of(depth - 1)},
                "additionalProperties": False,
            }
        return {"type": "object", "additionalProperties": self._of(depth - 1), "maxProperties": rng.randrange(1, 4)}

    def _array(self, depth: int) -> dict[str, Any]:
        low = self.rng.randrange(3)
        return {
            "type": "array",
            "items": self._of(depth - 1),
            "minItems": low,
            "maxItems": low + self.rng.randrange(3),
        }

    def _tuple(self, depth: int) -> dict[str, Any]:
        parts = [self._of(depth - 1) for _ in range(self.rng.randrange(1, 4))]
        return {"type": "array", "prefixItems": parts, "items": False, "minItems": len(parts)}

    def _any_of(self, depth: int) -> dict[str, Any]:
        rng = self.rng
        match rng.randrange(3):
            case 0:
                tags = ["one", "two", "three"][: rng.randrange(2, 4)]
                return {"oneOf": [self._tagged(tag, depth) for tag in tags]}
            case 1:
                return {"allOf": [self._object(depth), {"type": "object"}]}
        return {"anyOf": [self._of(depth - 1) for _ in range(rng.randrange(2, 4))]}

    def _tagged(self, tag: str, depth: int) -> dict[str, Any]:
        return {
            "type": "object",
            "properties": {"type": {"const": tag}, "value": self._of(depth - 1)},
            "required": ["type", "value"],
            "additionalProperties": False,
        }

    def mutated(self) -> Any:
        """Return a schema with some of its parts broken, moved, multiplied or replaced."""
        rng, found = self.rng, self.schema()
        found = copy.deepcopy(found)
        for _ in range(rng.randrange(1, 5)):
            part = rng.choice(_schemas_in(found))
            keys = list(part)
            match rng.randrange(7):
                case 0 if keys:
                    part.pop(rng.choice(keys))
                case 1 if keys:
                    part[rng.choice(keys)] = self._junk()
                case 2 if keys:
                    part[self._keyword()] = part[rng.choice(keys)]
                case 3:
                    part[self._keyword()] = self._junk()
                case 4:
                    part["properties"] = {"deep": copy.deepcopy(found)}
                case 5:
                    part[rng.choice(["anyOf", "allOf", "oneOf"])] = [
                        copy.deepcopy(part) for _ in range(rng.randrange(4))
                    ]
                case _:
                    part["$ref"] = rng.choice(["#", "#/$defs/node", "#/properties", "#/a~1b", "http://x/y", "", "#x"])
        return self._junk() if rng.random() < 0.01 else found

    def _keyword(self) -> str:
        known = [
            "type",
            "enum",
            "const",
            "required",
            "items",
            "minItems",
            "maxLength",
            "pattern",
            "format",
            "multipleOf",
        ]
        more = ["additionalProperties", "minimum", "maxProperties", "$ref", "$id", "$defs", "prefixItems", "x-guidance"]
        return self.rng.choice([*known, *more, *UNSUPPORTED, *REWRITTEN, "", "\u0000"])

    def _junk(self) -> Any:
        rng = self.rng
        values: list[Any] = [
            None,
            True,
            False,
            0,
            -1,
            1e308,
            2**63,
            10**400,
            0.1,
            "",
            "x",
            "(",
            "[a-z",
            "(?=a)",
            "a{99999}",
        ]
        more = [
            "((a{99}){99}){99}",
            [],
            [[]],
            {},
            {"type": []},
            ["object", "object"],
            {"a": {"a": {}}},
            "\ud800",
            [None],
        ]
        return copy.deepcopy(rng.choice([*values, *more]))


def _schemas_in(value: Any) -> list[dict[str, Any]]:
    """Return all objects in a schema, itself among them if it is one."""
    if isinstance(value, list):
        return [found for item in value for found in _schemas_in(item)]
    if not isinstance(value, dict):
        return []
    return [value, *(found for item in value.values() for found in _schemas_in(item))]
