"""``baton bench prefixes``: how many conversations of a data set begin with a prefix that others share."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from baton.errors import ConfigError, shown
from baton_bench.report import numbers, show_document
from baton_bench.traces import read_lines, whole_numbers


def count_prefixes(args: argparse.Namespace) -> int:
    """Count and show shared prefixes; returns the exit status.

    Raises:
        ConfigError: A flag or a file that cannot work.
    """
    lengths = _numbers(args.longer_than, "longer-than", 0)
    times = _numbers(args.seen, "seen", 2)
    data = read_dataset(Path(args.dataset), args.limit)
    total = len(data.sequences)
    rows = []
    for seen in times:
        longest = repeated_prefixes(data.sequences, seen)
        rows += [{"seen": seen, "longer_than": n, "share": sum(x > n for x in longest) / total} for n in lengths]
    result = {"dataset": Path(args.dataset).name, "conversations": total, "unit": data.unit, "shares": rows}
    show_document(result, _print_table, width=80, as_json=args.json)
    return 0


def _print_table(document: dict[str, Any], console: Console) -> None:
    table = Table(title=f"{document['conversations']:,} conversations: share with a prefix that others begin with too")
    table.add_column(f"longer than ({document['unit']})", justify="right")
    shares = {(row["seen"], row["longer_than"]): row["share"] for row in document["shares"]}
    times, lengths = ([*dict.fromkeys(key[part] for key in shares)] for part in (0, 1))
    for seen in times:
        table.add_column(f"seen {seen}x", justify="right")
    for length in lengths:
        table.add_row(f"{length:,}", *(f"{shares[seen, length]:.1%}" for seen in times))
    console.print(table)


def _numbers(text: str, flag: str, least: int) -> tuple[int, ...]:
    result = numbers(text, flag)
    if not result:
        raise ConfigError(f"--{flag} takes numbers, got {shown(text)}", field=flag)
    if min(result) < least:
        raise ConfigError(f"--{flag} must be at least {least}, got {min(result)}", field=flag)
    return result


@dataclass(frozen=True, slots=True)
class Dataset:
    """Sequences in a unit: ``blocks``, ``tokens`` or ``characters``."""

    unit: str
    sequences: list[Sequence[int] | str]


def read_dataset(path: Path, limit: int | None = None) -> Dataset:
    """Read JSON lines with ``hash_ids``, ``token_ids``, ``prompt``, ``messages`` or ``conversations``.

    Raises:
        ConfigError: The file cannot be read, a line has none of these, or lines are of different kinds.
    """
    unit = ""
    sequences = list[Sequence[int] | str]()
    for where, value in read_lines(path, limit):
        kind, sequence = _sequence(value, where)
        if unit and kind != unit:
            raise ConfigError(f"{where} is in {kind}, the lines before it in {unit}", field="dataset")
        unit = kind
        sequences.append(sequence)
    if not sequences:
        raise ConfigError(f"{path} has no line", field="dataset")
    return Dataset(unit, sequences)


def repeated_prefixes(sequences: Sequence[Sequence[int] | str], seen: int) -> list[int]:
    """Return for each sequence the length of the longest prefix that at least ``seen`` of all sequences begin with.

    A radix tree's counts without the tree: sequences are split into groups by what comes next, and a group with fewer
    than ``seen`` members is pruned, so what is unique is never looked at beyond where it parts from the others.
    """
    longest = [0] * len(sequences)
    groups = [(list(range(len(sequences))), 0)] if len(sequences) >= seen else []
    while groups:
        members, depth = groups.pop()
        depth = _common(sequences, members, depth)
        for at in members:
            longest[at] = depth
        branches: dict[Any, list[int]] = {}
        for at in members:
            if len(sequences[at]) > depth:
                branches.setdefault(sequences[at][depth], []).append(at)
        groups += [(branch, depth + 1) for branch in branches.values() if len(branch) >= seen]
    return longest


def _common(sequences: Sequence[Sequence[int] | str], members: list[int], depth: int) -> int:
    """Return the length of the members' common prefix, which is at least ``depth``."""
    first = sequences[members[0]]
    end = min(len(sequences[at]) for at in members)
    for at in members[1:]:
        other = sequences[at]
        if other[depth:end] != first[depth:end]:
            end = next(i for i in range(depth, end) if other[i] != first[i])
    return end


def _sequence(value: dict[str, Any], where: str) -> tuple[str, Sequence[int] | str]:
    if "hash_ids" in value:
        return "blocks", whole_numbers(value["hash_ids"], f"{where}: hash_ids", "hash_ids")
    if "token_ids" in value:
        return "tokens", whole_numbers(value["token_ids"], f"{where}: token_ids", "token_ids")
    if isinstance(value.get("prompt"), str):
        return "characters", str(value["prompt"])
    for name, role, text in (("messages", "role", "content"), ("conversations", "from", "value")):
        if isinstance(value.get(name), list):
            return "characters", "".join(_turns(value[name], role, text, f"{where}: {name}"))
    raise ConfigError(f"{where} has none of hash_ids, token_ids, prompt, messages and conversations", field="dataset")


def _turns(turns: list[Any], role: str, text: str, what: str) -> Iterator[str]:
    for number, turn in enumerate(turns):
        if not (isinstance(turn, dict) and isinstance(turn.get(role), str) and isinstance(turn.get(text), str)):
            message = f"{what}[{number}] must have the texts {role} and {text}, got {shown(turn)}"
            raise ConfigError(message, field="dataset")
        # Roles and turns are told apart by characters that no text has, as a chat template does.
        yield f"\0{turn[role]}\1{turn[text]}"
