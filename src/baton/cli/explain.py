"""``baton explain``: the router's record of why a request was placed on its instances."""

from __future__ import annotations

import argparse
import json
import re
import urllib.parse
from datetime import datetime
from typing import Annotated, Any, NotRequired, TypedDict

from msgspec import Meta
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from baton.cli.printable import NOTHING, escaped, plain
from baton.cli.router import HTTP_HINT, add_http_flags, http_asker
from baton.cli.tables import Column, FittedTable, open_console
from baton.errors import ConfigError

Terms = Annotated[dict[str, float | None], Meta(max_length=100)]


class Decision(TypedDict):
    """A request in the list."""

    id: str
    time: Annotated[float, Meta(ge=0, lt=2**37)]  # what a datetime can have
    outcome: str
    prefill: str | None
    decode: str | None
    path: str | None
    kv_bytes: float
    match_rate: float | None
    ttft_ms: float | None


class Decisions(TypedDict):
    """What of ``/debug/decisions`` is shown."""

    decisions: Annotated[list[Decision], Meta(max_length=500)]


class Candidate(TypedDict):
    """An instance that was scored."""

    instance: str
    role: str
    match_rate: float | None
    load: float | None
    score: float | None
    terms: Terms
    own: NotRequired[Terms]
    partner: NotRequired[str | None]
    partner_terms: NotRequired[Terms]
    pair_terms: NotRequired[Terms]
    winner: bool


class Placement(TypedDict):
    """One time that the request was placed."""

    at_ms: float | None
    index_state: str
    candidates: Annotated[list[Candidate], Meta(max_length=10_000)]


class Trace(TypedDict, total=False):
    """What the instances know of the request."""

    pipe: str | None
    kv_bytes: float
    transfer_ms: float
    exposed_ms: float
    queue_ms: float
    cached_tokens: int
    transferred_tokens: int
    recomputed_tokens: int
    migrations: int
    preemptions: int
    failed_prefills: list[str]


class Explanation(TypedDict):
    """What of ``/debug/decisions/{id}`` is shown."""

    id: str
    time_iso: str
    outcome: str
    why: list[str]
    placements: Annotated[list[Placement], Meta(max_length=1_000)]
    trace: Trace | None
    ttft_ms: float | None
    duration_ms: float | None
    path: str | None
    reason: str | None
    prefill: str | None
    decode: str | None
    prompt_tokens: int
    generated_tokens: int
    others: NotRequired[list[str]]


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("explain", help="why a request went where it went; without an id: the latest requests")
    text = "the answer's id, its x-request-id, or the id in the instances' logs"
    parser.add_argument("request_id", metavar="REQUEST_ID", nargs="?", default="", help=text)
    add_http_flags(parser)
    parser.add_argument("--limit", type=int, default=20, help="requests to list at most (default: 20)")
    parser.add_argument("--json", action="store_true", help="print what the router answers")
    parser.set_defaults(run=run, hint=HTTP_HINT)


def run(args: argparse.Namespace) -> int:
    """Get the explanation and print it; returns the exit status."""
    if not 1 <= args.limit <= 500:
        raise ConfigError(f"--limit must be between 1 and 500, got {args.limit}", field="limit")
    ask = http_asker(args)
    console = open_console()
    if args.request_id:
        answer, explanation = ask("/debug/decisions/" + urllib.parse.quote(args.request_id, safe=""), Explanation)
        if not args.json:
            print_explanation(console, explanation)
    else:
        answer, decisions = ask(f"/debug/decisions?limit={args.limit}", Decisions)
        if not args.json:
            print_list(console, decisions)
    if args.json:
        print(escaped(json.dumps(answer, indent=2)))
    return 0


# --- printing ---


def print_list(console: Console, answer: Decisions) -> None:
    """Print one line per request, the request's name last: for copying."""
    if not answer["decisions"]:
        print("no requests yet")
        return
    columns = [
        Column("time", "left", rank=3),
        *(Column(name, "left") for name in ("prefill", "decode")),
        Column("path", "left", rank=4),
        Column("match", rank=5),
        Column("TTFT", rank=2),
        Column("KV", rank=6),
        Column("outcome", "left", rank=1),
        Column("request", "left"),
    ]
    rows = []
    for x in answer["decisions"]:
        arrived = datetime.fromtimestamp(x["time"]).strftime("%H:%M:%S")
        numbers = (_percent(x["match_rate"]), _ms(x["ttft_ms"]), _bytes(x["kv_bytes"]))
        texts = (arrived, x["prefill"], x["decode"], x["path"], *numbers, x["outcome"], _name(x["id"]))
        rows.append([_cell(text) for text in texts])
    console.print(FittedTable(columns, rows))


def _name(request_id: str) -> str:
    """Return the request id that the client knows; ``baton explain`` accepts it, too."""
    head, _, tail = request_id.rpartition("-")
    return head if re.fullmatch("[0-9a-f]{32}", tail) else request_id


def print_explanation(console: Console, x: Explanation) -> None:
    """Print the explanation of one request."""
    console.print(_cell(x["id"]), style="bold", soft_wrap=True)
    console.print(f"{plain(x['time_iso'])}, {plain(x['outcome'])}\n", markup=False)
    for line in x["why"]:
        console.print(Text("- ") + _cell(line))
    for at, placement in enumerate(x["placements"], 1):
        for role in ("decode", "prefill"):
            rows = [row for row in placement["candidates"] if row["role"] == role]
            if rows:
                console.print()
                console.print(_candidates(at, placement, role, rows))
    console.print()
    console.print(_facts(x))
    others = x.get("others", [])
    if others:
        console.print(f"\n{len(others)} more of this name: ", _cell(", ".join(others)))


def _candidates(at: int, placement: Placement, role: str, found: list[Candidate]) -> Group:
    """Return a table whose numbers add up from left to right: own terms, their sum, the partner's, the score."""
    rows: list[dict[str, Any]] = [
        {"own": row["terms"], "partner": None, "partner_terms": {}, "pair_terms": {}, **row} for row in found
    ]
    terms = list(dict.fromkeys(name for row in rows for name in row["own"]))
    pairs = any(row["partner"] for row in rows)
    columns = [
        Column("instance", "left"),
        Column("match rate", rank=2),
        Column("load x mean", rank=6),
        *(Column(plain(term if position == 0 else f"+ {term}"), rank=5) for position, term in enumerate(terms)),
    ]
    if pairs:
        columns += [Column("= own", rank=3), Column("with", "left", rank=1), Column("+ partner", rank=3)]
        columns += [Column("+ pair", rank=4)] if any(row["pair_terms"] for row in rows) else []
    columns += [Column("= pair score" if pairs else "= score"), Column("", "left")]
    cells = []
    for row in rows:
        texts = [plain(row["instance"]), _percent(row["match_rate"]), _number(row["load"])]
        texts += [_number(row["own"].get(term)) for term in terms]
        if pairs:
            texts += [_number(_sum(row["own"])), plain(row["partner"]), _number(_sum(row["partner_terms"]))]
            texts += [_number(_sum(row["pair_terms"]))] if any(x["pair_terms"] for x in rows) else []
        texts += [_number(row["score"]), "chosen" if row["winner"] else ""]
        cells.append([Text(text) for text in texts])
    which = f"{at}. placement, after {_ms(placement['at_ms'])}: " if at > 1 else ""
    partner = "each with its best partner, " if role == "decode" else "each with the chosen decode instance, "
    title = f"{which}{role} candidates, {partner if pairs else ''}index {plain(placement['index_state'])}"
    styles = ["bold" if row["winner"] else "" for row in rows]
    return Group(Text(title, style="bold"), FittedTable(columns, cells, styles))


def _sum(terms: dict[str, float | None]) -> float | None:
    """Return the sum of terms; ``None``: one is infinite, the mark of what is impossible."""
    known = [value for value in terms.values() if value is not None]
    return sum(known) if len(known) == len(terms) else None


def _facts(x: Explanation) -> Table:
    trace: Trace = x["trace"] or {}
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    for _ in range(2):
        table.add_column(overflow="fold")
    sources = f"{trace.get('cached_tokens', 0)} cached, {trace.get('transferred_tokens', 0)} transferred, "
    moved = f"{_bytes(trace['kv_bytes'])} in {_ms(trace.get('transfer_ms'))}" if trace.get("kv_bytes") else "none"
    for name, value in (
        ("TTFT / whole time", f"{_ms(x['ttft_ms'])} / {_ms(x['duration_ms'])}"),
        ("path", f"{x['path'] or NOTHING}" + (f" ({x['reason']})" if x["reason"] else "")),
        ("prefill -> decode", f"{x['prefill'] or NOTHING} -> {x['decode'] or NOTHING}"),
        ("pipe", trace.get("pipe")),
        ("KV moved", moved),
        ("transfer added to TTFT", _ms(trace.get("exposed_ms"))),
        ("queue on decode", _ms(trace.get("queue_ms"))),
        ("prompt tokens", f"{x['prompt_tokens']}: {sources}{trace.get('recomputed_tokens', 0)} computed on decode"),
        ("generated tokens", str(x["generated_tokens"])),
        ("migrations / preemptions", f"{trace.get('migrations', 0)} / {trace.get('preemptions', 0)}"),
        ("failed prefill candidates", ", ".join(trace.get("failed_prefills", ())) or "none"),
    ):
        table.add_row(Text(name, style="dim"), _cell(value))
    return table


def _cell(value: object) -> Text:
    return Text(plain(value))


def _percent(share: float | None) -> str:
    return NOTHING if share is None else f"{share:.0%}"


def _ms(value: float | None) -> str:
    return NOTHING if value is None else f"{value:.1f} ms"


def _number(value: float | None) -> str:
    return NOTHING if value is None else f"{value:.3f}" if abs(value) < 1000 else f"{value:,.0f}"


def _bytes(value: float) -> str:
    for size, unit in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if value >= size:
            return f"{value / size:.1f} {unit}"
    return f"{value:.0f} B"
