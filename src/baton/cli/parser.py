"""The parser of the command line: errors of one line that say what to type instead."""

from __future__ import annotations

import argparse
import difflib
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn

from baton.errors import ConfigError

_NUMBER = re.compile(r"argument (\S+?): invalid (int|float) value: (.*)")
_CHOICE = re.compile(r"invalid choice: '([^']*)' \(choose from (.*)\)")


_CLOSE = 0.75
"""Similarity from which a word counts as misspelt: --host is not --port."""
_FEW = 6
"""So many choices are listed in an error."""


class CommandParser(argparse.ArgumentParser):
    """A parser with errors of one line, and without abbreviated flags.

    Attributes:
        find_hint: Returns what to type instead of an unknown flag or word, which no spelling suggests; empty: nothing
            is known. May be replaced.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **{"allow_abbrev": False, **options})
        self.find_hint: Callable[[str], str] = lambda word: ""

    def error(self, message: str) -> NoReturn:
        """Print the error in one line and end the process with status 2."""
        sys.stderr.write(f"{self.prog}: error: {self.explain(message)} (see {self.prog} --help)\n")
        raise SystemExit(2)

    def explain(self, message: str) -> str:
        """Return argparse's message with the choices that there are, or the nearest one."""
        if match := _CHOICE.search(message):
            known = re.findall(r"'([^']*)'", match[2]) or match[2].split(", ")
            flag = re.match(r"argument (--\S+?)(/--\S+)*: ", message)
            if flag:
                what = f"{flag[1]} must be one of {', '.join(known)}, got {match[1]!r}"
                return what + _suggestion(match[1], known)
            among = f"; there are {', '.join(known)}" if len(known) <= _FEW else ""
            return f"there is no {match[1]!r}" + (self._instead(match[1], known) or among)
        if match := _NUMBER.fullmatch(message):
            kind = {"int": "a whole number", "float": "a number"}[match[2]]
            return f"{match[1]} must be {kind}, got {match[3]}"
        return message

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse; the error for an unknown flag says what the command has instead."""
        namespace, unknown = self.parse_known_args(args, namespace)
        if unknown:
            parser = self._command_parser(sys.argv[1:] if args is None else args)
            word = unknown[0].partition("=")[0]
            flags = [name for action in parser._actions for name in action.option_strings]
            what, known = ("flag", flags) if word.startswith("-") else ("argument", [])
            instead = parser._instead(word, known) if isinstance(parser, CommandParser) else ""
            parser.error(f"there is no {what} {word}{instead}")
        return namespace

    def _instead(self, word: str, known: Iterable[str]) -> str:
        hint = self.find_hint(word)
        return f": {hint}" if hint else _suggestion(word, known)

    def _command_parser(self, words: Sequence[str]) -> argparse.ArgumentParser:
        """Return the parser of the command given in the words."""
        parser: argparse.ArgumentParser = self
        for word in words:
            below = next((a for a in parser._actions if isinstance(a, argparse._SubParsersAction)), None)
            if below is None:
                break
            if word in below.choices:
                parser = below.choices[word]
        return parser


class RoleArgsParser(CommandParser):
    """A parser of a service's flags in a flag of ``baton up``, whose name is ``prog``."""

    def error(self, message: str) -> NoReturn:
        """Raise a :class:`ConfigError` that names the flag of ``baton up``."""
        raise ConfigError(f"{self.prog}: {self.explain(message)}", field=self.prog.lstrip("-").replace("-", "_"))


def _suggestion(word: str, known: Iterable[str]) -> str:
    by_name = {name.lstrip("-"): name for name in known}
    matches = difflib.get_close_matches(word.lstrip("-"), by_name, 1, _CLOSE)
    return f"; did you mean {by_name[matches[0]]}?" if matches else ""
