"""``baton status``: the instances, what they have to do, and what comes out of it."""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from baton.cli.router_http import HINT, NOTHING, add_http_flags, http_asker, plain
from baton.errors import BatonError, ConfigError, UnavailableError

_FILE_WIDTH = 140
_BAR = 10


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command."""
    parser = commands.add_parser("status", help="instances, load, KV, hit rate and queues, as a router sees them")
    parser.add_argument("--watch", action="store_true", help="go on showing it until Ctrl-C")
    parser.add_argument(
        "--interval-s", type=float, default=1.0, help="with --watch: seconds between looks (default: 1)"
    )
    parser.add_argument("--json", action="store_true", help="what the router answers; with --watch a line per look")
    add_http_flags(parser)
    parser.set_defaults(run=run, hint=HINT)


def run(args: argparse.Namespace) -> int:
    """Show it; returns the exit status: 1 if an instance is not healthy.

    Raises:
        ConfigError: The arguments cannot work.
        BatonError: No answer; with ``--watch`` only of the first look.
    """
    if not 0.1 <= args.interval_s <= 3600:
        raise ConfigError("--interval-s must be between 0.1 and 3600", field="interval_s")
    ask = http_asker(args)
    found = ask("/debug/console")
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = _FILE_WIDTH
    if args.watch:
        _watch(args, ask, found, console)
    elif args.json:
        print(json.dumps(found, indent=2))
    else:
        console.print(render(found))
    return int(any(each["status"] != "ready" for each in found["instances"]) or not found["instances"])


def _watch(args: argparse.Namespace, ask: Any, found: dict[str, Any], console: Console) -> None:
    if args.json:
        while True:
            print(json.dumps(found), flush=True)
            time.sleep(args.interval_s)
            found = ask("/debug/console")
    with Live(render(found), console=console, screen=console.is_terminal, auto_refresh=False) as live:
        while True:
            time.sleep(args.interval_s)
            try:
                live.update(render(ask("/debug/console")), refresh=True)
            except UnavailableError as error:  # a router that starts again is shown when it is back
                live.update(Group(render(found), Text(plain(error.message), style="red")), refresh=True)
            except BatonError:
                raise


def render(found: dict[str, Any]) -> Group:
    """Return what is shown of a look."""
    now = found["now"]
    hit = now["hit_rate"]
    facts = (
        f"{plain(found['model'])}, policy {plain(found['policy'])}",
        f"{found['running']} running, {found['queued']} queued, {found['seen']} seen",
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
    for each in sorted(found["instances"], key=lambda each: (each["role"] != "prefill", each["id"])):
        total = each["blocks_total"] or 1
        used = each["blocks_active"] / total
        state = "draining" if each["draining"] else each["status"]
        colour = {"ready": "green", "draining": "yellow"}.get(state, "red")
        reason = f" ({plain(each['reason'])})" if each["reason"] else ""
        table.add_row(
            plain(each["id"]),
            each["role"],
            Text(plain(state) + reason, style=colour),
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
