"""Argument parser of all commands: an error is one line, with the nearest valid word."""

from __future__ import annotations

import argparse
import difflib
import re
import sys
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

_NUMBER = re.compile(r"argument (\S+?): invalid (int|float) value: (.*)")
_CHOICE = re.compile(r"invalid choice: '([^']*)' \(choose from (.*)\)")


class CommandParser(argparse.ArgumentParser):
    """A parser with errors of one line, and without abbreviated flags."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **{"allow_abbrev": False, **options})

    def error(self, message: str) -> NoReturn:
        """Print the error in one line and end the process with status 2."""
        if match := _CHOICE.search(message):
            known = re.findall(r"'([^']*)'", match[2]) or match[2].split(", ")
            flag = re.match(r"argument (--\S+?)(/--\S+)*: ", message)
            message = f"there is no {match[1]!r}" + _suggestion(match[1], known)
            if flag:
                message = f"{flag[1]} must be one of {', '.join(known)}, got {match[1]!r}" + _suggestion(
                    match[1], known
                )
        elif match := _NUMBER.fullmatch(message):
            kind = {"int": "a whole number", "float": "a number"}[match[2]]
            message = f"{match[1]} must be {kind}, got {match[3]}"
        sys.stderr.write(f"{self.prog}: error: {message} (see {self.prog} --help)\n")
        raise SystemExit(2)

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse; the error for an unknown flag suggests the nearest flag of the command."""
        namespace, unknown = self.parse_known_args(args, namespace)
        if unknown:
            parser = self._command_parser(sys.argv[1:] if args is None else args)
            flag = unknown[0].partition("=")[0]
            flags = [name for action in parser._actions for name in action.option_strings]
            what = "flag" if flag.startswith("-") else "argument"
            hint = _suggestion(flag, flags) if what == "flag" else ""
            parser.error(f"there is no {what} {flag}{hint}")
        return namespace

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


def _suggestion(word: str, known: Iterable[str]) -> str:
    matches = difflib.get_close_matches(word, list(known), 1)
    return f"; did you mean {matches[0]}?" if matches else ""
