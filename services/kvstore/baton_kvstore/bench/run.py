"""The command's inside: options from flags, and what is shown."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from pathlib import Path

from rich.console import Console

from baton.bench.kv.plot import check_plot
from baton.errors import ConfigError, shown
from baton_kvstore.bench.driver import Driver
from baton_kvstore.bench.plan import Options
from baton_kvstore.bench.plot import draw
from baton_kvstore.bench.records import StoreRecord
from baton_kvstore.bench.tables import print_tables

FILE_WIDTH = 160
"""Columns of tables that go to a file or a pipe."""
_LISTS = frozenset({"geometries", "tiers", "ops", "clients", "hits"})
"""Options that a flag writes as a list."""


def measure(args: argparse.Namespace) -> int:
    """Measure and show; returns the exit status.

    Raises:
        ConfigError: A flag that cannot work.
        BatonError: A client or a server ended.
    """
    options = options_from(args)
    if args.plot:
        check_plot(Path(args.plot))
    records: list[StoreRecord] = []

    def report(record: StoreRecord) -> None:
        records.append(record)
        if args.json:
            sys.stdout.write(record.to_json() + "\n")
            sys.stdout.flush()

    console = Console(stderr=True)
    with console.status("starting") as status:
        code = Driver(options, report, status.update).run()
    if not args.json:
        out = Console(highlight=False)
        if not out.is_terminal:
            out.width = FILE_WIDTH
        print_tables(records, out)
    if args.plot:
        draw(records, Path(args.plot))
    return code


def options_from(args: argparse.Namespace) -> Options:
    """Build the options from parsed flags.

    Raises:
        ConfigError: Names the flag.
    """
    same = {item.name for item in dataclasses.fields(Options)} - _LISTS
    return Options(
        geometries=words(args.geometry),
        tiers=words(args.tier),
        ops=words(args.op),
        clients=numbers(args.clients, "clients"),
        hits=numbers(args.hits, "hits"),
        **{name: getattr(args, name) for name in same},
    )


def words(text: str) -> tuple[str, ...]:
    """Split a list."""
    return tuple(part.strip() for part in text.split(",") if part.strip())


def numbers(text: str, flag: str) -> tuple[int, ...]:
    """Split a list of numbers.

    Raises:
        ConfigError: It has something else in it; names the flag.
    """
    try:
        return tuple(dict.fromkeys(int(part) for part in words(text)))
    except ValueError:
        raise ConfigError(f"--{flag} takes numbers, got {shown(text)}", field=flag) from None
