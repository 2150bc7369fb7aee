"""Text that arrives in pieces, read by coroutines.

A reader yields where it cannot decide without more text, and is resumed when there is more, or no more will come. What
it decides is true of all texts that go on from what it has seen, so the pieces never matter.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Generator, Iterable
from typing import TypeAlias, TypeVar

from baton.dialects.token_anchors import MARK

T = TypeVar("T")
Reader: TypeAlias = Generator[None, None, T]
"""Reads some text and returns what it found."""

_SPACE = re.compile(r"\s*")
_JSON_MARK = re.compile(r'["{}\[\]]')
_STRING_MARK = re.compile(r'"|\\.?', re.DOTALL)


class NotACallError(Exception):
    """What was read cannot be a call: it is text."""


@functools.lru_cache(256)
def literals_pattern(literals: tuple[str, ...]) -> re.Pattern[str]:
    """Return what finds the first of some texts, the longest of those that begin at the same place."""
    return re.compile("|".join(re.escape(text) for text in sorted(literals, key=len, reverse=True)))


@functools.lru_cache(256)
def _beginnings_pattern(literals: tuple[str, ...]) -> re.Pattern[str]:
    beginnings = {text[:end] for text in literals for end in range(1, len(text))}
    if not beginnings:
        return re.compile(r"(?!)")
    return re.compile("(?:" + "|".join(map(re.escape, sorted(beginnings, key=len, reverse=True))) + r")\Z")


def beginning_at_end(literals: tuple[str, ...], text: str, at: int) -> int | None:
    """Return where, behind ``at``, the longest beginning of any of some texts begins that a text ends with."""
    # All of a long text is looked through for the literals once; this is asked at each of them.
    first = len(text) + 1 - max(map(len, literals), default=1)
    match = _beginnings_pattern(literals).search(text, max(at, first))
    return None if match is None else match.start()


@functools.lru_cache(256)
def _json_marks(ends: tuple[str, ...], in_string: bool) -> re.Pattern[str]:
    """Return what finds the next mark of JSON, or one of some texts."""
    marks = _STRING_MARK.pattern if in_string else _JSON_MARK.pattern
    return re.compile("|".join((*map(re.escape, sorted(ends, key=len, reverse=True)), marks)), re.DOTALL)


class Source:
    """The text so far, and where reading is.

    Attributes:
        text: Text that has come and was not dropped.
        ended: No more text will come.
        num_reread: Characters that turned out to be no call and are read again.
    """

    __slots__ = ("_dropped", "at", "ended", "num_reread", "text")

    def __init__(self) -> None:
        self.text = ""
        self._dropped = 0
        self.num_reread = 0
        self.at = 0
        """Place in :attr:`text`."""
        self.ended = False

    def push(self, text: str) -> None:
        self.text += text

    def mark(self) -> int:
        """Return the place of reading; it stays true when text is dropped."""
        return self._dropped + self.at

    def seek(self, mark: int) -> None:
        """Go back to a place, all of whose text is still there."""
        self.at = mark - self._dropped

    def drop(self) -> None:
        """Forget what has been read, if it is half of the text or more: else all that is left is copied each time."""
        if 2 * self.at < len(self.text):
            return
        self.text = self.text[self.at :]
        self._dropped = self._dropped + self.at
        self.at = 0

    def space(self) -> Reader[None]:
        while True:
            match = _SPACE.match(self.text, self.at)
            assert match is not None
            self.at = match.end()
            if self.at < len(self.text) or self.ended:
                return
            yield

    def literal(self, literals: Iterable[str]) -> Reader[str]:
        """Pass over one of some texts, the longest that is there, and return it; empty: none is."""
        options = sorted(literals, key=len, reverse=True)
        while True:
            left = len(self.text) - self.at
            for option in options:
                if self.text.startswith(option, self.at):
                    self.at += len(option)
                    return option
                if left < len(option) and not self.ended and option.startswith(self.text[self.at :]):
                    break  # it may become this one
            else:
                return ""
            yield

    def until(self, literals: tuple[str, ...], most: int) -> Reader[tuple[str, str]]:
        """Read up to the first of some texts and pass over that; return what comes before it, and it.

        Raises:
            NotACallError: It does not come, or not within ``most`` characters.
        """
        pattern = literals_pattern(literals)
        while True:
            match = pattern.search(self.text, self.at, self.at + most + 64)
            if match is not None and (self.ended or not self._may_begin_earlier(literals, match)):
                before = self.text[self.at : match.start()]
                if len(before) > most:
                    raise NotACallError
                self.at = match.end()
                return before, match[0]
            if match is None and (self.ended or len(self.text) - self.at > most + 64):
                raise NotACallError
            yield

    def _may_begin_earlier(self, literals: tuple[str, ...], match: re.Match[str]) -> bool:
        """Whether a text that is not complete yet begins where one was found, or earlier."""
        partial = beginning_at_end(literals, self.text, self.at)
        return partial is not None and partial <= match.start()

    def json_value(
        self, take: Callable[[str], None], *, drop: bool, most: int | None = None, anchors: tuple[str, ...] = ()
    ) -> Reader[bool]:
        """Read an object or a list of JSON up to the bracket that closes it, without a look at what is in it.

        Args:
            take: Takes the text, in pieces.
            drop: Forget what was taken.
            most: How many characters it may have.
            anchors: Texts that end it unclosed, outside of strings; those that are tokens within strings, too.

        Returns:
            Whether it was closed.

        Raises:
            NotACallError: It is longer than ``most``.
        """
        depth = 0
        in_string = False
        at = self.at
        size = 0
        tokens = tuple(anchor for anchor in anchors if anchor.startswith(MARK))
        while True:
            ends = tokens if in_string else anchors
            match = _json_marks(ends, in_string).search(self.text, at)
            partial = beginning_at_end(ends, self.text, at) if ends and not self.ended else None
            if match is not None and match[0] in ends and (partial is None or match.start() < partial):
                if match.start() > self.at:
                    take(self.text[self.at : match.start()])
                self.at = match.start()
                return False
            waits = match is not None and match[0] == "\\" and not self.ended
            if match is None or waits or (partial is not None and partial <= match.start()):
                at = len(self.text) if match is None else match.start()
                at = at if partial is None else min(at, partial)
                size += at - self.at
                if most is not None and size > most:
                    self.num_reread += most
                    raise NotACallError
                if at > self.at:
                    take(self.text[self.at : at])
                self.at = at
                if self.ended:
                    self.num_reread += size
                    return False
                if drop:
                    self.drop()
                    at = self.at
                yield
                continue
            at = match.end()
            mark = match[0]
            if in_string:
                in_string = mark != '"'
            elif mark == '"':
                in_string = True
            else:
                depth += 1 if mark in "{[" else -1
                if depth == 0:
                    if most is not None and size + at - self.at > most:
                        self.num_reread += most
                        raise NotACallError
                    take(self.text[self.at : at])
                    self.at = at
                    return True

    def json_string(self, most: int) -> Reader[str]:
        """Read a string of JSON with its quotes.

        Raises:
            NotACallError: There is none, or it is longer than ``most``.
        """
        if not (yield from self.literal(('"',))):
            raise NotACallError
        begin = self.at - 1
        at = self.at
        while True:
            match = _STRING_MARK.search(self.text, at)
            if match is None or match[0] == "\\":
                at = len(self.text) if match is None else match.start()
                if self.ended or at - begin > most:
                    self.num_reread += min(at - begin, most)
                    raise NotACallError
                yield
                continue
            at = match.end()
            if match[0] == '"':
                if at - begin > most:
                    self.num_reread += most
                    raise NotACallError
                self.at = at
                return self.text[begin:at]

    def stream(self, ends: tuple[str, ...], take: Callable[[str], None]) -> Reader[str]:
        """Hand text on up to the first of some texts, and pass over that; return it, or nothing at the end."""
        pattern = literals_pattern(ends)
        while True:
            match = pattern.search(self.text, self.at) if ends else None
            partial = None if self.ended or not ends else beginning_at_end(ends, self.text, self.at)
            stop = len(self.text)
            if match is not None and (partial is None or partial > match.start()):
                take(self.text[self.at : match.start()])
                self.at = match.end()
                return match[0]
            if partial is not None:
                stop = min(partial, stop if match is None else match.start())
            take(self.text[self.at : stop])
            self.at = stop
            self.drop()
            if self.ended:
                return ""
            yield
