"""``baton status``: the instances, their load, and the throughput and latency of requests."""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from baton.cli.router import HTTP_HINT, NOTHING, add_http_flags, http_asker, plain
from baton.cli.tables import Column, Facts, FittedTable, open_console
from baton.errors import BatonError, ConfigError, UnavailableError

_BAR = 10


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
    state = ask("/debug/console")
    console = open_console()
    if args.watch:
        _watch(args, ask, state, console)
    elif args.json:
        print(json.dumps(state, indent=2))
    else:
        console.print(render(state))
    return int(any(_status(each) not in ("ready", "draining") for each in state["instances"]) or not state["instances"])


def _watch(args: argparse.Namespace, ask: Any, state: dict[str, Any], console: Console) -> None:
    if args.json:
        while True:
            print(json.dumps(state), flush=True)
            time.sleep(args.interval_s)
            state = ask("/debug/console")
    with Live(render(state), console=console, screen=console.is_terminal, auto_refresh=False) as live:
        while True:
            time.sleep(args.interval_s)
            try:
                live.update(render(ask("/debug/console")), refresh=True)
            except UnavailableError as error:  # a restarted router is shown when it is back
                live.update(Group(render(state), Text(plain(error.message), style="red")), refresh=True)
            except BatonError:
                raise


def render(state: dict[str, Any]) -> Group:
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


def _cells(each: dict[str, Any]) -> list[Text]:
    if each["status"] == "lost":
        unknown = [Text(NOTHING)] * (len(_COLUMNS) - 3)
        return [Text(plain(each["id"])), Text(each["role"]), Text("lost", style="red"), *unknown]
    total = each["blocks_total"] or 1
    used = each["blocks_active"] / total
    status = _status(each)
    colour = {"ready": "green", "draining": "yellow"}.get(status, "red")
    return [
        Text(plain(each["id"])),
        Text(each["role"]),
        Text(plain(status), style=colour),
        *(Text(str(each[name])) for name in ("in_flight", "running", "waiting", "loading")),
        Text(f"{used:.0%}"),
        _bar(used),
        Text(f"{each['blocks_cached'] / total:.0%}"),
        Text(plain(each["index"]["state"])),
    ]


def _status(each: dict[str, Any]) -> str:
    """Return an instance's status; one that is connected and does not answer is ``silent``."""
    if each["draining"]:
        return "draining"
    return "silent" if each["status"] == "ready" and each.get("silent") else str(each["status"])


def _trouble(each: dict[str, Any]) -> Text | None:
    """Return a line on what is wrong with an instance; ``None``: nothing is known."""
    if each["status"] == "lost":
        return Text(f"{plain(each['id'])} was lost {each['lost_s']:.0f} s ago: {plain(each['reason'])}", style="red")
    if not each["reason"]:
        return None
    return Text(f"{plain(each['id'])} is {plain(each['status'])}: {plain(each['reason'])}", style="red")


def _bar(share: float) -> Text:
    full = round(_BAR * min(1.0, share))
    colour = "green" if share < 0.7 else "yellow" if share < 0.9 else "red"
    return Text("\u2588" * full, style=colour) + Text("\u2591" * (_BAR - full), style="dim")


def _rate(value: float | None) -> str:
    return NOTHING if value is None else f"{value:.1f}"


def _times(value: dict[str, float] | None) -> str:
    return NOTHING if not value else f"{value['p50']:.0f} / {value['p99']:.0f} ms"
