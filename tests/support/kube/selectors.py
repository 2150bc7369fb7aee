"""Label and field selectors of lists and watches."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from tests.support.kube.kinds import Json
from tests.support.kube.store import ApiError, Selector

_SET = re.compile(r"([^\s,!=]+)\s+(in|notin)\s+\(([^)]*)\)")


def selector(query: Mapping[str, str]) -> Selector:
    """Return whether an object is selected by ``labelSelector`` and ``fieldSelector``.

    Raises:
        ApiError: One of them has a form that is not known here (400).
    """
    labels = _requirements(query.get("labelSelector", ""))
    fields = _requirements(query.get("fieldSelector", ""))

    def selects(body: Json) -> bool:
        own = body["metadata"].get("labels") or {}
        return all(_fits(own.get(name), how, values) for name, how, values in labels) and all(
            _fits(_field(body, name), how, values) for name, how, values in fields
        )

    return selects


def _requirements(text: str) -> list[tuple[str, str, set[str]]]:
    found = [(name, how, {each.strip() for each in values.split(",")}) for name, how, values in _SET.findall(text)]
    for term in filter(None, (each.strip() for each in _SET.sub("", text).split(","))):
        match = re.fullmatch(r"([^!=\s]+)\s*(==|=|!=)\s*(\S*)", term)
        if match:
            found.append((match[1], "notin" if match[2] == "!=" else "in", {match[3]}))
        elif re.fullmatch(r"!?[^!=\s]+", term):
            found.append((term.removeprefix("!"), "gone" if term.startswith("!") else "there", set()))
        else:
            raise ApiError(400, "BadRequest", f"unable to parse requirement: {term}")
    return found


def _fits(value: Any, how: str, values: set[str]) -> bool:
    if how in ("there", "gone"):
        return (value is not None) is (how == "there")
    return ((value or "") in values) is (how == "in")


def _field(body: Json, path: str) -> str:
    node: Any = body
    for name in path.split("."):
        node = node.get(name) if isinstance(node, dict) else None
    return "" if node is None else str(node)
