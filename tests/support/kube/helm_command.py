"""Helm's command line as documents use it, run by Helm's own engine inside this process."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path
from typing import Any

import yaml

WAIT_S = 240


def helm(kubeconfig: str, folder: Path, command: str) -> str:
    """Run ``helm ...``; it blocks, and returns the notes, or what a test printed.

    Args:
        kubeconfig: Content of a kubeconfig.
        folder: That paths are relative to.
        command: The command line: install, upgrade, rollback, test, uninstall.

    Raises:
        SystemExit: It has a flag or form that is not known here.
        helm_python.HelmError: It failed.
    """
    import helm_python

    args = _parser().parse_args(shlex.split(command)[1:])
    with helm_python.Config(kubeconfig_content=kubeconfig, namespace=args.namespace) as config:
        if args.verb in ("install", "upgrade"):
            values = _values(args, folder)
            run = config.install if args.verb == "install" else config.upgrade
            options: dict[str, Any] = {"namespace": args.namespace, "timeout": WAIT_S}
            options |= {"wait": "watcher" if args.wait else None}
            options |= {"create_namespace": args.create_namespace} if args.verb == "install" else {}
            options |= {"reuse_values": args.reuse_values} if args.verb == "upgrade" else {}
            return str(run(folder / args.chart, args.name, values, **options)["status"])
        if args.verb == "rollback":
            config.rollback(args.name, version=args.revision, timeout=WAIT_S, wait="watcher" if args.wait else None)
            return "deployed"
        if args.verb == "test":
            return str(config.test(args.name, timeout=WAIT_S, logs=args.logs).get("logs", ""))
        return str(config.uninstall(args.name, timeout=WAIT_S, wait="watcher" if args.wait else None)["info"])


def _values(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    import helm_python

    found: dict[str, Any] = {}
    for path in args.values:
        found = _over(found, yaml.safe_load((folder / path).read_text(encoding="utf-8")))
    for text in args.set:
        found = _over(found, helm_python.parse_set_string(text))
    return found


def _over(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    made = dict(below)
    for key, value in above.items():
        both = isinstance(value, dict) and isinstance(made.get(key), dict)
        made[key] = _over(made[key], value) if both else value
    return made


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="helm", allow_abbrev=False)
    verbs = parser.add_subparsers(dest="verb", required=True)
    for verb in ("install", "upgrade", "rollback", "test", "uninstall"):
        one = verbs.add_parser(verb, allow_abbrev=False)
        one.add_argument("name")
        one.add_argument("--namespace", "-n", default="default")
        one.add_argument("--wait", action="store_true")
        if verb in ("install", "upgrade"):
            one.add_argument("chart")
            one.add_argument("--set", action="append", default=[])
            one.add_argument("--values", "-f", action="append", default=[])
            one.add_argument("--create-namespace", action="store_true")
            one.add_argument("--reuse-values", action="store_true")
        if verb == "rollback":
            one.add_argument("revision", type=int, nargs="?")
        if verb == "test":
            one.add_argument("--logs", action="store_true")
    return parser
