"""Prints everything a user of Baton can hold, as JSON: commands with flags, endpoints, metrics, RPCs, public names.

``--compare FILE`` prints what FILE has and this checkout lacks, and exits with 1 if there is anything. What is new is
no difference: an interface may grow.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import json
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
FLAG = re.compile(r"(?<![\w-])--?[a-zA-Z][\w-]*")
COMMANDS = re.compile(r"^[a-z ]+:\n  [A-Z]+\n((?:    .*\n)+)", re.MULTILINE)
"""A group of commands in a help text."""
SERVICES = {
    "baton": "baton.cli.main",
    "baton-prefill": "baton_prefill.main",
    "baton-decode": "baton_decode.main",
    "baton-router": "baton_router.main",
    "baton-kvstore": "baton_kvstore.main",
}
FACES = (
    *("baton", "baton.client", "baton.engine", "baton.errors", "baton.types", "baton.testing"),
    *("baton.config", "baton.kv_cache.connector", "baton.kv_transfer.pipes.base", "baton.hashing"),
)
"""Modules that users import: the SDK, the offline engine, and what plug-ins are written against."""
MESSAGES = ("common", "events", "kvstore", "router", "worker")


def help_of(module: str, *words: str) -> str:
    """Return what a command prints for ``--help``."""
    with contextlib.redirect_stdout(io.StringIO()) as output, contextlib.suppress(SystemExit):
        importlib.import_module(module).main([*words, "--help"])
    return output.getvalue()


def list_flags() -> dict[str, list[str]]:
    """Return the flags of every command, by its words."""
    flags: dict[str, list[str]] = {}
    for name, module in SERVICES.items():
        waiting: list[tuple[str, ...]] = [()]
        while waiting:
            words = waiting.pop()
            text = help_of(module, *words)
            flags[" ".join([name, *words])] = sorted(set(FLAG.findall(text)))
            group = COMMANDS.search(text)
            if group is not None:
                waiting += [(*words, each) for each in re.findall(r"^    (\w[\w-]*)", group[1], re.M)]
    return flags


def list_endpoints() -> dict[str, list[str]]:
    """Return the methods of every HTTP path that ``/openapi.json`` names, and the fields of every body."""
    document = importlib.import_module("baton_router.frontend.document").openapi(keyed=True, metrics_port=9464)
    endpoints = {path: sorted(operations) for path, operations in document["paths"].items()}
    for name, schema in document["components"]["schemas"].items():
        endpoints[f"schema {name}"] = sorted(schema.get("properties", {}))
    return endpoints


def list_metrics() -> dict[str, list[str]]:
    """Return kind and labels of every metric that docs/metrics.md names; a test compares that page with the code."""
    metrics = {}
    for cell, kind in re.findall(r"^\| (`baton_.+?) \| (\w+) \| .+ \|$", (ROOT / "docs/metrics.md").read_text(), re.M):
        for name, labels in re.findall(r"`(baton_\w+)(?:\{([\w,]+)\})?`", cell):
            metrics[name] = [kind, *sorted(filter(None, labels.split(",")))]
    return metrics


def list_rpcs() -> dict[str, list[str]]:
    """Return the methods of every service, and the numbers and names of every message's fields."""
    rpcs: dict[str, list[str]] = {}
    for name in MESSAGES:
        file = importlib.import_module(f"baton.api.v1.{name}_pb2").DESCRIPTOR
        for service in file.services_by_name.values():
            rpcs[service.full_name] = sorted(method.name for method in service.methods)
        for message in file.message_types_by_name.values():
            rpcs[message.full_name] = sorted(f"{field.number} {field.name}" for field in message.fields)
    return rpcs


def list_names() -> dict[str, list[str]]:
    """Return the public names of the modules that users import, and the methods of the classes among them."""
    names: dict[str, list[str]] = {}
    for face in FACES:
        module = importlib.import_module(face)
        public = getattr(module, "__all__", None) or [
            name
            for name, value in vars(module).items()
            if not name.startswith("_") and getattr(value, "__module__", None) == face
        ]
        names[face] = sorted(public)
        for name in public:
            value: Any = getattr(module, name)
            if isinstance(value, type):
                fields = getattr(value, "__struct_fields__", ()) or getattr(value, "__dataclass_fields__", ())
                names[f"{face}.{name}"] = sorted({*fields, *(each for each in dir(value) if not each.startswith("_"))})
    return names


def list_interface() -> dict[str, dict[str, list[str]]]:
    """Return all of it."""
    return {
        "flags": list_flags(),
        "endpoints": list_endpoints(),
        "metrics": list_metrics(),
        "rpcs": list_rpcs(),
        "names": list_names(),
    }


def find_missing(before: dict[str, dict[str, list[str]]], now: dict[str, dict[str, list[str]]]) -> list[str]:
    """Return a line for each thing of ``before`` that ``now`` lacks."""
    missing = []
    for part, owners in before.items():
        for owner, items in owners.items():
            if owner not in now[part]:
                missing.append(f"{part}: {owner}")
            else:
                missing += [f"{part}: {owner}: {item}" for item in items if item not in now[part][owner]]
    return missing


def main() -> int:
    """Print the interface, or what is missing of an earlier one."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--compare", type=Path, help="an earlier output")
    args = parser.parse_args()
    now = list_interface()
    if args.compare is None:
        print(json.dumps(now, indent=1, sort_keys=True))
        return 0
    missing = find_missing(json.loads(args.compare.read_text()), now)
    print("\n".join(missing) if missing else "nothing is missing")
    return int(bool(missing))


if __name__ == "__main__":
    sys.exit(main())
