"""``baton generate``: streams the answer to one prompt."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from typing import Any

from baton.cli.router import add_grpc_flags, open_client
from baton.client import Generation
from baton.errors import ConfigError

SAMPLING = {
    "max_tokens": (int, "N", "tokens to generate at most (default: the rest of the context)"),
    "temperature": (float, "X", "0: the most likely token each time (default: 1)"),
    "top_p": (float, "X", "draw from the most likely tokens that have so much of the probability"),
    "seed": (int, "N", "seed of what is drawn"),
}
"""Flags that are passed to the SDK as keywords of the same name."""


def add_sampling_flags(parser: argparse.ArgumentParser) -> None:
    """Add the sampling flags."""
    for name, (kind, metavar, text) in SAMPLING.items():
        flag = "--" + name.replace("_", "-")
        parser.add_argument(flag, type=kind, metavar=metavar, default=argparse.SUPPRESS, help=text)
    parser.add_argument("--model", default="", help="model to ask for; default: the one that is served")


def sampling_of(args: argparse.Namespace) -> dict[str, Any]:
    """Return the given sampling flags as keywords of the SDK."""
    return {name: getattr(args, name) for name in SAMPLING if hasattr(args, name)}


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("generate", help="let a prompt be continued; the text comes as it is made")
    parser.add_argument("prompt", metavar="PROMPT", help="the text; -: from standard input")
    add_sampling_flags(parser)
    parser.add_argument("--stop", action="append", default=[], help="end before this text; may be repeated")
    parser.add_argument("--json", action="store_true", help="print the whole answer as one JSON object, at its end")
    add_grpc_flags(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Generate and print the answer; returns the exit status.

    Raises:
        ConfigError: An argument is invalid.
        BatonError: The router refuses or does not answer.
    """
    prompt = sys.stdin.read() if args.prompt == "-" else args.prompt
    if not prompt:
        raise ConfigError("PROMPT must not be empty", field="prompt")
    options = sampling_of(args) | ({"stop": args.stop} if args.stop else {})
    with open_client(args) as client:
        if args.json:
            answer = client.generate(prompt, model=args.model, **options)
            print(json.dumps(as_json(answer), indent=2, ensure_ascii=False))
            return 0
        with client.generate(prompt, model=args.model, stream=True, **options) as stream:
            for chunk in stream:
                print(chunk.text, end="", flush=True)
    print()
    return 0


def as_json(answer: Generation) -> dict[str, Any]:
    """Return an answer as JSON fields."""
    return {
        "request_id": answer.request_id,
        "text": answer.text,
        "token_ids": answer.token_ids,
        "finish_reason": answer.finish_reason,
        "trace": None if answer.trace is None else dataclasses.asdict(answer.trace),
    }
