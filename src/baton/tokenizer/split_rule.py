"""Reading the regular expression that a tokenizer splits text by.

What comes out is a small program, as Thompson's construction makes it: what matches a character, and where to go on,
the preferred way first. Only what the rules in use are made of is read: characters, sets and categories, groups,
greedy repetitions, words of ASCII letters in any case, and at the end of an alternative "unless such a character
follows". What a set or a category *is* is not decided here: the library that owns the expression is asked (see
:mod:`baton.tokenizer.split_table`).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
"""What the library's ByteLevel splits by."""
_MAX_STEPS = 2000
_ATOM = re.compile(
    r"""\\[pP]\{\^?\w+\}            # a category
    | \\[sSdDwWrntf]                # a class, or a control character
    | \\[\\.\-/?*+|(){}\[\]]        # an escaped sign
    | \[\^?(?:\\[pP]\{\^?\w+\}|\\[sSdDwWrntf\\.\-/?*+|(){}\[\]]|(?!&&)[^\\\[\]^])+\]   # a set of those
    | [^\\\[\](){}|?*+^$.]          # itself
    """,
    re.VERBOSE,
)
_REPEAT = re.compile(r"[?*+]|\{(\d+)(?:(,)(\d*))?\}")
_ANY_CASE = re.compile(r"\(\?i:([a-z'|]+)\)")
_LIGATURES = re.compile("ff|fi|fl|ss|st")
"""Pairs of letters that are one character in another case."""


@dataclass(frozen=True, slots=True)
class Step:
    """One step of a program.

    Attributes:
        atom: A character that this matches is taken; ``None``: nothing is.
        then: Where to go on, the preferred way first; none: the word ends here.
        unless: At an end: it is none before a character that this matches.
    """

    atom: str | None = None
    then: tuple[int, ...] = ()
    unless: str | None = None


@dataclass(slots=True)
class Program:
    """A split rule.

    Attributes:
        steps: It begins at the last one.
        atoms: Expressions of single characters that it is about.
    """

    steps: list[Step] = field(default_factory=list)
    atoms: dict[str, None] = field(default_factory=dict)

    def add(self, step: Step) -> int:
        """Add a step and return its number.

        Raises:
            ValueError: There are too many.
        """
        if len(self.steps) >= _MAX_STEPS:
            raise ValueError("the rule is too long")
        self.atoms.update((atom, None) for atom in (step.atom, step.unless) if atom is not None)
        self.steps.append(step)
        return len(self.steps) - 1


_Build = Callable[[Program, int], int]
"""Adds the steps that lead to a given one, and returns their first."""


@dataclass(frozen=True, slots=True)
class _Part:
    build: _Build
    may_be_empty: bool


def split_source(pre_tokenizer: dict[str, Any]) -> str | None:
    """Return the expression of a byte-level pre-tokenizer that has one, and does nothing else to the text.

    Args:
        pre_tokenizer: That part of a ``tokenizer.json``.
    """
    steps = pre_tokenizer.get("pretokenizers", ()) if pre_tokenizer.get("type") == "Sequence" else [pre_tokenizer]
    if not steps or steps[-1].get("type") != "ByteLevel" or steps[-1].get("add_prefix_space"):
        return None
    own = steps[-1].get("use_regex", True)
    if len(steps) == 1:
        return GPT2 if own else None
    step = steps[0]
    if len(steps) > 2 or own or step.get("type") != "Split" or step.get("behavior") != "Isolated" or step.get("invert"):
        return None
    source: str | None = (step.get("pattern") or {}).get("Regex")
    return source


def read_rule(source: str) -> Program | None:
    """Return the program of an expression; ``None``: it has something that is not read here."""
    reader = _Reader(source)
    try:
        parts = reader.alternatives(top=True)
        if reader.at != len(source) or any(part.may_be_empty for part in parts):
            return None
        program = Program()
        _either(parts, program, program.add(Step()))
    except ValueError:
        return None
    return program


class _Reader:
    """Reads an expression from left to right; a ``ValueError`` is raised for what it does not know."""

    def __init__(self, source: str) -> None:
        self._source = source
        self.at = 0

    def alternatives(self, *, top: bool = False) -> list[_Part]:
        """Read up to the end or a closing bracket."""
        found = [self._sequence(top=top)]
        while self._take("|"):
            found.append(self._sequence(top=top))
        return found

    def _sequence(self, *, top: bool) -> _Part:
        parts: list[_Part] = []
        while self.at < len(self._source) and self._source[self.at] not in "|)":
            if top and self._take("(?!"):
                parts.append(self._unless())
                break
            parts.append(self._repeated())
        return _Part(lambda program, to: _one_by_one(parts, program, to), all(part.may_be_empty for part in parts))

    def _unless(self) -> _Part:
        atom = self._atom()
        if atom is None or not self._take(")") or self._source[self.at : self.at + 1] not in ("", "|"):
            raise ValueError("not a look at the next character")
        return _Part(lambda program, to: program.add(Step(unless=atom)), may_be_empty=True)

    def _repeated(self) -> _Part:
        part = self._single()
        match = _REPEAT.match(self._source, self.at)
        if match is None:
            return part
        self.at = match.end()
        if _REPEAT.match(self._source, self.at):
            raise ValueError("lazy, possessive, or twice")
        if match[1] is None:
            low, high = {"?": (0, 1), "*": (0, None), "+": (1, None)}[match[0]]
        else:
            low = int(match[1])
            high = low if match[2] is None else int(match[3]) if match[3] else None
        if part.may_be_empty or (high is not None and (high == 0 or high < low)):
            raise ValueError("a repetition of nothing")
        return _Part(lambda program, to: _times(part, low, high, program, to), low == 0)

    def _single(self) -> _Part:
        match = _ANY_CASE.match(self._source, self.at)
        if match is not None:
            self.at = match.end()
            words = match[1].split("|")
            if not all(words) or _LIGATURES.search(match[1]):
                raise ValueError("not plain words")
            spelt = [[_character(char if char == "'" else f"(?i:{char})") for char in word] for word in words]
            return _group([_Part(_joined(word), may_be_empty=False) for word in spelt])
        if self._take("(?:"):
            parts = self.alternatives()
            if not self._take(")"):
                raise ValueError("an open group")
            return _group(parts)
        atom = self._atom()
        if atom is None:
            raise ValueError("not known")
        return _character(atom)

    def _atom(self) -> str | None:
        match = _ATOM.match(self._source, self.at)
        if match is None:
            return None
        self.at = match.end()
        return match[0]

    def _take(self, text: str) -> bool:
        found = self._source.startswith(text, self.at)
        self.at += len(text) * found
        return found


def _character(atom: str) -> _Part:
    return _Part(lambda program, to: program.add(Step(atom, (to,))), may_be_empty=False)


def _group(parts: list[_Part]) -> _Part:
    return _Part(lambda program, to: _either(parts, program, to), any(part.may_be_empty for part in parts))


def _joined(parts: list[_Part]) -> _Build:
    return lambda program, to: _one_by_one(parts, program, to)


def _one_by_one(parts: list[_Part], program: Program, to: int) -> int:
    for part in reversed(parts):
        to = part.build(program, to)
    return to


def _either(parts: list[_Part], program: Program, to: int) -> int:
    return program.add(Step(then=tuple([part.build(program, to) for part in parts])))


def _times(part: _Part, low: int, high: int | None, program: Program, to: int) -> int:
    if high is None:
        loop = program.add(Step())  # whose ways are known when its body is
        program.steps[loop] = Step(then=(part.build(program, loop), to))
        to = loop
    else:
        end = to
        for _ in range(high - low):
            to = program.add(Step(then=(part.build(program, to), end)))
    for _ in range(low):
        to = part.build(program, to)
    return to
