"""``baton``: entry point of the command line."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from baton.cli import bench, demo, explain, health, kvstore, up
from baton.version import __version__


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status."""
    parser = argparse.ArgumentParser(prog="baton", description="Serve LLMs with prefill and decode apart.")
    parser.add_argument("--version", action="version", version=f"baton {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    up.add_parser(commands)
    demo.add_parser(commands)
    health.add_parser(commands)
    explain.add_parser(commands)
    kvstore.add_parser(commands)
    bench.add_parser(commands)
    args = parser.parse_args(argv)
    return int(args.run(args))


if __name__ == "__main__":
    sys.exit(main())
