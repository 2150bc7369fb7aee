"""Stop strings in a stream of text."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence


class StopStrings:
    """A set of stop strings, compiled once and shared by the sequences of a request.

    An Aho-Corasick automaton: one step per character, whatever the number and length of the strings. A state is the
    longest end of the text read so far that begins some stop string, so its depth is exactly what must be held back.
    """

    __slots__ = ("_depth", "_fail", "_found", "_next", "strings")

    def __init__(self, strings: Sequence[str]) -> None:
        """Compile.

        Args:
            strings: The stop strings; none may be empty.

        Raises:
            ValueError: One is empty.
        """
        if not all(strings):
            raise ValueError("a stop string must not be empty")
        self.strings = tuple(strings)
        self._next: list[dict[str, int]] = [{}]
        self._depth = [0]
        self._fail = [0]
        self._found: list[str | None] = [None]
        for string in strings:
            self._add(string)
        self._link()

    def _add(self, string: str) -> None:
        state = 0
        for depth, char in enumerate(string, 1):
            following = self._next[state].get(char)
            if following is None:
                following = len(self._next)
                self._next[state][char] = following
                self._next.append({})
                self._depth.append(depth)
                self._fail.append(0)
                self._found.append(None)
            state = following
        self._found[state] = string

    def _link(self) -> None:
        todo = deque(self._next[0].values())
        while todo:
            state = todo.popleft()
            for char, following in self._next[state].items():
                self._fail[following] = self.step(self._fail[state], char)
                todo.append(following)
            if self._found[state] is None:
                self._found[state] = self._found[self._fail[state]]

    def step(self, state: int, char: str) -> int:
        """Return the state after one more character."""
        while True:
            following = self._next[state].get(char)
            if following is not None:
                return following
            if state == 0:
                return 0
            state = self._fail[state]

    def depth(self, state: int) -> int:
        """Return how many of the last characters could begin a stop string."""
        return self._depth[state]

    def found(self, state: int) -> str | None:
        """Return the longest stop string that ends at this state."""
        return self._found[state]


class StopStringMatcher:
    """Lets text through until a stop string is complete, and holds back what could begin one.

    The match is the one that is complete first; of several that are complete at the same character, the longest. So
    the result does not depend on how the text was cut into pieces.

    Attributes:
        matched: The stop string that was found, or ``None``.
    """

    __slots__ = ("_held", "_include", "_state", "_stops", "matched")

    def __init__(self, stops: Sequence[str] | StopStrings, include: bool = False) -> None:
        """Begin a stream.

        Args:
            stops: The stop strings, compiled or not.
            include: Whether the stop string itself belongs to the text.
        """
        self._stops = stops if isinstance(stops, StopStrings) else StopStrings(stops)
        self._include = include
        self._state = 0
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """Take more text and return what is certain to come before any stop string; nothing after a match."""
        if self.matched is not None:
            return ""
        stops, state = self._stops, self._state
        step, found = stops.step, stops.found
        for at, char in enumerate(text, 1):
            state = step(state, char)
            stop = found(state)
            if stop is not None:
                return self._match(stop, self._held + text[:at])
        self._state = state
        text = self._held + text
        keep = stops.depth(state)
        cut = len(text) - keep
        self._held = text[cut:]
        return text[:cut]

    def _match(self, stop: str, text: str) -> str:
        self.matched = stop
        self._held = ""
        return text if self._include else text[: len(text) - len(stop)]

    def flush(self) -> str:
        """Return what was held back: the text has ended without a match. Begins anew."""
        held, self._held, self._state = self._held, "", 0
        return held
