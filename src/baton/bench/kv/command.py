"""The command's inside: options from flags, one side or the other, and what is shown."""

from __future__ import annotations

import argparse
import dataclasses
import logging
import sys
from collections.abc import Callable
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from baton.bench.core.records import Record
from baton.bench.core.report import check_plot, numbers, result_console, words
from baton.bench.kv.agent import Listener
from baton.bench.kv.driver import Driver
from baton.bench.kv.plan import Options
from baton.bench.kv.tables import draw, print_tables
from baton.errors import ConfigError, PipeClosedError
from baton.kv_transfer.protocol.connect import split_address
from baton.rpc.auth import read_token

FILE_WIDTH = 132
"""Columns of tables that go to a file or a pipe."""


def run(args: argparse.Namespace) -> int:
    """Listen, or measure; returns the exit status.

    Raises:
        ConfigError: A flag that cannot work.
        BatonError: An agent ended, or the other host is out of reach.
    """
    if args.listen:
        if args.connect:
            raise ConfigError("give --listen on one host and --connect on the other", field="listen")
        return _listen(args.listen, args.token_file)
    options = options_from(args)
    if args.plot:
        check_plot(Path(args.plot))
    records: list[Record] = []
    with _progress() as step:

        def report(record: Record) -> None:
            records.append(record)
            if args.json:
                sys.stdout.write(record.to_json() + "\n")
                sys.stdout.flush()

        code = Driver(options, report, step).run()
    if not args.json:
        print_tables(records, result_console(FILE_WIDTH))
    if args.plot:
        draw(records, Path(args.plot))
    return code


def options_from(args: argparse.Namespace) -> Options:
    """Build the options from parsed flags.

    Raises:
        ConfigError: Names the flag.
    """
    names = {item.name for item in dataclasses.fields(Options)} - {"pipes", "streams"}
    values = {name: getattr(args, name) for name in names}
    pipes = None if args.pipe is None else words(args.pipe)
    return Options(**values, pipes=pipes, streams=numbers(args.streams, "streams"))


def _listen(address: str, token_file: str) -> int:
    try:
        host, port = split_address(address)
    except PipeClosedError as error:
        raise ConfigError(f"--listen: {error.message}", field="listen") from error
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    listener = Listener(host, port, read_token(token_file), token_file)
    try:
        sys.stderr.write(f"listening on {listener.address}; Ctrl-C ends\n")
        sys.stderr.flush()
        listener.serve()
    finally:
        listener.close()
    return 0


class _progress:
    """A progress bar on standard error, where that is a terminal."""

    def __init__(self) -> None:
        console = Console(stderr=True)
        columns = (TextColumn("{task.description:<32}"), BarColumn(), TimeElapsedColumn())
        self._bar = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
        self._task = self._bar.add_task("starting", total=None)
        self._done = 0

    def __enter__(self) -> Callable[[str, int], None]:
        self._bar.start()
        return self._step

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def _step(self, what: str, left: int) -> None:
        self._done += 1
        self._bar.update(self._task, description=what, completed=self._done, total=self._done + left)
