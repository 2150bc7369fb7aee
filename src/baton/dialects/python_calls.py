"""Calls written in Python: ``f(city="Paris", days=[1, 2])``. They are parsed, never run."""

from __future__ import annotations

import ast
import json
import math
import re
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from baton.dialects.source import NotACallError, Reader, Source

_MAX_CHARS = 256 * 1024
_NAME = re.compile(r"[A-Za-z_][\w.]*")
_MARK = re.compile(r"""["'()\[\]{},]""")
_KEYWORD = re.compile(r"\s*([A-Za-z_][\w\-]*)\s*=(?!=)")
_QUOTE = {quote: re.compile(rf"{quote}|\\.?", re.DOTALL) for quote in "'\""}
_NAMES = {"true": True, "false": False, "null": None}


def read_python_call(source: Source, tools: Mapping[str, Any], *, bare: bool) -> Reader[tuple[str, str]]:
    """Read a call; return its name and arguments as JSON.

    Args:
        source: Where it stands.
        tools: Schemas of the parameters by the tools' names; arguments without names take theirs from there.
        bare: Only calls of these are calls.

    Raises:
        NotACallError: It is none.
    """
    name, _ = yield from source.until(("(",), 256)
    if not _NAME.fullmatch(name) or (bare and name not in tools):
        raise NotACallError
    source.at -= 1
    text, marks = yield from _parenthesis(source)
    properties = tools.get(name)
    known = properties.get("properties") if isinstance(properties, Mapping) else None
    return name, _arguments(text, marks, [*known] if isinstance(known, Mapping) else [])


def _parenthesis(source: Source) -> Reader[tuple[str, list[int]]]:
    """Read from a parenthesis to the one that closes it; return that, and the places behind which arguments begin."""
    begin, at, depth, quote, marks = source.at, source.at, 0, "", list[int]()
    while True:
        match = (_QUOTE[quote] if quote else _MARK).search(source.text, at)
        if match is None or match[0] == "\\":
            at = len(source.text) if match is None else match.start()
            if source.ended or at - begin > _MAX_CHARS:
                source.in_vain += min(at - begin, _MAX_CHARS)
                raise NotACallError
            yield
            continue
        at, mark = match.end(), match[0]
        if quote:
            quote = "" if mark == quote else quote
        elif mark in _QUOTE:
            quote = mark
        else:
            depth += 1 if mark in "([{" else 0 if mark == "," else -1
            if depth == 1 and mark in "(,":
                marks.append(at - begin)
            if depth == 0:
                if at - begin > _MAX_CHARS:
                    source.in_vain += _MAX_CHARS
                    raise NotACallError
                source.at = at
                return source.text[begin:at], marks


def _arguments(text: str, marks: Sequence[int], names: Sequence[str]) -> str:
    """Return arguments as JSON.

    Args:
        text: With its parentheses.
        marks: Where arguments begin in it.
        names: Of those that are given without.
    """
    given_names, parts, begin = list[str](), list[str](), 0
    for mark in marks:  # names may be words that Python has for itself, such as "from"
        if found := _KEYWORD.match(text, mark):
            parts += text[begin:mark], f"k{len(given_names)}="
            given_names.append(found[1])
            begin = found.end()
    text = "".join((*parts, text[begin:]))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of escapes that Python does not know
            call = ast.parse(f"f{text}", mode="eval").body
        if not isinstance(call, ast.Call) or len(call.args) > len(names):
            raise NotACallError
        given = dict(zip(names, map(_value, call.args), strict=False))
        for keyword in call.keywords:
            name = "" if keyword.arg is None else given_names[int(keyword.arg[1:])]
            if not name or name in given:
                raise NotACallError
            given[name] = _value(keyword.value)
        return _dumps(given)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise NotACallError from error


def _value(node: ast.expr) -> Any:
    match node:
        case ast.Constant(value=None | bool() | int() | str()):
            return node.value
        case ast.Constant(value=float()) if math.isfinite(node.value):  # type: ignore[arg-type]
            return node.value
        case ast.Name(id=name) if name in _NAMES:
            return _NAMES[name]
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_value(item) for item in items]
        case ast.Dict(keys=keys, values=values):
            return {_key(key): _value(item) for key, item in zip(keys, values, strict=True)}
        case ast.UnaryOp(op=ast.USub() | ast.UAdd() as sign, operand=operand):
            number = _value(operand)
            if type(number) in (int, float):
                return -number if isinstance(sign, ast.USub) else number
    raise NotACallError


def _key(node: ast.expr | None) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    raise NotACallError


def _dumps(value: dict[str, Any]) -> str:
    text = json.dumps(value, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError:
        return json.dumps(value)
    return text
