"""From a split rule to tables: classes of characters, and an automaton over them.

Characters that no part of the rule tells apart are one class. Which characters a part matches the library that owns
the expression is asked, part by part: its Unicode is the one that counts, not Python's. The automaton then takes all
ways through the rule at once, in the order in which a backtracking engine would try them; once one of them ends, those
behind it are dropped. So the last end that was met is the match that such an engine finds, without going back.
"""

from __future__ import annotations

import functools
import unicodedata
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import tokenizers

from baton.tokenizer.split_rule import Program, read_rule

CHARACTERS = 0x20000
"""Those below are known: all that are written but the rarest Chinese ones."""
FOREIGN, END = 0, 1
"""Classes: characters that are not known, and the end of the text."""
_MAX_ATOMS = 60
_MAX_ROWS = 4096
_Bits = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class SplitTable:
    """A split rule as tables.

    Attributes:
        pages: [CHARACTERS // 256], uint16: which page holds the characters with these upper bits.
        classes: [pages, 256], uint8: the characters' classes.
        moves: [classes, 2 * rows], uint16: for a character's class and the last move: twice the next row (0: there is
            none), plus 1 if a word may end before the character. The last move is itself what the row is found by.
        start: The move that a word begins after.
    """

    pages: npt.NDArray[np.uint16]
    classes: npt.NDArray[np.uint8]
    moves: npt.NDArray[np.uint16]
    start: int

    def words(self, text: str) -> list[str] | None:
        """Return the words of a text, the slow way; ``None``: that is not known."""
        known = [self._class(ord(char)) for char in text] + [END]
        words, at = [], 0
        while at < len(text):
            behind, move, here = at, self.start, at
            while move > 1:
                move = int(self.moves[known[here], move])
                behind = here if move & 1 else behind
                here += 1
            if behind == at or FOREIGN in known[at:here]:
                return None
            words.append(text[at:behind])
            at = behind
        return words

    def _class(self, code: int) -> int:
        return int(self.classes[self.pages[code >> 8], code & 255]) if code < CHARACTERS else FOREIGN


@functools.lru_cache(maxsize=8)
def split_table(source: str, *, composes: bool) -> SplitTable | None:
    """Return the tables of an expression; ``None``: it is not read here, or too large. Takes about 0.2 s.

    Args:
        source: The expression.
        composes: Whether texts are brought into normal form C before; those that it might change are not known then.
    """
    program = read_rule(source)
    if program is None or len(program.atoms) > _MAX_ATOMS:
        return None
    members = [_members(atom) for atom in program.atoms]
    known = _settled().copy() if composes else np.ones(CHARACTERS, np.bool_)
    known[0xD800:0xE000] = False
    kinds = np.zeros(CHARACTERS, np.int64)
    for at, member in enumerate(members):
        kinds |= member.astype(np.int64) << at
    kinds[~known] = -1
    distinct = [int(kind) for kind in np.unique(kinds) if kind >= 0]
    classes = (np.searchsorted(distinct, kinds) + END + 1).astype(np.uint8)
    classes[~known] = FOREIGN
    automaton = _Automaton(program, distinct)
    if len(distinct) > 250 or not automaton.build():
        return None
    pages, page_of = np.unique(classes.reshape(-1, 256), axis=0, return_inverse=True)
    first = int(page_of[0])  # ASCII's page is to be page 0
    pages[[0, first]] = pages[[first, 0]]
    page_of = np.select([page_of == 0, page_of == first], [first, 0], page_of)
    moves = np.repeat(np.array(automaton.moves, np.uint16).T, 2, axis=1)  # whether a word may end does not matter later
    return SplitTable(
        page_of.astype(np.uint16), np.ascontiguousarray(pages), np.ascontiguousarray(moves), automaton.start
    )


class _Automaton:
    """All ways through a program at once.

    A row stands for the ways that are open, in their order: numbers of steps that match a character or are an end.
    """

    def __init__(self, program: Program, kinds: list[int]) -> None:
        self._steps = program.steps
        self._bit = {atom: 1 << at for at, atom in enumerate(program.atoms)}
        self._kinds = kinds
        self._rows: list[tuple[int, ...]] = [()]
        self._numbers: dict[tuple[int, ...], int] = {(): 0}
        self.moves: list[list[int]] = []
        self.start = 0

    def build(self) -> bool:
        """Fill :attr:`moves`, [rows, classes], and :attr:`start`; false: there would be too many."""
        self.start = 2 * self._row([len(self._steps) - 1])
        for ways in self._rows:  # which grow meanwhile
            if len(self._rows) > _MAX_ROWS:
                return False
            self.moves.append([0] + [self._move(ways, kind) for kind in (None, *self._kinds)])
        return True

    def _row(self, steps: list[int]) -> int:
        ways = self._open(steps)
        number = self._numbers.setdefault(ways, len(self._rows))
        if number == len(self._rows):
            self._rows.append(ways)
        return number

    def _move(self, ways: tuple[int, ...], kind: int | None) -> int:
        """Return the move for a character of a kind, ``None``: the end of the text."""
        onward: list[int] = []
        for way in ways:
            step = self._steps[way]
            if step.atom is not None:
                if self._matches(step.atom, kind):
                    onward += step.then
            elif step.unless is None or not self._matches(step.unless, kind):
                return 2 * self._row(onward) + 1
        return 2 * self._row(onward)

    def _matches(self, atom: str, kind: int | None) -> bool:
        return kind is not None and bool(kind & self._bit[atom])

    def _open(self, steps: list[int]) -> tuple[int, ...]:
        """Follow ways up to what matches a character or is an end, in their order."""
        found: dict[int, None] = {}
        seen: set[int] = set()
        todo = steps[::-1]
        while todo:
            at = todo.pop()
            if at in seen:
                continue
            seen.add(at)
            step = self._steps[at]
            if step.atom is None and step.then:
                todo += step.then[::-1]
            else:
                found[at] = None
        return tuple(found)


def _members(atom: str) -> _Bits:
    """Return which characters an expression of one character matches."""
    every = _every()
    others = tokenizers.normalizers.Replace(tokenizers.Regex(f"(?:{atom})+"), "").normalize_str(every)
    found = np.ones(CHARACTERS, np.bool_)
    found[np.frombuffer(others.encode("utf-32-le"), "<u4")] = False
    return found


@functools.cache
def _every() -> str:
    """Return all characters that are known."""
    return "".join(map(chr, [*range(0xD800), *range(0xE000, CHARACTERS)]))


@functools.cache
def _settled() -> _Bits:
    """Return which characters normal form C leaves as they are, whatever stands around them.

    Python's Unicode may be older or newer than the library's. What is assigned in the one keeps its form in all later
    ones, and what is not yet assigned in the other it leaves alone; so the newest characters are those that may differ.
    """
    found = np.zeros(CHARACTERS, np.bool_)
    seconds = set(range(0x1161, 0x1176)) | set(range(0x11A8, 0x11C3))  # of Hangul, which has no entries of its own
    for char in _every():
        parts = unicodedata.decomposition(char)
        if parts and parts[0] != "<":
            seconds.update(int(part, 16) for part in parts.split()[1:])
        found[ord(char)] = (
            not unicodedata.combining(char)
            and unicodedata.is_normalized("NFC", char)
            and unicodedata.category(char) != "Cn"
        )
    found[list(seconds)] = False
    return found
