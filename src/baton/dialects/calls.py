"""Reads sections and the calls in them, in all notations."""

from __future__ import annotations

import ast
import math
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from baton.dialects.events import EventSink
from baton.dialects.source import NotACallError, Reader, Source
from baton.dialects.syntax import CallNotation, JsonCall, NamedCall, Parameters, PythonCall, Section
from baton.dialects.token_anchors import MARK
from baton.dialects.tool_use import json_of_text, json_text, parameter_schemas, schema_types

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
    begin = source.at
    at = source.at
    depth = 0
    quote = ""
    marks = list[int]()
    while True:
        match = (_QUOTE[quote] if quote else _MARK).search(source.text, at)
        if match is None or match[0] == "\\":
            at = len(source.text) if match is None else match.start()
            if source.ended or at - begin > _MAX_CHARS:
                source.num_reread += min(at - begin, _MAX_CHARS)
                raise NotACallError
            yield
            continue
        at = match.end()
        mark = match[0]
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
                    source.num_reread += _MAX_CHARS
                    raise NotACallError
                source.at = at
                return source.text[begin:at], marks


def _arguments(text: str, marks: Sequence[int], names: Sequence[str]) -> str:
    """Return arguments as JSON.

    Args:
        text: With its parentheses.
        marks: Where arguments begin in it.
        names: Parameter names, in order, for arguments given without a name.
    """
    given_names = list[str]()
    parts = list[str]()
    begin = 0
    for mark in marks:  # names may be words that Python has for itself, such as "from"
        if match := _KEYWORD.match(text, mark):
            parts += text[begin:mark], f"k{len(given_names)}="
            given_names.append(match[1])
            begin = match.end()
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
        return json_text(given)
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


_MAX_NAME = 256
_MAX_HELD = 16 * 1024
"""Characters of a call that are held until it is known to be one."""

_STRING_FLAG = re.compile(r'\s*(?:string="(true|false)"\s*)?')


@dataclass(frozen=True, slots=True)
class SectionReader:
    """Reads sections.

    Attributes:
        source: Where they stand.
        sink: Takes the calls.
        schemas: Schemas of parameters, by the names of tools.
    """

    source: Source
    sink: EventSink
    schemas: Mapping[str, Any]

    def read(self, section: Section, *, bare: bool) -> Reader[bool]:
        """Read a section behind its beginning; return whether its end was there.

        Raises:
            NotACallError: There is no call in it.
        """
        source = self.source
        count = 0
        separator = ""
        unanchored = bare and not any(isinstance(call, NamedCall) and call.begin for call in section.calls)
        while True:
            mark = source.mark()
            yield from source.space()
            if count and section.end and (yield from source.literal(section.end)):
                return True
            if count and section.separators and not separator:
                separator = yield from source.literal(section.separators)
                if separator:
                    continue
            if count and not section.many:
                source.seek(mark)
                return False
            calls = self.sink.calls
            try:
                yield from self._call(section, unanchored=unanchored)
            except NotACallError:
                if not count:
                    raise
                if self.sink.calls == calls:
                    source.seek(mark)
                if separator:
                    self.sink.add_text(separator)
                return False
            separator = ""
            count += 1

    def _call(self, section: Section, *, unanchored: bool) -> Reader[None]:
        """Read a call in one of a section's notations, or a list of calls."""
        begun = self.source.mark()
        for notation in section.calls:
            calls = self.sink.calls
            try:
                yield from self._notation(notation, section, unanchored)
            except NotACallError:
                if self.sink.calls > calls:
                    return
                self.source.seek(begun)
            else:
                return
        raise NotACallError

    def _notation(self, notation: CallNotation, section: Section, unanchored: bool) -> Reader[None]:
        match notation:
            case JsonCall():
                anchors = (*section.end, *section.begin)
                if (yield from self.source.literal(("[",))):
                    yield from self._list(lambda: self._json_call(notation, anchors, unanchored))
                else:
                    yield from self._json_call(notation, anchors, unanchored)
            case PythonCall(brackets=True):
                if not (yield from self.source.literal(("[",))):
                    raise NotACallError
                yield from self._list(lambda: self._python_call(unanchored))
            case PythonCall():
                yield from self._python_call(unanchored)
            case NamedCall():
                yield from self._named_call(notation, section)

    def _list(self, read: Callable[[], Reader[None]]) -> Reader[None]:
        """Read calls with commas between them and a bracket behind them."""
        source = self.source
        first = True
        mark = source.mark()
        while True:
            yield from source.space()
            calls = self.sink.calls
            try:
                yield from read()
            except NotACallError:
                if first:
                    raise
                if self.sink.calls == calls:
                    source.seek(mark)
                return
            first = False
            mark = source.mark()
            yield from source.space()
            literal = yield from source.literal((",", "]"))
            if literal != ",":
                if not literal:
                    source.seek(mark)
                return
            yield from source.space()
            if (yield from source.literal(("]",))):
                return

    def _python_call(self, unanchored: bool) -> Reader[None]:
        name, arguments = yield from read_python_call(self.source, self.schemas, bare=unanchored)
        self.sink.start_call(name)
        self.sink.add_arguments(arguments)
        self.sink.end_call()
        self.source.drop()

    def _json_call(self, notation: JsonCall, anchors: tuple[str, ...], unanchored: bool) -> Reader[None]:
        source = self.source
        if not (yield from source.literal(("{",))):
            raise NotACallError
        name: str | None = None
        held: list[str] | None = None
        """Arguments that came before the name."""
        done = False
        while True:
            mark = source.mark()
            yield from source.space()
            if done and (yield from source.literal(("}",))):
                return
            key = yield from self._key(done, mark)
            if key is None:
                return
            if key == "name" and name is None:
                name = _decoded((yield from source.json_string(_MAX_NAME)))
                if not name or (unanchored and name not in self.schemas):
                    raise NotACallError
                if held is not None:
                    self._whole(name, held)
                    done = True
            elif key in notation.arguments and held is None and not done:
                if name is None:
                    held = yield from self._held_value(anchors)
                else:
                    yield from self._value(name, anchors)
                    done = True
            elif key in ("id", "type"):
                yield from source.json_string(_MAX_NAME)
            elif done:
                source.seek(mark)
                return
            else:
                raise NotACallError
            mark = source.mark()
            yield from source.space()
            literal = yield from source.literal((",", "}"))
            if literal == "}" or (done and not literal):
                if literal != "}":
                    source.seek(mark)
                if name is None:
                    raise NotACallError
                if not done:
                    self._whole(name, ["{}"])
                return
            if not literal:
                raise NotACallError

    def _key(self, done: bool, mark: int) -> Reader[str | None]:
        """Read a key and its colon; ``None``: there is none, behind a call that is complete."""
        source = self.source
        try:
            key = _decoded((yield from source.json_string(_MAX_NAME)))
            yield from source.space()
            if not (yield from source.literal((":",))):
                raise NotACallError
        except NotACallError:
            if not done:
                raise
            source.seek(mark)
            return None
        yield from source.space()
        return key

    def _whole(self, name: str, arguments: list[str]) -> None:
        self.sink.start_call(name)
        self.sink.add_arguments("".join(arguments))
        self.sink.end_call()
        self.source.drop()

    def _held_value(self, anchors: tuple[str, ...]) -> Reader[list[str]]:
        """Read arguments before the call's name is known."""
        source = self.source
        held = list[str]()
        if source.text.startswith("{", source.at):
            if not (yield from source.json_value(held.append, drop=False, most=_MAX_HELD, anchors=anchors)):
                raise NotACallError
            return held
        return [(yield from self._other_value())]

    def _value(self, name: str, anchors: tuple[str, ...]) -> Reader[None]:
        """Read arguments and hand them on as they come."""
        source = self.source
        if source.text.startswith("{", source.at):
            self.sink.start_call(name)
            source.drop()
            yield from source.json_value(self.sink.add_arguments, drop=True, anchors=anchors)
            self.sink.end_call()
        else:
            self._whole(name, [(yield from self._other_value())])

    def _other_value(self) -> Reader[str]:
        """Read arguments that are no object: a string with an object's JSON in it, or null."""
        if (yield from self.source.literal(("null",))):
            return "{}"
        text = _decoded((yield from self.source.json_string(_MAX_HELD)))
        if not text.lstrip().startswith("{"):
            raise NotACallError
        return text.encode(errors="replace").decode()

    def _named_call(self, notation: NamedCall, section: Section) -> Reader[None]:
        source = self.source
        if notation.begin and not (yield from source.literal((notation.begin,))):
            raise NotACallError
        text, literal = yield from source.until((*notation.name_end, *notation.name_before), _MAX_NAME)
        if literal in notation.name_before:
            source.at -= len(literal)
        match = re.fullmatch(notation.name, text.strip())
        if match is None:
            raise NotACallError
        groups = match.groupdict()
        name = groups.get("name") or match[0]
        written = groups.get("id")
        yield from source.space()
        if notation.parameters is not None:
            yield from self._parameters(name, written, notation.parameters, notation.end, section.end)
            return
        if source.text.startswith("{", source.at):
            self.sink.start_call(name, written)
            source.drop()
            begin = (notation.begin,) if notation.begin else ()
            anchors = (*notation.end, *begin, *section.end, *section.begin)
            yield from source.json_value(self.sink.add_arguments, drop=True, anchors=anchors)
        elif notation.end:
            if not (yield from source.literal(notation.end)):
                raise NotACallError
            self.sink.start_call(name, written)
            self.sink.add_arguments("{}")
            self.sink.end_call()
            source.drop()
            return
        else:
            raise NotACallError
        self.sink.end_call()
        yield from self._pass_end(notation)

    def _pass_end(self, notation: NamedCall) -> Reader[None]:
        source = self.source
        if not notation.end:
            return
        mark = source.mark()
        yield from source.space()
        if not (yield from source.literal(tuple(end.lstrip() for end in notation.end))):
            source.seek(mark)

    def _parameters(
        self, name: str, written: str | None, tags: Parameters, end: tuple[str, ...], section_end: tuple[str, ...]
    ) -> Reader[None]:
        source = self.source
        first = True
        schema = self.schemas.get(name)
        known = parameter_schemas(schema)
        given = set[str]()
        while True:
            mark = source.mark()
            yield from source.space()
            literal = yield from source.literal((tags.begin, *(end or section_end)))
            if literal != tags.begin:
                if first:
                    if not literal:
                        raise NotACallError
                    self.sink.start_call(name, written)
                    self.sink.add_arguments("{")
                if not literal or not end:  # what ends the section is not the call's
                    source.seek(mark)
                self.sink.add_arguments("}")
                self.sink.end_call()
                source.drop()
                return
            try:
                key, flag = yield from self._parameter_name(tags)
            except NotACallError:
                if first:
                    raise
                source.seek(mark)
                self.sink.add_arguments("}")
                self.sink.end_call()
                return
            given.add(key)
            if first:
                self.sink.start_call(name, written)
            self.sink.add_arguments(("{" if first else ", ") + json_text(key) + ": ")
            source.drop()
            first = False
            types = schema_types(known.get(key), schema)
            if (flag == "true" and ("string" in types or not types)) or (flag is None and not types and known):
                types = frozenset({"string"})
            closers = _Closers(tags, end, section_end, frozenset(known) - given if known else None)
            if not (yield from self._parameter_value(closers, types)):
                self.sink.end_call()
                return

    def _parameter_name(self, tags: Parameters) -> Reader[tuple[str, str | None]]:
        """Read a parameter's name up to its value; return it and whether the tag says that the value is text."""
        source = self.source
        if not tags.string_flag:
            first, *others = tags.name_end.split("\n")
            key, _ = yield from source.until((first,), _MAX_NAME)
            for other in others:
                yield from source.space()
                if not (yield from source.literal((other,))):
                    raise NotACallError
            return key.strip(), None
        key, _ = yield from source.until((tags.name_end,), _MAX_NAME)
        rest, _ = yield from source.until((">",), _MAX_NAME)
        flag = _STRING_FLAG.fullmatch(rest)
        if flag is None:
            raise NotACallError
        return key, flag[1]

    def _parameter_value(self, closers: _Closers, types: frozenset[str]) -> Reader[bool]:
        """Read a value and hand it on, a string as it comes; return whether its end was there."""
        held = list[str]()
        if closers.tags.lines:
            yield from self.source.literal(("\n",))
        if types == {"string"}:
            self.sink.add_arguments('"')
            closed = yield from self._up_to_close(closers, lambda text: self.sink.add_arguments(json_text(text)[1:-1]))
            if closed:
                self.sink.add_arguments('"')
            return closed
        closed = yield from self._up_to_close(closers, held.append)
        self.sink.add_arguments(json_of_text("".join(held), types))
        return closed

    def _up_to_close(self, closers: _Closers, on_text: Callable[[str], None]) -> Reader[bool]:
        """Hand the text of a value on up to what closes it; return whether that was there."""
        source = self.source
        while True:
            literal = yield from source.stream(closers.literals, on_text)
            tag = literal.lstrip("\n")
            if not literal or tag == closers.tags.end:
                return bool(literal)
            mark = source.mark()
            if tag == closers.tags.begin:
                closes = yield from self._is_next_parameter(closers, literal)
            elif tag in closers.section_end:
                closes = True
            else:
                closes = yield from self._is_end_of_section(closers)
            if closes:
                source.seek(mark - len(tag))
                return True
            source.seek(mark)
            on_text(literal)

    def _is_next_parameter(self, closers: _Closers, literal: str) -> Reader[bool]:
        """Whether what began within a value, by ``literal``, is a parameter that the call does not have yet."""
        try:
            key, _ = yield from self._parameter_name(closers.tags)
        except NotACallError:
            return False
        return literal.startswith("\n") if closers.names is None else key in closers.names

    def _is_end_of_section(self, closers: _Closers) -> Reader[bool]:
        """Whether nothing but the end of the section, or of the text, follows."""
        source = self.source
        yield from source.space()
        if (yield from source.literal(closers.section_end)):
            return True
        return source.ended and source.at == len(source.text)


@dataclass(frozen=True, slots=True)
class _Closers:
    """What closes the value of a parameter: its own end, or what can only follow if the model forgot that.

    Attributes:
        tags: How parameters are written.
        call_end: Literals that end the call, with the section's end or nothing behind them.
        section_end: Literals that end the section; one that is a token needs no other before it.
        names: Parameters that the call does not have yet; ``None``: those of the tool are not known.
    """

    tags: Parameters
    call_end: tuple[str, ...]
    section_end: tuple[str, ...]
    names: frozenset[str] | None

    @property
    def literals(self) -> tuple[str, ...]:
        tokens = tuple(item for item in self.section_end if item.startswith(MARK))
        tags = (self.tags.end, self.tags.begin, *self.call_end, *tokens)
        return (*tags, *(f"\n{tag}" for tag in tags)) if self.tags.lines else tags


def _decoded(quoted: str) -> str:
    try:
        value = msgspec.json.decode(quoted.encode(errors="surrogatepass"))
    except (ValueError, UnicodeError) as error:
        raise NotACallError from error
    return value if isinstance(value, str) else ""
