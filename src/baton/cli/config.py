"""``baton config``: the effective configuration of a deployment's services, and the schema of its file."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from baton.cli.plan import autoscale_config, own_flags, own_token, plan_from, read_file, service_configs
from baton.cli.supervisor import ProcessSpec
from baton.cli.up import add_deployment_flags
from baton.config import add_flags
from baton.config.autoscale import AutoscaleConfig
from baton.config.cluster_file import ROLES, ClusterFile, cluster_schema
from baton.config.flags import resolve
from baton.config.secrets import shown_url
from baton.errors import ConfigError

_EPILOG = """sources:
  flag            given to baton up, or worked out of what was
  baton up        set by baton up, so that the services find each other
  BATON_...       a variable of the environment
  FILE:LINE       the file that --config names
  default         set nowhere (with --all)
"""


@dataclass(frozen=True, slots=True)
class Effective:
    """Effective value of a flag, and its source."""

    service: str
    name: str
    value: Any
    source: str


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("config", help="effective configuration of baton up, and the schema of its file")
    what = parser.add_subparsers(title="commands", required=True, metavar="COMMAND", dest="what")
    add_show_parser(what)
    add_schema_parser(what)


def add_show_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "show",
        help="what baton up with the same flags would tell each service, and where each value is from",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--service", default="", metavar="NAME", help="router, kvstore, autoscale or a pool (default: all)"
    )
    parser.add_argument("--all", action="store_true", help="defaults, too")
    parser.add_argument("--json", action="store_true", help="JSON instead of a table")
    add_deployment_flags(parser)
    parser.set_defaults(run=show)


def add_schema_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("schema", help="JSON Schema of the file that baton up -f reads")
    parser.set_defaults(run=schema)


def schema(args: argparse.Namespace) -> int:
    """Print the schema; returns the exit status."""
    sys.stdout.write(json.dumps(cluster_schema(service_configs()), indent=2, ensure_ascii=False) + "\n")
    return 0


def show(args: argparse.Namespace) -> int:
    """Print the effective configuration; returns the exit status."""
    file = read_file(args)
    with own_token(args, file):
        plan = plan_from(args, file, will_run=False)
    specs: dict[str, ProcessSpec] = {}
    for group in plan.groups:
        for spec in group:
            specs.setdefault(spec.name.rpartition("-")[0] or spec.name, spec)
    autoscale = autoscale_config(args, file) is not None
    known = [*specs, *(["autoscale"] if autoscale else [])]
    if args.service and args.service not in known:
        raise ConfigError(f"--service must be one of {', '.join(known)}, got {args.service!r}", field="service")
    rows = [each for name, spec in specs.items() if args.service in ("", name) for each in effective(name, spec, file)]
    if autoscale and args.service in ("", "autoscale"):
        resolved = resolve(AutoscaleConfig, args, file=file.values("autoscale"))
        rows += [
            Effective("autoscale", name.replace("_", "-"), each.value, each.source) for name, each in resolved.items()
        ]
    chosen = [each for each in rows if args.all or each.source != "default"]
    if args.json:
        sys.stdout.write(json.dumps([dataclasses.asdict(each) for each in chosen], indent=2) + "\n")
    else:
        _print(chosen)
    return 0


def effective(name: str, spec: ProcessSpec, file: ClusterFile) -> list[Effective]:
    """Return the effective configuration of a process.

    Args:
        name: ``router``, ``kvstore`` or the name of the pool.
        spec: How the process would be started.
        file: The cluster file.
    """
    configs: Sequence[type] = service_configs()["worker" if spec.role in ROLES else spec.role]
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--config")
    parser.add_argument("--pool")
    for config in configs:
        add_flags(parser, config)
    args = parser.parse_args(spec.args)
    env: Mapping[str, str] = {**os.environ, **dict(spec.env)}
    values = file.values(name)
    rows = []
    for config in configs:
        items = {item.name: item for item in dataclasses.fields(config)}
        for field, each in resolve(config, args, env=env, file=values).items():
            if items[field].metadata.get("help") is None:
                continue
            source = "baton up" if each.source == "flag" and field in own_flags(spec.role) else each.source
            value = each.value
            if items[field].metadata.get("secret") and isinstance(value, str) and not value.startswith("@"):
                value = shown_url(value) if "://" in value or ":" in value else "..." if value else ""
            rows.append(
                Effective(name, field.replace("_", "-"), list(value) if isinstance(value, tuple) else value, source)
            )
    return rows


def _print(rows: Sequence[Effective]) -> None:
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 160
    table = Table("service", "flag", "value", "from")
    service = ""
    for each in rows:
        if service and each.service != service:
            table.add_section()
        service = each.service
        value = ",".join(map(str, each.value)) if isinstance(each.value, list) else str(each.value)
        table.add_row(each.service, each.name, value, each.source)
    console.print(table)
