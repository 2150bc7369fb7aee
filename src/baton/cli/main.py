"""``baton``: entry point of the command line.

Packages above this one add commands by entry points of the group ``baton.commands``: functions that declare them on
the parser. The benchmarks, ``profile``, ``plan`` and ``tune`` come from ``baton_bench`` that way.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from baton.interrupts import ended_by_interrupt


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status.

    What a command raises becomes a message on standard error and a status: 2 for a ``ConfigError``, 1 for other errors
    of Baton and for a reader of the output that has gone, 130 for an interrupt.
    """
    with ended_by_interrupt():  # imports take seconds, and turn an interrupt into an error of their own
        parser = _build_parser()
        from baton.cli.printable import lines
        from baton.errors import BatonError, ConfigError, UnavailableError
    name = "baton"
    try:
        args = parser.parse_args(argv)
        name = " ".join(["baton", args.command, *([args.benchmark] if args.command == "bench" else [])])
        return int(args.run(args))
    except ConfigError as error:
        print(f"{name}: error: {lines(error.message)}", file=sys.stderr)
        return 2
    except BatonError as error:
        hint = getattr(args, "hint", "") if isinstance(error, UnavailableError) else ""
        print(f"{name}: {lines(error.message)}" + (f" ({hint})" if hint else ""), file=sys.stderr)
        return 1
    except BrokenPipeError:  # the reader of the output has gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        return 130


def _build_parser() -> argparse.ArgumentParser:
    from baton.cli import autoscale, chat, completion, config, demo, explain, instances, kvstore, status, up
    from baton.cli.foreign_names import find_command
    from baton.cli.parser import CommandParser
    from baton.quantize import command as quantize
    from baton.version import __version__

    own = CommandParser(prog="baton", description="Serve LLMs with prefill and decode apart.")
    own.find_hint = find_command
    parser: argparse.ArgumentParser = own
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
    return parser


def _add_installed_commands(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    from baton.plugins import installed_plugins

    for _, point in sorted(installed_plugins("baton.commands").items()):
        try:
            add_parsers = point.load()
        except (ImportError, AttributeError) as error:
            print(f"baton: the commands of {point.name} cannot be imported: {error}", file=sys.stderr)
            continue
        add_parsers(commands)


if __name__ == "__main__":
    sys.exit(main())
