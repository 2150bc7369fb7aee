"""``baton status``: the instances, their load, and the throughput and latency of requests."""

from __future__ import annotations

import argparse
import json
import time
from typing import Annotated, NotRequired, TypedDict

from msgspec import Meta
from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from baton.cli.printable import NOTHING, escaped, plain
from baton.cli.router import HTTP_HINT, Asker, add_http_flags, http_asker
from baton.cli.tables import Column, Facts, FittedTable, open_console
from baton.errors import BatonError, ConfigError, UnavailableError

_BAR = 10

Count = Annotated[int, Meta(ge=0, le=2**63 - 1)]


class Times(TypedDict):
    """Percentiles, in milliseconds."""

    p50: float
    p99: float


class Now(TypedDict):
    """The latest minute."""

    hit_rate: float | None
    requests_per_s: float | None
    tokens_per_s: float | None
    ttft_ms: Times | None
    itl_ms: Times | None
    failed: float


class Index(TypedDict):
    """An instance's part of the prefix index."""

    state: str


class Instance(TypedDict):
    """An instance."""

    id: str
    role: str
    status: str
    reason: str | None
    draining: bool
    silent: NotRequired[bool]
    lost_s: NotRequired[float | None]
    in_flight: Count
    running: Count
    waiting: Count
    loading: Count
    blocks_total: Count
    blocks_active: Count
    blocks_cached: Count
    index: Index


class State(TypedDict):
    """What of ``/debug/console`` is shown."""

    model: str | None
    policy: str
    running: Count
    queued: Count
    seen: Count
    now: Now
    stalled_s: NotRequired[float | None]
    instances: Annotated[list[Instance], Meta(max_length=10_000)]


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("status", help="instances, load, KV, hit rate and queues, as a router sees them")
    parser.add_argument("--watch", action="store_true", help="go on showing it until Ctrl-C")
    parser.add_argument(
        "--interval-s", type=float, default=1.0, help="with --watch: seconds between looks (default: 1)"
    )
    parser.add_argument("--json", action="store_true", help="what the router answers; with --watch a line per look")
    add_http_flags(parser)
    parser.set_defaults(run=run, hint=HTTP_HINT)


def run(args: argparse.Namespace) -> int:
    """Show the status; returns the exit status: 1 if an instance is not healthy or was lost."""
    if not 0.1 <= args.interval_s <= 3600:
        raise ConfigError("--interval-s must be between 0.1 and 3600", field="interval_s")
    ask = http_asker(args)
    answer, state = ask("/debug/console", State)
    console = open_console()
    if args.watch and args.json:
        while True:
            print(escaped(json.dumps(answer)), flush=True)
            time.sleep(args.interval_s)
            answer, _ = ask("/debug/console", State)
    elif args.watch:
        _watch(args, ask, state, console)
    elif args.json:
        print(escaped(json.dumps(answer, indent=2)))
    else:
        console.print(render(state))
    return int(any(_status(each) not in ("ready", "draining") for each in state["instances"]) or not state["instances"])


def _watch(args: argparse.Namespace, ask: Asker, state: State, console: Console) -> None:
    with Live(render(state), console=console, screen=console.is_terminal, auto_refresh=False) as live:
        while True:
            time.sleep(args.interval_s)
            try:
                live.update(render(ask("/debug/console", State)[1]), refresh=True)
            except UnavailableError as error:  # a restarted router is shown when it is back
                live.update(Group(render(state), Text(plain(error.message), style="red")), refresh=True)
            except BatonError:
                raise


def render(state: State) -> Group:
    """Return a router's state: facts, a table of the instances, and what is wrong with them."""
    now = state["now"]
    hit = now["hit_rate"]
    instances = sorted(state["instances"], key=lambda each: (each["role"] != "prefill", each["id"]))
    lost = sum(each["status"] == "lost" for each in instances)
    facts = [
        Text(f"{plain(state['model'])}, policy {plain(state['policy'])}"),
        *([Text(f"{lost} lost", style="bold red")] if lost else []),
        Text(f"{state['running']} running, {state['queued']} queued, {state['seen']} seen"),
        Text(f"{_rate(now['requests_per_s'])} requests/s, {_rate(now['tokens_per_s'])} tokens/s"),
        Text(f"hit rate {NOTHING if hit is None else f'{hit:.0%}'}"),
        Text(f"TTFT {_times(now['ttft_ms'])}"),
        Text(f"ITL {_times(now['itl_ms'])}"),
        Text(f"{now['failed']:.0f} failed"),
    ]
    stalled_s = state.get("stalled_s")
    if stalled_s:
        facts.append(Text(f"stalled: no token for {stalled_s:.0f} s", style="bold red"))
    table = FittedTable(_COLUMNS, [_cells(each) for each in instances])
    return Group(Facts(facts), Text(), table, *filter(None, map(_trouble, instances)))


_COLUMNS = (
    Column("instance", "left"),
    Column("role", "left", rank=1),
    Column("status", "left"),
    Column("in flight", rank=2),
    Column("running", rank=4),
    Column("waiting", rank=6),
    Column("loading", rank=7),
    Column("KV used", rank=3),
    Column("", "left", rank=8),
    Column("cached", rank=5),
    Column("index", "left", rank=9),
)


def _cells(each: Instance) -> list[Text]:
    if each["status"] == "lost":
        unknown = [Text(NOTHING)] * (len(_COLUMNS) - 3)
        return [Text(plain(each["id"])), Text(plain(each["role"])), Text("lost", style="red"), *unknown]
    total = each["blocks_total"] or 1
    used = each["blocks_active"] / total
    status = _status(each)
    colour = {"ready": "green", "draining": "yellow"}.get(status, "red")
    return [
        Text(plain(each["id"])),
        Text(plain(each["role"])),
        Text(plain(status), style=colour),
        *(Text(str(count)) for count in (each["in_flight"], each["running"], each["waiting"], each["loading"])),
        Text(f"{used:.0%}"),
        _bar(used),
        Text(f"{each['blocks_cached'] / total:.0%}"),
        Text(plain(each["index"]["state"])),
    ]


def _status(each: Instance) -> str:
    """Return an instance's status; one that is connected and does not answer is ``silent``."""
    if each["draining"]:
        return "draining"
    return "silent" if each["status"] == "ready" and each.get("silent") else each["status"]


def _trouble(each: Instance) -> Text | None:
    """Return a line on what is wrong with an instance; ``None``: nothing is known."""
    if each["status"] == "lost":
        ago = f"{each.get('lost_s') or 0:.0f} s ago"
        return Text(f"{plain(each['id'])} was lost {ago}: {plain(each['reason'])}", style="red")
    if not each["reason"]:
        return None
    return Text(f"{plain(each['id'])} is {plain(each['status'])}: {plain(each['reason'])}", style="red")


def _bar(share: float) -> Text:
    full = round(_BAR * min(1.0, share))
    colour = "green" if share < 0.7 else "yellow" if share < 0.9 else "red"
    return Text("\u2588" * full, style=colour) + Text("\u2591" * (_BAR - full), style="dim")


def _rate(value: float | None) -> str:
    return NOTHING if value is None else f"{value:.1f}"


def _times(value: Times | None) -> str:
    return NOTHING if not value else f"{value['p50']:.0f} / {value['p99']:.0f} ms"
