"""What commands' parsers have in common: a mistake on the command line is one line, with the nearest that there is."""

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
    """A parser whose errors are one line, and which takes flags only by their whole names."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **{"allow_abbrev": False, **options})

    def error(self, message: str) -> NoReturn:
        """Print the mistake in one line and end the process with status 2."""
        if found := _CHOICE.search(message):
            known = re.findall(r"'([^']*)'", found[2]) or found[2].split(", ")
            flag = re.match(r"argument (--\S+?)(/--\S+)*: ", message)
            message = f"there is no {found[1]!r}" + _near(found[1], known)
            if flag:
                message = f"{flag[1]} must be one of {', '.join(known)}, got {found[1]!r}" + _near(found[1], known)
        elif found := _NUMBER.fullmatch(message):
            kind = {"int": "a whole number", "float": "a number"}[found[2]]
            message = f"{found[1]} must be {kind}, got {found[3]}"
        sys.stderr.write(f"{self.prog}: error: {message} (see {self.prog} --help)\n")
        raise SystemExit(2)

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse; flags that are not known are named with the nearest ones of the command."""
        found, unknown = self.parse_known_args(args, namespace)
        if unknown:
            parser = self._chosen(sys.argv[1:] if args is None else args)
            flag = unknown[0].partition("=")[0]
            flags = [name for action in parser._actions for name in action.option_strings]
            what = "flag" if flag.startswith("-") else "argument"
            hint = _near(flag, flags) if what == "flag" else ""
            parser.error(f"there is no {what} {flag}{hint}")
        return found

    def _chosen(self, words: Sequence[str]) -> argparse.ArgumentParser:
        """Return the parser of the command that the words name."""
        parser: argparse.ArgumentParser = self
        for word in words:
            below = next((a for a in parser._actions if isinstance(a, argparse._SubParsersAction)), None)
            if below is None:
                break
            if word in below.choices:
                parser = below.choices[word]
        return parser


def _near(word: str, known: Iterable[str]) -> str:
    found = difflib.get_close_matches(word, list(known), 1)
    return f"; did you mean {found[0]}?" if found else ""
