"""``baton bench store --trace``: every policy at every size, as a table or as JSON."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import orjson
from rich.console import Console
from rich.table import Table

from baton.errors import ConfigError, shown
from baton_kvstore.bench.replay import BLOCK_TOKENS, REPLAYED, Chains, ReplayRecord, best_hit_rate, read_chains, replay
from baton_kvstore.bench.run import FILE_WIDTH, numbers, words

MAX_BLOCKS = 1 << 24


def replay_all(args: argparse.Namespace, command: str) -> int:
    """Replay and show; returns the exit status.

    Raises:
        ConfigError: A flag or a file that cannot work.
    """
    policies, sizes = words(args.policy), numbers(args.blocks, "blocks")
    unknown = sorted(set(policies) - set(REPLAYED))
    if unknown or not policies:
        raise ConfigError(f"--policy takes some of {','.join(REPLAYED)}, got {shown(args.policy)}", field="policy")
    if not sizes or not all(1 <= size <= MAX_BLOCKS for size in sizes):
        raise ConfigError(f"--blocks takes numbers from 1 to {MAX_BLOCKS}", field="blocks")
    if args.limit is not None and args.limit < 1:
        raise ConfigError(f"--limit must be at least 1, got {args.limit}", field="limit")
    chains = read_chains(Path(args.trace), args.limit)
    records = [replay(chains, policy, size) for size in sizes for policy in policies]
    found = document(command, Path(args.trace).name, chains, records)
    if args.json:
        sys.stdout.buffer.write(orjson.dumps(found, option=orjson.OPT_INDENT_2) + b"\n")
        sys.stdout.flush()
        return 0
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = FILE_WIDTH
    print_replay(found, console)
    return 0


def document(command: str, name: str, chains: Chains, records: Sequence[ReplayRecord]) -> dict[str, Any]:
    """Return everything as one JSON object."""
    return {
        "command": command,
        "trace": name,
        "block_tokens": BLOCK_TOKENS,
        "requests": len(chains),
        "blocks": sum(map(len, chains)),
        "different_blocks": len({block for chain in chains for block in chain}),
        "best_hit_rate": round(best_hit_rate(chains), 6),
        "runs": [dataclasses.asdict(record) for record in records],
    }


def print_replay(found: dict[str, Any], console: Console) -> None:
    """Print a document for people."""
    console.print(
        f"{found['requests']:,} requests, {found['blocks']:,} blocks of {found['block_tokens']} tokens, "
        f"{found['different_blocks']:,} different ones; best possible hit rate {found['best_hit_rate']:.2%}",
        markup=False,
    )
    table = Table()
    for name in ("memory, blocks", "policy", "hits", "of best", "evictions", "µs per block"):
        table.add_column(name, justify="left" if name == "policy" else "right")
    for run in found["runs"]:
        table.add_row(
            f"{run['blocks']:,}",
            run["policy"],
            f"{run['hit_rate']:.2%}",
            f"{run['of_best']:.1%}",
            f"{run['evictions']:,}",
            f"{run['us_per_block']:.1f}",
        )
    console.print(table)
