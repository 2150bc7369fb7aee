"""``baton``: entry point of the command line.

Packages above this one add commands by entry points of the group ``baton.commands``: functions that declare them on
the parser. The benchmarks, ``profile``, ``plan`` and ``tune`` come from ``baton_bench`` that way.
"""

from __future__ import annotations

import argparse
import difflib
import os
import re
import sys
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

from baton.cli import autoscale, chat, completion, config, demo, explain, instances, kvstore, status, up
from baton.errors import BatonError, ConfigError, UnavailableError
from baton.plugins import installed_plugins
from baton.quantize import command as quantize
from baton.version import __version__

_NUMBER = re.compile(r"argument (\S+?): invalid (int|float) value: (.*)")
_CHOICE = re.compile(r"invalid choice: '([^']*)' \(choose from (.*)\)")


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status.

    What a command raises becomes a message on standard error and a status: 2 for a ``ConfigError``, 1 for other errors
    of Baton and for a reader of the output that has gone, 130 for an interrupt.
    """
    parser: argparse.ArgumentParser = CommandParser(
        prog="baton", description="Serve LLMs with prefill and decode apart."
    )
    parser.add_argument("--version", action="version", version=f"baton {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND", dest="command")
    up.add_parser(commands)
    demo.add_parser(commands)
    instances.add_health_parser(commands)
    explain.add_parser(commands)
    kvstore.add_parser(commands)
    config.add_parser(commands)
    status.add_parser(commands)
    chat.add_chat_parser(commands)
    chat.add_generate_parser(commands)
    instances.add_drain_parser(commands)
    instances.add_scale_parser(commands)
    for command in (autoscale, quantize):
        command.add_parser(commands)
    _add_installed_commands(commands)
    completion.add_parser(commands, parser)
    args = parser.parse_args(argv)
    name = " ".join(["baton", args.command, *([args.benchmark] if args.command == "bench" else [])])
    try:
        return int(args.run(args))
    except ConfigError as error:
        print(f"{name}: error: {error.message}", file=sys.stderr)
        return 2
    except BatonError as error:
        hint = getattr(args, "hint", "") if isinstance(error, UnavailableError) else ""
        print(f"{name}: {error.message}" + (f" ({hint})" if hint else ""), file=sys.stderr)
        return 1
    except BrokenPipeError:  # the reader of the output has gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        return 130


def _add_installed_commands(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    for _, point in sorted(installed_plugins("baton.commands").items()):
        try:
            add_parsers = point.load()
        except (ImportError, AttributeError) as error:
            print(f"baton: the commands of {point.name} cannot be imported: {error}", file=sys.stderr)
            continue
        add_parsers(commands)


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


if __name__ == "__main__":
    sys.exit(main())
