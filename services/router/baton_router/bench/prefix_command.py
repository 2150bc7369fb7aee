"""``baton bench prefixes``: how much of a data set is shared."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import orjson

from baton.errors import ConfigError, shown
from baton_router.bench.command import guarded


def add_parser(benches: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare ``prefixes``."""
    parser = benches.add_parser("prefixes", help="how many conversations of a data set begin like others")
    parser.add_argument(
        "--dataset",
        required=True,
        metavar="FILE",
        help="JSON lines with hash_ids (blocks), token_ids, prompt, messages or conversations (characters)",
    )
    parser.add_argument("--longer-than", default="1,2,4,8,16,32,64", help="prefix lengths, in the data set's unit")
    parser.add_argument("--seen", default="2,3,5,10", help="how many conversations must begin so")
    parser.add_argument("--limit", type=int, default=None, help="lines at most")
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output instead of a table")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Count; returns the exit status."""
    return guarded("prefixes", lambda: _count(args))


def _count(args: argparse.Namespace) -> int:
    from rich.console import Console
    from rich.table import Table

    from baton_router.bench.prefixes import read_dataset, repeated_prefixes

    lengths, times = _numbers(args.longer_than, "longer_than", 0), _numbers(args.seen, "seen", 2)
    data = read_dataset(Path(args.dataset), args.limit)
    total = len(data.sequences)
    shares = {}
    for seen in times:
        longest = repeated_prefixes(data.sequences, seen)
        shares[seen] = {length: sum(x > length for x in longest) / total for length in lengths}
    if args.json:
        rows = [{"seen": s, "longer_than": n, "share": x} for s, row in shares.items() for n, x in row.items()]
        found = {"dataset": Path(args.dataset).name, "conversations": total, "unit": data.unit, "shares": rows}
        sys.stdout.buffer.write(orjson.dumps(found, option=orjson.OPT_INDENT_2) + b"\n")
        return 0
    table = Table(title=f"{total:,} conversations: share with a prefix that others begin with too")
    table.add_column(f"longer than ({data.unit})", justify="right")
    for seen in times:
        table.add_column(f"seen {seen}x", justify="right")
    for length in lengths:
        table.add_row(f"{length:,}", *(f"{shares[seen][length]:.1%}" for seen in times))
    Console(highlight=False).print(table)
    return 0


def _numbers(text: str, field: str, least: int) -> list[int]:
    """Read numbers with commas between them.

    Raises:
        ConfigError: They are none, or too small; names the flag.
    """
    flag = "--" + field.replace("_", "-")
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(f"{flag} takes numbers, got {shown(text)}", field=field) from None
    if min(numbers) < least:
        raise ConfigError(f"{flag} must be at least {least}, got {min(numbers)}", field=field)
    return numbers
