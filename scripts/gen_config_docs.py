"""Writes the flag lists of docs/configuration.md from the code; ``--check`` fails if they are out of date.

Each list is between ``<!-- flags: NAME -->`` and ``<!-- end flags -->``; everything else in the file is prose. What
several commands have alike is one list of its own (``SHARED``) and left out of theirs.
"""

from __future__ import annotations

import argparse
import dataclasses
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from baton.cli import autoscale, chat, config, demo, explain, instances, kvstore, status, up
from baton.config import EngineConfig
from baton.config.autoscale import AutoscaleConfig
from baton.config.flags import flag_fields
from baton.config.kvstore import KVStoreConfig
from baton.config.router import RouterConfig
from baton.config.worker import WorkerConfig
from baton.quantize import command as quantize_command
from baton.worker.process import add_config_flags
from baton_bench import commands

DOC = Path(__file__).resolve().parents[1] / "docs" / "configuration.md"
SECTION = re.compile(r"(?<=<!-- flags: )([a-z]+)( -->\n).*?(?=<!-- end flags -->)", re.DOTALL)
CONFIGS = {
    "router": RouterConfig,
    "worker": WorkerConfig,
    "engine": EngineConfig,
    "kvstore": KVStoreConfig,
    "controller": AutoscaleConfig,
}
COMMANDS = {
    "up": up.add_parser,
    "configshow": config.add_show_parser,
    "status": status.add_parser,
    "chat": chat.add_chat_parser,
    "generate": chat.add_generate_parser,
    "drain": instances.add_drain_parser,
    "scale": instances.add_scale_parser,
    "autoscale": autoscale.add_parser,
    "demo": demo.add_parser,
    "health": instances.add_health_parser,
    "explain": explain.add_parser,
    "storetenants": kvstore.add_tenants_parser,
    "storeclear": kvstore.add_clear_parser,
    "bench": commands.add_kv_parser,
    "serve": commands.add_serve_parser,
    "offline": commands.add_offline_parser,
    "quality": commands.add_quality_parser,
    "quantize": quantize_command.add_parser,
    "replay": commands.add_router_parser,
    "storebench": commands.add_store_parser,
    "prefixes": commands.add_prefixes_parser,
    "profile": commands.add_profile_parser,
    "plan": commands.add_plan_parser,
    "tune": commands.add_tune_parser,
}


SHARED = {
    "services": ("router", "worker", "kvstore"),
    "secure": ("storetenants", "profile", "drain"),
    "calls": ("chat", "generate", "drain", "scale"),
    "deployment": ("up", "configshow"),
    "load": ("serve", "tune"),
}
"""By table the tables whose equal rows it has."""
LEFT_OUT = {
    **dict.fromkeys(("router", "worker", "kvstore"), ("services",)),
    **dict.fromkeys(("chat", "generate", "drain", "scale", "autoscale"), ("calls", "secure")),
    **dict.fromkeys(("storetenants", "storeclear", "profile", "load", "calls"), ("secure",)),
    **dict.fromkeys(("up", "configshow"), ("deployment",)),
    **dict.fromkeys(("serve", "tune"), ("load", "secure")),
}
"""By table the shared tables whose rows it leaves out."""


def config_rows(cls: type) -> Iterator[tuple[str, str, str]]:
    """Yield flag, default and meaning of each option of a configuration class."""
    for item in flag_fields(cls):
        if item.metadata.get("help") is None:
            continue
        choices = item.metadata.get("choices")
        text = item.metadata["help"]
        if choices and not all(re.search(rf"\b{re.escape(each)}\b", text) for each in choices):
            text += f"; one of {', '.join(choices)}"
        flag = "--" + item.name.replace("_", "-")
        if isinstance(item.default, bool):
            flag += f"`, `--no-{item.name.replace('_', '-')}"
        yield flag, _default(item.default), text


def file_rows(name: str) -> Iterator[tuple[str, str, str]]:
    """Yield the flags that name a service's configuration file."""
    parser = argparse.ArgumentParser(add_help=False)
    add_config_flags(parser, "decode" if name == "worker" else name)
    for action in parser._actions:
        default = "the role" if action.dest == "pool" else ""
        yield action.option_strings[-1], default, action.help or ""


def command_rows(name: str) -> Iterator[tuple[str, str, str]]:
    """Yield flag, default and meaning of each argument of a command; flags of tables of their own are left out."""
    subparsers = argparse.ArgumentParser().add_subparsers()
    COMMANDS[name](subparsers)
    (parser,) = subparsers.choices.values()
    elsewhere: list[type] = []
    if name in ("up", "configshow", "offline", "profile", "quality"):
        elsewhere.append(EngineConfig)
    if name in ("up", "configshow", "autoscale"):
        elsewhere.append(AutoscaleConfig)
    left_out = {item.name for config in elsewhere for item in dataclasses.fields(config)}
    for action in parser._actions:
        if isinstance(action, argparse._HelpAction) or action.dest in left_out:
            continue
        flag = "`, `".join(action.option_strings) or str(action.metavar)
        default = _default(action.default)
        yield flag, default, (action.help or "").replace("%%", "%").removesuffix(f" (default: {default})")


def _default(value: object) -> str:
    if value == argparse.SUPPRESS or (value in (None, "", (), False) and value != 0):
        return ""
    if value is False:
        return "off"
    if value is True:
        return "on"
    if isinstance(value, tuple):
        return ",".join(value)
    return f"{value:g}" if isinstance(value, float) else str(value)


def rows_of(name: str) -> list[tuple[str, str, str]]:
    """Return all rows of a table, also those that it leaves out."""
    if name in SHARED:
        first, *others = (rows_of(each) for each in SHARED[name])
        return [row for row in first if all(row in rows for rows in others)]
    rows = list(command_rows(name) if name in COMMANDS else config_rows(CONFIGS[name]))
    return [*file_rows(name), *rows] if name in ("router", "worker", "kvstore") else rows


def table(name: str) -> str:
    """Return the table of a section."""
    elsewhere = {row for shared in LEFT_OUT.get(name, ()) for row in rows_of(shared)}
    rows = [row for row in rows_of(name) if row not in elsewhere]
    lines = [f"- {_with_default(flag, default)}: {_plain(text)}" for flag, default, text in rows]
    return "\n" + "\n".join(lines) + "\n\n"


def _with_default(flag: str, default: str) -> str:
    if not default:
        return f"`{flag}`"
    if "`, `" in flag or re.search(r"[` |]", default):  # a flag with its opposite, or a text
        return f"`{flag}` ({_code(default)})"
    return f"`{flag}={default}`"


def _code(text: str) -> str:
    fence = "``" if "`" in text else "`"
    return f"{fence}{text}{fence}"


def _plain(text: str) -> str:
    return text.replace("<", "&lt;")


def render(text: str) -> str:
    """Return the document with fresh tables.

    Raises:
        ValueError: A table that there should be has no place in it.
    """
    found = {match[1] for match in SECTION.finditer(text)}
    if missing := (CONFIGS.keys() | COMMANDS.keys() | SHARED.keys()) - found:
        raise ValueError(f"{DOC.name} has no place for the flags of {', '.join(sorted(missing))}")
    return SECTION.sub(lambda match: match[1] + match[2] + table(match[1]), text)


def main() -> int:
    """Write or check; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing, fail if the tables are out of date")
    args = parser.parse_args()
    old = DOC.read_text(encoding="utf-8")
    new = render(old)
    if args.check:
        if old != new:
            print(f"{DOC.name} is out of date: run scripts/gen_config_docs.py", file=sys.stderr)
        return int(old != new)
    DOC.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
