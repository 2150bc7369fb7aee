"""``baton status``: the instances, their load, and the throughput and latency of requests."""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from baton.cli.router import HTTP_HINT, NOTHING, add_http_flags, http_asker, plain
from baton.errors import BatonError, ConfigError, UnavailableError

_FILE_WIDTH = 140
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
    """Show the status; returns the exit status: 1 if an instance is not healthy."""
    if not 0.1 <= args.interval_s <= 3600:
        raise ConfigError("--interval-s must be between 0.1 and 3600", field="interval_s")
    ask = http_asker(args)
    state = ask("/debug/console")
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = _FILE_WIDTH
    if args.watch:
        _watch(args, ask, state, console)
    elif args.json:
        print(json.dumps(state, indent=2))
    else:
        console.print(render(state))
    return int(any(each["status"] != "ready" for each in state["instances"]) or not state["instances"])


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
    """Return the table of a router's state."""
    now = state["now"]
    hit = now["hit_rate"]
    facts = (
        f"{plain(state['model'])}, policy {plain(state['policy'])}",
        f"{state['running']} running, {state['queued']} queued, {state['seen']} seen",
        f"{_rate(now['requests_per_s'])} requests/s, {_rate(now['tokens_per_s'])} tokens/s",
        f"hit rate {NOTHING if hit is None else f'{hit:.0%}'}",
        f"TTFT {_times(now['ttft_ms'])}, ITL {_times(now['itl_ms'])}",
        f"{now['failed']:.0f} failed",
    )
    table = Table()
    for name in (
        "instance",
        "role",
        "status",
        "running",
        "waiting",
        "loading",
        "in flight",
        "KV used",
        "",
        "cached",
        "index",
    ):
        table.add_column(name, justify="left" if name in ("instance", "role", "status", "index", "") else "right")
    for each in sorted(state["instances"], key=lambda each: (each["role"] != "prefill", each["id"])):
        total = each["blocks_total"] or 1
        used = each["blocks_active"] / total
        status = "draining" if each["draining"] else each["status"]
        colour = {"ready": "green", "draining": "yellow"}.get(status, "red")
        reason = f" ({plain(each['reason'])})" if each["reason"] else ""
        table.add_row(
            plain(each["id"]),
            each["role"],
            Text(plain(status) + reason, style=colour),
            *(str(each[name]) for name in ("running", "waiting", "loading", "in_flight")),
            f"{used:.0%}",
            _bar(used),
            f"{each['blocks_cached'] / total:.0%}",
            plain(each["index"]["state"]),
        )
    return Group(Text("   ".join(facts[:3])), Text("   ".join(facts[3:])), table)


def _bar(share: float) -> Text:
    full = round(_BAR * min(1.0, share))
    colour = "green" if share < 0.7 else "yellow" if share < 0.9 else "red"
    return Text("\u2588" * full, style=colour) + Text("\u2591" * (_BAR - full), style="dim")


def _rate(value: float | None) -> str:
    return NOTHING if value is None else f"{value:.1f}"


def _times(value: dict[str, float] | None) -> str:
    return NOTHING if not value else f"{value['p50']:.0f} / {value['p99']:.0f} ms"
